"""The ranks of a trainer that publish one version in step, and how they exchange what became of it.

Invariants:
- `exchange` is a collective: every rank calls it equally often, and gets all ranks' messages in the order of ranks;
- no object is pickled: messages are bytes of a bounded length;
- a rank that left the tensors' collectives by an error joins no exchange before the others have come to it: it would be
  taken for a part of the collective that they are in.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from protos.errors import InvalidRequest

MESSAGE_BYTES_MAX = 8192
"""Of one rank, in one exchange. A fixed length needs one collective instead of two."""
_LENGTH_BYTES = 4


LEAVE_S = 10.0
"""For the others to come to the exchange, when the iterator of one rank has raised."""
LOOK_S = 0.05


class Ranks(Protocol):
    """All processes that take the tensors of a stream in step.

    One may also have `others_come(within_s) -> bool`: whether all others come to the next exchange by then. Without it
    an error of an iterator is raised by its own rank alone.
    """

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank. Blocks until all ranks have called it."""


def check_ranks(ranks: Any, *methods: str) -> None:
    """InvalidRequest for what is not the ranks of a trainer; `methods`: that they need besides those of `Ranks`."""
    if not all(hasattr(ranks, name) for name in ("index", "count", "exchange", *methods)):
        raise InvalidRequest(
            f"ranks={ranks!r}", hint="pass TorchRanks(), or TorchRanks(group), after init_process_group"
        )


def exchange_all(ranks: Ranks, message: bytes) -> list[bytes]:
    """Every rank's message, of any length, in as many exchanges as the longest one needs."""
    lengths = [int.from_bytes(one, "big") for one in ranks.exchange(len(message).to_bytes(8, "big"))]
    found = [bytearray() for _ in lengths]
    for at in range(0, max(lengths), MESSAGE_BYTES_MAX):
        for whole, part in zip(found, ranks.exchange(message[at : at + MESSAGE_BYTES_MAX]), strict=True):
            whole += part
    return [bytes(one) for one in found]


class OneRank:
    """A trainer of one process; or one whose other ranks take the tensors by themselves."""

    index = 0
    count = 1

    def exchange(self, message: bytes) -> list[bytes]:
        return [message]


_num_exchanged: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By process group: the number of each exchange is the same on all its ranks, whichever objects they call it by."""


class TorchRanks:
    """The ranks of a `torch.distributed` process group; all of them by default.

    `device`: where the messages of the exchange lie. Default: the current GPU with NCCL, else the CPU.
    """

    def __init__(self, group: Any = None, *, device: Any = None) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        self._torch, self._dist, self._group = torch, dist, group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._device = device
        self._whole = c10d._get_default_group() if group is None else group
        self._store = c10d.PrefixStore(f"laminar/{self._whole.group_name}", c10d._get_default_store())

    def others_come(self, within_s: float) -> bool:
        """Whether all other ranks come to the next exchange by then, so that this one can join it."""
        number = self._come()
        missing, by = set(range(self.count)) - {self.index}, time.monotonic() + within_s
        while True:
            missing -= {rank for rank in missing if self._has_come(rank, number)}
            if not missing or time.monotonic() > by:
                return not missing
            time.sleep(LOOK_S)

    def _come(self) -> int:
        """Leaves word that this rank comes to the next exchange; its number."""
        number = _num_exchanged.get(self._whole, 0) + 1
        self._store.set(str(self.index), str(number))
        return number

    def _has_come(self, rank: int, number: int) -> bool:
        return self._store.check([str(rank)]) and int(self._store.get(str(rank))) >= number

    def exchange(self, message: bytes) -> list[bytes]:
        assert len(message) <= MESSAGE_BYTES_MAX
        _num_exchanged[self._whole] = self._come()
        torch, size = self._torch, _LENGTH_BYTES + MESSAGE_BYTES_MAX
        padded = bytearray(len(message).to_bytes(_LENGTH_BYTES, "big") + message).ljust(size, b"\0")
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        found = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(self.count)]
        self._dist.all_gather(found, mine, group=self._group)
        return [_unpadded(one.cpu().numpy().tobytes()) for one in found]

    def swap(self, sends: Sequence[Sequence[memoryview]], num_bytes: Sequence[int]) -> list[memoryview]:
        """What each rank sent to this one, `num_bytes` of them. `sends`: pieces for each rank. A collective."""
        torch = self._torch
        lengths = [sum(len(piece) for piece in pieces) for pieces in sends]
        mine = torch.empty(sum(lengths), dtype=torch.uint8)
        at, into = 0, memoryview(mine.numpy())
        for piece in (piece for pieces in sends for piece in pieces):
            into[at : at + len(piece)] = piece
            at += len(piece)
        found = torch.empty(sum(num_bytes), dtype=torch.uint8, device=self._device)
        self._dist.all_to_all_single(found, mine.to(self._device), list(num_bytes), lengths, group=self._group)
        whole = memoryview(found.cpu().numpy())
        starts = [sum(num_bytes[:rank]) for rank in range(self.count)]
        return [whole[start : start + num] for start, num in zip(starts, num_bytes, strict=True)]


def _unpadded(data: bytes) -> bytes:
    length = int.from_bytes(data[:_LENGTH_BYTES], "big")
    return data[_LENGTH_BYTES : _LENGTH_BYTES + length]
