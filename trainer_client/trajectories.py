"""Trajectories packed into flat arrays, as a trainer computes with them.

Invariants:
- the lists per token of a trajectory have equal length; `pack` refuses a trajectory whose lists differ;
- packed rows stand in the order of the batch, back to back, without padding: row i is
  `cu_seqlens[i]:cu_seqlens[i + 1]`, which is what variable-length attention kernels take;
- a loss mask of 1 marks a token that the policy sampled; its `logprobs` entry is the behaviour policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protos.errors import InvalidRequest
from protos.trajectories import Trajectory

if TYPE_CHECKING:
    import torch


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

    def torch(self) -> PackedTensors:
        """Torch tensors that share the memory of these arrays."""
        from trainer_client.torch_sources import from_numpy

        return PackedTensors(*(from_numpy(getattr(self, field.name)) for field in fields(self)))


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
    for trajectory in trajectories:
        _check_lengths(trajectory)
    lengths = np.array([len(trajectory.token_ids) for trajectory in trajectories], dtype=np.int32)
    groups: dict[str, int] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, len(groups))
    return Packed(
        input_ids=_flat([t.token_ids for t in trajectories], np.int64),
        position_ids=_flat([range(length) for length in lengths], np.int64),
        loss_mask=_flat([t.loss_mask for t in trajectories], np.bool_),
        logprobs=_flat([t.logprobs for t in trajectories], np.float32),
        versions=_flat([t.versions for t in trajectories], np.int64),
        cu_seqlens=np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]),
        rewards=np.array([t.reward for t in trajectories], dtype=np.float32),
        group_index=np.array([groups[t.group_id] for t in trajectories], dtype=np.int64),
    )


def _flat(rows: Sequence[Sequence[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(row, dtype) for row in rows)])


def _check_lengths(trajectory: Trajectory) -> None:
    names = ("token_ids", "logprobs", "loss_mask", "versions")
    lengths = {name: len(getattr(trajectory, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise InvalidRequest(
            f"trajectory {trajectory.session_id!r} has lists of different lengths: {lengths}",
            hint="the lists per token must be equally long",
        )
