"""What a publisher refuses by itself, before it asks a relay."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paramserver.client import RelayClient, TensorSource, announced, publish
from protos.errors import TooLarge, Unavailable
from trainer_client import Publisher, TensorMeta, gateway_http


async def test_more_names_than_one_announcement_holds_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own words are of messages."""
    monkeypatch.setattr(announced, "ANNOUNCEMENT_BYTES_MAX", 10_000)
    tensors = [TensorSource(f"layer.{number}", "U8", (8,), lambda: memoryview(bytes(8))) for number in range(1000)]
    async with RelayClient("127.0.0.1:1") as relay:
        with pytest.raises(TooLarge, match=r"of 1000 tensors take .* KiB, an announcement 9\.766 KiB at most"):
            await publish(relay, "policy", tensors, step=1, run="r")


@pytest.mark.parametrize("once", [False, True])
def test_a_stream_waits_for_a_relay_that_starts_later(
    once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that looks first whether its step was published before, as a trainer that is started again does."""
    monkeypatch.setattr(gateway_http, "PATIENCE_S", 0.5)
    with Publisher("127.0.0.1:9") as publisher, pytest.raises(Unavailable, match="no relay answers"):
        publisher.publish_stream((TensorMeta("w", "F32", (1,)),), {}, step=1, once=once)
    assert sum(record.message.endswith("trying again for 0 s") for record in caplog.records) == 1


def test_a_publish_that_is_interrupted_as_its_turn_begins_leaves_it_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_http, "PATIENCE_S", 0.0)
    manifest = (TensorMeta("w", "F32", (1,)),)
    with ThreadPoolExecutor(1) as other, Publisher("127.0.0.1:9") as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(publisher._loop, "run", Interrupted(publisher._loop.run))
            with pytest.raises(KeyboardInterrupt):
                publisher.publish_stream(manifest, {}, step=1)
        with pytest.raises(Unavailable, match="no relay answers"):
            other.submit(publisher.publish_stream, manifest, {}, step=1).result(60)


class Interrupted:
    """Its first work is done, and its caller gets Ctrl-C before it hears of that."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run, self._interrupts = run, iter((True,))

    def __call__(self, work: Any) -> Any:
        found = self._run(work)
        if next(self._interrupts, False):
            raise KeyboardInterrupt
        return found
