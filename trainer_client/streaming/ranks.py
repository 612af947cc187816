"""The ranks of a trainer that publish one version in step, and how they exchange what became of it.

Invariants:
- `exchange` is a collective: every rank calls it equally often, and gets all ranks' messages in the order of ranks;
- no object is pickled: messages are bytes of a bounded length.
"""

from __future__ import annotations

from typing import Any, Protocol

MESSAGE_BYTES_MAX = 8192
"""Of one rank, in one exchange. A fixed length needs one collective instead of two."""
_LENGTH_BYTES = 4


class Ranks(Protocol):
    """All processes that take the tensors of a stream in step."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank. Blocks until all ranks have called it."""


class OneRank:
    """A trainer of one process; or one whose other ranks take the tensors by themselves."""

    index = 0
    count = 1

    def exchange(self, message: bytes) -> list[bytes]:
        return [message]


class TorchRanks:
    """The ranks of a `torch.distributed` process group; all of them by default.

    `device`: where the messages of the exchange lie. Default: the current GPU with NCCL, else the CPU.
    """

    def __init__(self, group: Any = None, *, device: Any = None) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._group = torch, dist, group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._device = device

    def exchange(self, message: bytes) -> list[bytes]:
        assert len(message) <= MESSAGE_BYTES_MAX
        torch, size = self._torch, _LENGTH_BYTES + MESSAGE_BYTES_MAX
        padded = bytearray(len(message).to_bytes(_LENGTH_BYTES, "big") + message).ljust(size, b"\0")
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        found = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(self.count)]
        self._dist.all_gather(found, mine, group=self._group)
        return [_unpadded(one.cpu().numpy().tobytes()) for one in found]


def _unpadded(data: bytes) -> bytes:
    length = int.from_bytes(data[:_LENGTH_BYTES], "big")
    return data[_LENGTH_BYTES : _LENGTH_BYTES + length]
