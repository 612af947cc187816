"""What a publisher refuses by itself, before it asks a relay."""

from __future__ import annotations

import pytest

from paramserver.client import RelayClient, TensorSource, announced, publish
from protos.errors import TooLarge


async def test_more_names_than_one_announcement_holds_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own words are of messages."""
    monkeypatch.setattr(announced, "ANNOUNCEMENT_BYTES_MAX", 10_000)
    tensors = [TensorSource(f"layer.{number}", "U8", (8,), lambda: memoryview(bytes(8))) for number in range(1000)]
    async with RelayClient("127.0.0.1:1") as relay:
        with pytest.raises(TooLarge, match=r"of 1000 tensors take .* KiB, an announcement 9\.766 KiB at most"):
            await publish(relay, "policy", tensors, step=1, run="r")
