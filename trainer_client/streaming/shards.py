"""What one rank holds of a sharded model: its rows of each tensor, and their bytes.

Invariants:
- a tensor sharded by its rows is never gathered, and what is made of it (a cast, a copy from a GPU) is of its local
  rows;
- at most CASTS_KEPT casts and the gathered tensors of one round lie in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from protos.errors import InvalidRequest
from trainer_client.sources import NAN_CHECK_BYTES, NamedTensors, Ties, refuse_nan
from trainer_client.streaming.manifest import TensorMeta, memory_of
from trainer_client.streaming.names import Names, renamed
from trainer_client.streaming.staging import StagingRing
from trainer_client.torch_sources import cast, source

CASTS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Shard:
    """One named tensor as this rank holds it: rows [start, end) of the whole; `local` is None if it has to be gathered.

    A tensor without dimensions is one row.
    """

    meta: TensorMeta
    tensor: Any
    local: torch.Tensor | None
    start: int
    end: int
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.meta.shape[0] if self.meta.shape else 1


def shards_of(tensors: NamedTensors, names: Names | None, dtype: torch.dtype | None) -> dict[str, Shard]:
    """Each tensor by the name that it is published under. InvalidRequest for what cannot be published."""
    found: dict[str, Shard] = {}
    pairs = renamed(tensors, names)
    ties = Ties(pairs)
    for name, tensor in pairs.items() if isinstance(pairs, Mapping) else pairs:
        if name in found:
            raise InvalidRequest(f"tensor {name!r} comes twice", hint="give each name once")
        found[name] = _shard(name, tensor, dtype)
        ties.check_kept(name, memory_of(name, tensor))
    return found


def _shard(name: str, tensor: Any, dtype: torch.dtype | None) -> Shard:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(
            f"{name!r} is a {type(tensor).__name__}, not a tensor", hint="leave other entries of a state dict out"
        )
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    meta, num_rows = TensorMeta(name, str(cast), tuple(tensor.shape)), tensor.shape[0] if tensor.dim() else 1
    if not hasattr(tensor, "to_local"):
        source(name, tensor)  # refuses one without bytes of its own
        return Shard(meta, tensor.detach(), tensor.detach(), 0, num_rows, cast)
    rows = _rows(name, tensor, num_rows)
    if rows is None:
        return Shard(meta, tensor.detach(), None, 0, num_rows, cast)
    local = tensor.to_local().detach()
    if (local.shape[0] if local.dim() else 1) != rows[1] - rows[0] and rows[0] < rows[1]:
        raise InvalidRequest(
            f"this rank has {local.shape[0]} rows of tensor {name!r}, its placement makes {rows[1] - rows[0]}",
            hint="publish it by publish_stream and gathered()",
        )
    return Shard(meta, tensor.detach(), local, *rows, cast)


def _rows(name: str, tensor: Any, num_rows: int) -> tuple[int, int] | None:
    """The rows that a DTensor's placements give to this rank; None where they are not rows side by side."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ByDimension

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in its mesh
        return (0, 0)
    start, end = 0, num_rows
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not ByDimension or placement.dim % max(tensor.dim(), 1) != 0:  # strided, too, is no rows
            return None
        share = -(-(end - start) // tensor.device_mesh.size(dimension))  # as torch.chunk
        low = start + coordinate[dimension] * share
        start, end = min(low, end), min(low + share, end)
    return (start, end)


def _host(flat: torch.Tensor) -> memoryview:
    found: Any = flat.cpu().numpy()
    return memoryview(found)


class LocalBytes:
    """The bytes of this rank's shards. `gather` is a collective; the rest is local."""

    def __init__(self, shards: Mapping[str, Shard], staging: StagingRing, *, check_nan: bool) -> None:
        self._shards, self._staging, self._check_nan = shards, staging, check_nan
        self._casts: dict[str, torch.Tensor] = {}
        self._gathered: dict[str, torch.Tensor] = {}
        self._checked: set[str] = set()

    def gather(self, names: set[str]) -> None:
        """Gathers these tensors, in the order of their names on every rank; lets go of all others gathered before."""
        self._gathered = {name: tensor for name, tensor in self._gathered.items() if name in names}
        for name in sorted(names - self._gathered.keys()):
            shard = self._shards[name]
            whole = shard.tensor.full_tensor().detach()
            self._gathered[name] = whole if whole.dtype is shard.dtype else cast(name, whole, shard.dtype)

    def read(self, name: str, start: int, end: int) -> memoryview:
        """Bytes [start, end) of the whole tensor, in host memory. InvalidRequest when this rank's begin with NaN."""
        flat, offset = self._flat(name)
        piece = flat[start - offset : end - offset]
        return _host(piece)

    def pieces(self, name: str, start: int, end: int, bytes_max: int) -> Iterator[tuple[int, memoryview]]:
        """The same in pieces of `bytes_max`, each with the bytes before it; each valid until the next one."""
        flat, offset = self._flat(name)
        if flat.device.type == "cpu":
            yield 0, self.read(name, start, end)
            return
        ranges = [(low - offset, min(low + bytes_max, end) - offset) for low in range(start, end, bytes_max)]
        for (low, _), piece in zip(ranges, self._staging.pieces(flat, ranges), strict=True):
            yield low + offset - start, piece

    def _flat(self, name: str) -> tuple[torch.Tensor, int]:
        """The bytes here, on their device, and where they begin in the whole tensor."""
        shard = self._shards[name]
        tensor = self._gathered.get(name, shard.local)
        assert tensor is not None, "gathered before its first piece is due"
        if tensor.dtype is not shard.dtype:
            tensor = self._cast(name, tensor, shard.dtype)
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if self._check_nan and name not in self._checked:
            refuse_nan(name, shard.meta.dtype, _host(flat[:NAN_CHECK_BYTES]))
            self._checked.add(name)
        row_bytes = shard.meta.size_bytes // max(shard.num_rows, 1)
        return flat, 0 if shard.local is None else shard.start * row_bytes

    def _cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._casts:
            while len(self._casts) >= CASTS_KEPT:
                del self._casts[next(iter(self._casts))]
            self._casts[name] = cast(name, tensor, dtype)
        return self._casts[name]
