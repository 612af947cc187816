"""A batch of experience: trajectories under a lease, as packed arrays or one by one.

A gateway sends packed rows (`protos.packed`); one of before sends msgpack, and its batches are the same to their user.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protos import packed
from protos.decoding import decode_msgpack
from protos.packed import MEDIA_TYPE, Damaged, Row
from protos.trajectories import Trajectory
from trainer_client.trajectories import Packed, pack, pack_rows

ACCEPTED = f"{MEDIA_TYPE}, application/msgpack"


class Batch:
    """Trajectories leased to this reader, or only looked at (`peek`); empty when none were there within the wait, and
    then `why` has the numbers.

    `heads` are the trajectories without their tokens, `trajectories` the whole, which cost a Python object for each
    token; both are made when first asked for. `pack` takes the arrays as they came.
    """

    def __init__(
        self,
        lease_id: str,
        trajectories: Sequence[Trajectory] = (),
        *,
        rows: Sequence[Row] | None = None,
        bound: tuple[int, int] | None = None,
        why: str = "",
    ) -> None:
        """`rows` or `trajectories`. `bound`: the trainer's version, and how many versions a token may be behind it to
        be trained on; None: all that were sampled are. `why`: in numbers, why the gateway had nothing."""
        self.lease_id = lease_id
        self.why = why
        self.leased_until_s = 0.0
        """When the lease ends, by this process's monotonic clock."""
        self._rows, self._bound = rows, bound
        self._heads = tuple(trajectories) if rows is None else None
        self._trajectories = self._heads
        self._length = len(trajectories) if rows is None else sum(len(row.labels) for row in rows)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Batch({self.lease_id!r}, {len(self)} trajectories)"

    @property
    def heads(self) -> tuple[Trajectory, ...]:
        if self._heads is None:
            self._heads = tuple(head for row in self._rows or () for head in row.heads)
        return self._heads

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        if self._trajectories is None:
            self._trajectories = tuple(leaf for row in self._rows or () for leaf in row.trajectories())
        return self._trajectories

    def pack(self) -> Packed:
        """The arrays that a trainer computes with; tokens beyond the sample's bound are masked."""
        found = pack(self.heads) if self._rows is None else pack_rows(self._rows)
        return found if self._bound is None else found.within(*self._bound)


class _Answer(msgspec.Struct):
    lease_id: str
    trajectories: list[Trajectory]
    why: str = ""


def batch_of(answer: bytes | memoryview, bound: tuple[int, int] | None = None) -> Batch:
    """The batch that a gateway answered with. Damaged if it is none."""
    if bytes(answer[: len(packed.BATCH_MAGIC)]) == packed.BATCH_MAGIC:
        lease_id, rows = packed.rows_of(answer)
        return Batch(lease_id, rows=[Row(row) for row in rows], bound=bound, why=packed.why_empty(answer))
    try:
        sampled = decode_msgpack(answer, _Answer)
    except msgspec.DecodeError as e:
        raise Damaged(str(e)) from e
    return Batch(sampled.lease_id, sampled.trajectories, bound=bound, why=sampled.why)
