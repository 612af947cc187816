"""Bytes of a tensor for the writer: in place where they lie in this host's memory, else through pinned memory.

Invariants:
- a tensor on a GPU is never whole in host memory: two pinned buffers take turns, one is filled on a stream of its own
  while the other one is written to the relay;
- a piece is valid until the next one is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

STAGING_BYTES = 32 << 20
"""Of each of the two buffers. PCIe is at full speed from a few MiB on."""


class StagingRing:
    """Two host buffers of STAGING_BYTES, allocated at the first use and kept: pinning memory is slow."""

    def __init__(self, buffer_bytes: int = STAGING_BYTES) -> None:
        self.buffer_bytes = buffer_bytes
        self._buffers: list[Any] = []
        self._streams: dict[Any, Any] = {}

    def pieces(self, tensor: Any, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """The bytes of a torch tensor of any device, in pieces: `ranges` of byte offsets, each fits a buffer."""
        import torch

        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        stream = self._stream(flat.device)
        filling = self._fills(flat, ranges, stream)
        ahead = next(filling, None)
        while ahead is not None:
            buffer, event, num = ahead
            ahead = next(filling, None)  # begins to fill the other buffer, whose piece the caller is done with
            if event is not None:
                event.synchronize()
            yield memoryview(buffer[:num].numpy())

    def _fills(self, flat: Any, ranges: Iterable[tuple[int, int]], stream: Any) -> Iterator[tuple[Any, Any, int]]:
        import torch

        for number, (start, end) in enumerate(ranges):
            buffer = self._buffer(number % 2, end - start, pinned=stream is not None)
            if stream is None:
                buffer[: end - start].copy_(flat[start:end])
                yield buffer, None, end - start
                continue
            with torch.cuda.stream(stream):
                buffer[: end - start].copy_(flat[start:end], non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            yield buffer, event, end - start

    def _buffer(self, number: int, num_bytes: int, *, pinned: bool) -> Any:
        import torch

        size = max(num_bytes, self.buffer_bytes)  # chunks may be larger than the buffers
        while len(self._buffers) <= number:
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        if len(self._buffers[number]) < num_bytes or (pinned and not self._buffers[number].is_pinned()):
            self._buffers[number] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[number]

    def _stream(self, device: Any) -> Any:
        """The side stream of a GPU, after what the current stream has yet to compute; None on a CPU."""
        if device.type != "cuda":
            return None
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]
