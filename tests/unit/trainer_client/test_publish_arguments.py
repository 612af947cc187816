"""Arguments of a publish: defaults, and names that do not exist."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from paramserver.client.announced import announcement
from protos.errors import InvalidRequest
from trainer_client import Manifest, OneRank, TensorMeta
from trainer_client.streaming.arguments import PublishArguments, PublishOptions
from trainer_client.streaming.names import rename
from trainer_client.streaming.ranks import check_ranks


def test_what_is_not_given_has_its_default_and_what_is_for_the_relay_stands_apart() -> None:
    found = PublishArguments.of({"wait_room_s": 5.0, "wait": None, "allow_change": True}, "sealed")
    assert found == PublishArguments("sealed", {"wait_room_s": 5.0}, allow_change=True)
    assert PublishArguments.of({"wait": 2}, "sealed").wait == 2


def test_an_unknown_argument_is_named_with_those_that_exist() -> None:
    with pytest.raises(TypeError, match=r"publish has no argument 'file_bytes'; .*file_bytes_max"):
        PublishArguments.of(cast(PublishOptions, {"file_bytes": 1}), "copied")
    with pytest.raises(TypeError, match="'file_bytes'"):
        announcement("policy", [], **cast(Any, {"run": "r", "step": 1, "file_bytes": 1}))
    with pytest.raises(InvalidRequest, match="wait='soon'"):
        PublishArguments.of(cast(PublishOptions, {"wait": "soon"}), "copied")


@pytest.mark.parametrize("shape", [4, ("a",), (2.5,)])
def test_a_shape_that_is_none_is_named_with_its_tensor(shape: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tensor 'w' has the shape .*tuple of whole numbers"):
        TensorMeta("w", "F32", shape)


@pytest.mark.parametrize("given", [{"w": np.ones(2)}, [("w", np.ones(2))]])
def test_a_manifest_of_tensors_is_shown_how_to_make_one(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="manifest_of"):
        Manifest.of(given)


@pytest.mark.parametrize("names", ["x", [("a", "b", "c")], ["ab"]])
def test_a_name_map_that_is_none_is_shown_its_form(names: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"names holds .*pairs \(expression, replacement\)"):
        rename(names, "a")


def test_ranks_that_are_none_are_shown_torchs() -> None:
    check_ranks(OneRank())
    for ranks, methods in ((2, ()), (None, ("swap",)), (OneRank(), ("swap",))):
        with pytest.raises(InvalidRequest, match=r"pass TorchRanks\(\)"):
            check_ranks(ranks, *methods)
