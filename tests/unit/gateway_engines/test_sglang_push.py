"""The tensor that the gateway writes without torch is the one that the loader inside SGLang reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gateway.engines.sglang import LOADER, MANIFEST, manifest_tensor
from paramserver.plugins import sglang
from protos.errors import Corrupt, InvalidRequest
from tests.support.sglang.weights import load_custom, read_directory, read_pushed
from tests.support.snapshots import seal, tear
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow  # torch takes a second to import


class Model:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in weights}


def test_both_sides_agree_on_the_names() -> None:
    assert MANIFEST == sglang.MANIFEST
    module, _, function = LOADER.rpartition(".")
    assert (module, function) == (sglang.__name__, sglang.load_snapshot.__name__)


def test_a_snapshot_arrives_whole(tmp_path: Path) -> None:
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    model = Model()
    sglang.load_snapshot(model, read_pushed(manifest_tensor(snapshot.path, 3, snapshot.digest)))
    expected = load_file(tiny_model(seed=3) / "model.safetensors")
    assert model.tensors.keys() == expected.keys()
    assert all(torch.equal(model.tensors[name], expected[name]) for name in expected)


def test_an_allow_list_of_one_function_is_enough_for_it(tmp_path: Path) -> None:
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    told = load_custom(LOADER, manifest_tensor(snapshot.path, 3, snapshot.digest))
    assert told == read_directory(tiny_model(seed=3))


def test_a_snapshot_that_is_not_as_sealed_changes_nothing(tmp_path: Path) -> None:
    good, other = seal(tmp_path / "a", 3, tiny_model(seed=3)), seal(tmp_path / "b", 4, tiny_model(seed=4))
    torn = tear(seal(tmp_path / "c", 5, tiny_model(seed=5)))
    for path, digest in ((good.path, other.digest), (torn.path, torn.digest)):
        model = Model()
        with pytest.raises(Corrupt):
            sglang.load_snapshot(model, read_pushed(manifest_tensor(path, 3, digest)))
        assert model.tensors == {}


@pytest.mark.parametrize(
    "named",
    [
        [],
        [("model.norm.weight", torch.zeros(2))],
        [(MANIFEST, torch.tensor(list(b"{")))],
        [(MANIFEST, torch.tensor(list(b'{"path": 3}')))],
        [(MANIFEST, torch.zeros(2))],
    ],
)
def test_what_is_no_manifest_is_refused(named: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(InvalidRequest, match="manifest"):
        sglang.load_snapshot(Model(), named)
