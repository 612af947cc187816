"""Publishing in the background, and what a trainer's checkpoint keeps of its versions."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from protos.errors import Conflict, InvalidRequest, Unavailable
from tests.e2e.test_publish_sdk import when_free
from tests.e2e.test_publish_stream import read
from tests.support.relays import Relays
from trainer_client import Publisher, manifest_of
from trainer_client.sources import held_still, sources_of

pytestmark = pytest.mark.slow

NAN = {"w": torch.full((3,), torch.nan)}
FINE = {"w": torch.ones(3)}


def test_it_returns_before_the_relay_has_anything_and_only_stable_tensors_must_stay(relays: Relays) -> None:
    daemon = relays.start("a")
    tensors = {"changes": torch.ones(1 << 16), "stays": torch.ones(1 << 16), "tied": torch.zeros(0)}
    tensors["tied"] = tensors["changes"]
    with Publisher(daemon.ready["grpc"], timeout_s=60.0) as publisher:
        publisher.publish(tensors, step=0, wait="sealed")
        daemon.process.send_signal(signal.SIGSTOP)
        ticket = publisher.publish_async(tensors, step=1, stable={"stays"}, wait="sealed")
        tensors["changes"].zero_()
        assert not ticket.done()
        with pytest.raises(Unavailable, match=r"goes on after 0\.01 s"):
            ticket.result(0.01)
        daemon.process.send_signal(signal.SIGCONT)
        assert ticket.result().step == 1
        assert ticket.done()
        found = read(daemon, ticket.result().version)
        assert publisher.publish_async(tensors, step=2, stable=True, wait="sealed").result().version == 3
    assert found.keys() == {"changes", "stays"}
    assert all(tensor.eq(1).all() for tensor in found.values())


def test_a_publish_that_got_no_turn_leaves_that_of_another_thread_alone(relays: Relays) -> None:
    daemon = relays.start("a")
    inside, go_on = threading.Event(), threading.Event()

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        inside.set()
        assert go_on.wait(60)
        yield from FINE.items()

    with Publisher(daemon.ready["grpc"], timeout_s=60.0) as publisher, ThreadPoolExecutor(1) as other:
        streamed = other.submit(publisher.publish_stream, manifest_of(FINE), items(), step=1)
        try:
            assert inside.wait(60)
            publisher.publish_async(FINE, step=2, dtype="int8")
            with pytest.raises(InvalidRequest, match="int8"):
                publisher.publish_stream(manifest_of(FINE), FINE, step=3)
            later = publisher.publish_async(FINE, step=4)
            with pytest.raises(Unavailable, match="goes on after"):
                later.result(1)
        finally:
            go_on.set()
        versions = [streamed.result(60).version, later.result(60).version]
        assert [publisher.step_of(version) for version in versions] == [1, 4]


def test_an_error_is_raised_once_by_result_or_by_the_next_call(relays: Relays) -> None:
    daemon = relays.start("a")
    with Publisher(daemon.ready["grpc"]) as publisher:
        ticket = publisher.publish_async(NAN, step=1)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="'w' holds NaN"):
                ticket.result()
        publisher.publish(FINE, step=2)
        publisher.publish_async(NAN, step=3)
        with pytest.raises(InvalidRequest, match="'w' holds NaN"):
            publisher.publish(FINE, step=4)
        last = publisher.publish_async(FINE, step=5).result()
        assert last.step == 5
        publisher.publish_async(FINE, step=6)  # nobody asks: the end waits for it
    with pytest.raises(InvalidRequest, match="'w' holds NaN"), Publisher(daemon.ready["grpc"], "other") as publisher:
        publisher.publish_async(NAN, step=1)
    with pytest.raises(Conflict, match="closed"):
        publisher.publish_async(FINE, step=2)


def test_a_resumed_trainer_goes_on_with_its_versions_and_steps(relays: Relays) -> None:
    daemon = relays.start("a")
    file = io.BytesIO()
    with Publisher(daemon.ready["grpc"], run="first") as publisher:
        assert (publisher.version, publisher.step_of(1)) == (0, None)
        for step in (10, 20):
            publisher.publish(FINE, step=step, wait="sealed")
        torch.save({"publisher": publisher.state_dict()}, file)
        publisher.publish(FINE, step=30, wait="sealed")  # the checkpoint is older than the newest version
    file.seek(0)
    state = torch.load(file, weights_only=True)["publisher"]
    assert (state["run"], state["version"], state["steps"]) == ("first", 2, [[1, 10], [2, 20]])
    with Publisher(daemon.ready["grpc"]) as resumed:
        for wrong, message in (
            ({}, "no state of a publisher"),
            ({**state, "model": "critic"}, "of model 'critic' for a publisher of 'policy'"),
            ({**state, "format": 9}, "format 9"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                resumed.load_state_dict(wrong)
        resumed.load_state_dict(state)
        assert (resumed.version, resumed.step_of(2), resumed.step_of(3)) == (2, 20, None)
        ticket = when_free(resumed, FINE, 21)
        assert (ticket.version, resumed.version, resumed.step_of(4)) == (4, 4, 21)
        assert resumed.state_dict()["steps"] == [[1, 10], [2, 20], [4, 21]]
        with pytest.raises(InvalidRequest, match="has published already"):
            resumed.load_state_dict(state)


def test_what_is_held_still_is_copied_once_and_only_where_it_may_change() -> None:
    shared, other = torch.arange(4.0), np.arange(3)
    tensors = {"embed": shared, "head": shared, "other": other, "view": shared[:2]}
    held = dict(held_still(tensors, lambda name: name == "other"))
    assert np.shares_memory(held["other"], other)
    assert held["embed"] is held["head"]
    assert held["embed"].data_ptr() != shared.data_ptr()
    assert sources_of(held).tied == {"head": "embed"}
    shared.zero_()
    assert held["view"].tolist() == [0.0, 1.0]
    assert dict(held_still(tensors, True))["embed"].data_ptr() == shared.data_ptr()
