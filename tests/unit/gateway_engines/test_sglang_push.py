"""The tensor that the gateway writes without torch is the one that the loader inside SGLang reads."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from gateway.engines.sglang import LOADER, MANIFEST, REPORT, manifest_tensor
from paramserver.plugins import sglang
from tests.support.sglang import weights
from tests.support.sglang.weights import load_custom, read_directory, read_pushed
from tests.support.snapshots import seal, tear
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow  # torch takes a second to import


class Model:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.full = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name] = tensor.clone()
            if self.full:
                raise RuntimeError("out of memory")

    def get_weights_by_name(self, name: str, truncate_size: int = 100, tp_size: int = 1) -> list[float]:
        return [1.0, 2.0][:truncate_size]


def report(model: Model) -> sglang.Report:
    return msgspec.json.decode(bytes(map(int, model.get_weights_by_name(REPORT))), type=sglang.Report)


def test_both_sides_agree_on_the_names() -> None:
    assert (MANIFEST, REPORT) == (sglang.MANIFEST, sglang.REPORT)
    module, _, function = LOADER.rpartition(".")
    assert (module, function) == (sglang.__name__, sglang.load_snapshot.__name__)


def test_a_snapshot_arrives_whole(tmp_path: Path) -> None:
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    model = Model()
    sglang.load_snapshot(model, read_pushed(manifest_tensor(snapshot.path, 3, snapshot.digest)))
    expected = load_file(tiny_model(seed=3) / "model.safetensors")
    assert model.tensors.keys() == expected.keys()
    assert all(torch.equal(model.tensors[name], expected[name]) for name in expected)
    assert report(model) == sglang.Report(snapshot.digest, "")
    assert model.get_weights_by_name("model.norm.weight", 1) == [1.0], "the others are read as before"


def test_an_allow_list_of_one_function_is_enough_for_it(tmp_path: Path) -> None:
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    model = weights.Model()
    load_custom(LOADER, manifest_tensor(snapshot.path, 3, snapshot.digest), model)
    assert model.digest == read_directory(tiny_model(seed=3))


def test_a_snapshot_that_is_not_as_sealed_changes_nothing(tmp_path: Path) -> None:
    good, other = seal(tmp_path / "a", 3, tiny_model(seed=3)), seal(tmp_path / "b", 4, tiny_model(seed=4))
    torn = tear(seal(tmp_path / "c", 5, tiny_model(seed=5)))
    for path, digest in ((good.path, other.digest), (torn.path, torn.digest)):
        model = Model()
        sglang.load_snapshot(model, read_pushed(manifest_tensor(path, 3, digest)))
        assert model.tensors == {}
        assert report(model).digest == digest
        assert str(path) in report(model).error


def test_a_load_that_breaks_off_is_reported_and_the_next_one_by_its_own_outcome(tmp_path: Path) -> None:
    """Whatever a loader raises ends the server."""
    snapshot, model = seal(tmp_path, 3, tiny_model(seed=3)), Model()
    for model.full, error in ((True, "out of memory"), (False, "")):
        sglang.load_snapshot(model, read_pushed(manifest_tensor(snapshot.path, 3, snapshot.digest)))
        assert report(model) == sglang.Report(snapshot.digest, error)


@pytest.mark.parametrize(("errors", "told"), [(["", "torn"], "rank 1: torn"), (["", ""], "")])
def test_the_rank_that_answers_reports_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str], told: str
) -> None:
    def gather(found: list[str], own: str, group: str) -> None:
        assert (group, own) == ("of these ranks", errors[0])
        found[:] = errors

    parallel = types.SimpleNamespace(get_tp_group=lambda: types.SimpleNamespace(cpu_group="of these ranks"))
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", parallel)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: len(errors))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    snapshot, model = seal(tmp_path, 3, tiny_model(seed=3)), Model()
    sglang.load_snapshot(model, read_pushed(manifest_tensor(snapshot.path, 3, snapshot.digest)))
    assert report(model) == sglang.Report(snapshot.digest, told)


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
    model = Model()
    sglang.load_snapshot(model, named)
    assert "manifest" in report(model).error
    assert model.tensors == {}
