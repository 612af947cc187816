"""Arguments of a publish: defaults, and names that do not exist."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paramserver.client.announced import announcement
from protos.errors import InvalidRequest
from trainer_client.streaming.arguments import PublishArguments, PublishOptions


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
