"""Trajectories packed into flat arrays, as a trainer computes with them.

Invariants:
- the lists per token of a trajectory have equal length; `pack` refuses a trajectory whose lists differ;
- packed rows stand in the order of the batch, back to back, without padding: row i is
  `cu_seqlens[i]:cu_seqlens[i + 1]`, which is what variable-length attention kernels take;
- a loss mask of 1 marks a token that the policy sampled; its `logprobs` entry is the behaviour policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protos.errors import InvalidRequest
from protos.packed import COLUMNS, Label, Row
from protos.trajectories import Trajectory

if TYPE_CHECKING:
    import torch

ROWS_AT_ONCE = 16
"""Decompressed before they are converted: few enough that they stay in the processor's cache, at a tenth less time."""
_TYPES = {"token_ids": np.int64, "logprobs": np.float32, "loss_mask": np.bool_, "versions": np.int64}


@dataclass(frozen=True, slots=True)
class Packed:
    """T tokens of N trajectories. numpy arrays; `torch()` gives the same as torch tensors."""

    input_ids: npt.NDArray[np.int64]  # [T]
    position_ids: npt.NDArray[np.int64]  # [T], from 0 in every row
    loss_mask: npt.NDArray[np.bool_]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    versions: npt.NDArray[np.int64]  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [N + 1], from 0 to T
    rewards: npt.NDArray[np.float32]  # [N]
    group_index: npt.NDArray[np.int64]  # [N], groups numbered in order of appearance

    @property
    def num_trajectories(self) -> int:
        return len(self.rewards)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def row(self, index: int) -> slice:
        """The slice of trajectory `index` in the arrays per token."""
        return slice(int(self.cu_seqlens[index]), int(self.cu_seqlens[index + 1]))

    def staleness(self, trainer_version: int) -> npt.NDArray[np.int64]:
        """`trainer_version` minus the generating version, for each sampled token (staleness at use)."""
        return trainer_version - self.versions[self.loss_mask]

    def within(self, trainer_version: int, staleness_max: int) -> Packed:
        """The same with a loss mask of 0 for tokens more than `staleness_max` versions behind `trainer_version`."""
        return replace(self, loss_mask=self.loss_mask & (trainer_version - self.versions <= staleness_max))

    def padded(self, length: int | None = None, *, pad_id: int = 0) -> Padded:
        """One row for each trajectory, padded on the right to `length`, by default that of the longest."""
        lengths = np.diff(self.cu_seqlens)
        longest = int(lengths.max(initial=0))
        if length is not None and longest > length:
            raise InvalidRequest(f"a trajectory has {longest} tokens, more than {length}", hint="pad to more")
        shape = (self.num_trajectories, longest if length is None else length)
        attention_mask = np.arange(shape[1]) < lengths[:, None]

        def spread(values: npt.NDArray[Any], fill: object) -> npt.NDArray[Any]:
            out = np.full(shape, fill, dtype=values.dtype)
            out[attention_mask] = values
            return out

        return Padded(
            input_ids=spread(self.input_ids, pad_id),
            attention_mask=attention_mask,
            position_ids=spread(self.position_ids, 0),
            loss_mask=spread(self.loss_mask, False),
            logprobs=spread(self.logprobs, 0.0),
            versions=spread(self.versions, -1),
            rewards=self.rewards,
            group_index=self.group_index,
        )

    def torch(self) -> PackedTensors:
        """Torch tensors that share the memory of these arrays."""
        from trainer_client.torch_sources import from_numpy

        return PackedTensors(*(from_numpy(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Padded:
    """N trajectories in rows of L tokens. numpy arrays; `torch()` gives the same as torch tensors."""

    input_ids: npt.NDArray[np.int64]  # [N, L]
    attention_mask: npt.NDArray[np.bool_]  # [N, L]: False for padding
    position_ids: npt.NDArray[np.int64]  # [N, L]
    loss_mask: npt.NDArray[np.bool_]  # [N, L]
    logprobs: npt.NDArray[np.float32]  # [N, L]
    versions: npt.NDArray[np.int64]  # [N, L]
    rewards: npt.NDArray[np.float32]  # [N]
    group_index: npt.NDArray[np.int64]  # [N]

    def torch(self) -> PaddedTensors:
        """Torch tensors that share the memory of these arrays."""
        from trainer_client.torch_sources import from_numpy

        return PaddedTensors(*(from_numpy(getattr(self, field.name)) for field in fields(self)))


class PaddedTensors(NamedTuple):
    """`Padded` as torch tensors; the shapes and meanings are the same."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    rewards: torch.Tensor
    group_index: torch.Tensor


class PackedTensors(NamedTuple):
    """`Packed` as torch tensors; the shapes and meanings are the same."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    cu_seqlens: torch.Tensor
    rewards: torch.Tensor
    group_index: torch.Tensor


def pack(trajectories: Sequence[Trajectory]) -> Packed:
    """Lays trajectories back to back. InvalidRequest names one whose lists differ in length."""
    lengths = {name: [len(getattr(trajectory, name)) for trajectory in trajectories] for name in COLUMNS}
    return _packed(trajectories, lengths, lambda name: ([getattr(one, name)] for one in trajectories))


def pack_rows(rows: Sequence[Row]) -> Packed:
    """As `pack`, of trajectories that came packed: no work by token in Python. Damaged if one's arrays are."""
    labels = [label for row in rows for label in row.labels]
    lengths = {name: [length for row in rows for length in row.lengths[name]] for name in COLUMNS}
    some = [rows[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(rows), ROWS_AT_ONCE)]
    return _packed(labels, lengths, lambda name: ([row.column(name) for row in few] for few in some))


def _packed(
    heads: Sequence[Trajectory | Label],
    lengths: Mapping[str, Sequence[int]],
    pieces: Callable[[str], Iterable[Sequence[Any]]],
) -> Packed:
    """`pieces`: of each column, in the order of `heads`; some are converted at once, into their place."""
    for number, head in enumerate(heads):
        if len({lengths[name][number] for name in COLUMNS}) > 1:
            _refuse_lengths(head.session_id, {name: lengths[name][number] for name in COLUMNS})
    of = np.array(lengths["token_ids"], dtype=np.int32)
    cu_seqlens = np.concatenate([np.zeros(1, np.int32), np.cumsum(of, dtype=np.int32)])
    flat = {name: np.empty(cu_seqlens[-1], dtype) for name, dtype in _TYPES.items()}
    for name, whole in flat.items():
        end = 0
        for some in pieces(name):
            begin, end = end, end + sum(len(values) for values in some)
            np.concatenate(some, out=whole[begin:end], casting="unsafe")
    groups: dict[str, int] = {}
    for head in heads:
        groups.setdefault(head.group_id, len(groups))
    return Packed(
        input_ids=flat["token_ids"],
        position_ids=_positions(lengths["token_ids"]),
        loss_mask=flat["loss_mask"],
        logprobs=flat["logprobs"],
        versions=flat["versions"],
        cu_seqlens=cu_seqlens,
        rewards=np.array([head.reward for head in heads], dtype=np.float32),
        group_index=np.array([groups[head.group_id] for head in heads], dtype=np.int64),
    )


def _positions(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    longest = np.arange(max(lengths, default=0), dtype=np.int64)
    return np.concatenate([longest[:0], *(longest[:length] for length in lengths)])


def _refuse_lengths(session_id: str, lengths: Mapping[str, int]) -> None:
    raise InvalidRequest(
        f"trajectory {session_id!r} has lists of different lengths: {lengths}",
        hint="the lists per token must be equally long",
    )
