"""Laying out trajectories for a forward pass so that siblings of a group share their prompt.

A family is laid out as `prefix, suffix, suffix, ...`: each suffix continues at the prefix's position and attends to
the prefix and to itself. 8 samples of a 150-token prompt with 50-token answers make 550 tokens in place of 1600,
and the logprobs are those of the rows computed one by one.

Invariants:
- a suffix ends before its last sampled token, to which nothing attends;
- a family is the common beginning of its rows, cut before the first token that any of them sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainer_client import Packed

Span = tuple[int, int]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Family:
    """Where a shared prefix and its suffixes lie in the layout, back to back. Ends are exclusive."""

    prefix: Span
    suffixes: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Families laid out for one forward pass of T tokens that yields M logprobs."""

    input_ids: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [T]
    families: tuple[Family, ...]
    predictors: torch.Tensor  # [M]: the position whose hidden state predicts the token
    tokens: torch.Tensor  # [M]: where the token lies in the batch


def lay_out(batch: Packed, groups: Sequence[Sequence[int]]) -> Layout:
    """Lays out rows of `batch`, those of one group as one family. Every row has a sampled token."""
    pieces: list[Indices] = []  # positions in the batch, in the order of the layout
    families: list[Family] = []
    predictors: list[Indices] = []
    tokens: list[Indices] = []
    length = 0

    def place(positions: Indices) -> Span:
        nonlocal length
        pieces.append(positions)
        length += len(positions)
        return length - len(positions), length

    for group in groups:
        rows = [_positions(batch, index) for index in group]
        shared = shared_prefix(batch, group)
        prefix = place(rows[0][:shared])
        suffixes = []
        for row in rows:
            sampled = np.flatnonzero(batch.loss_mask[row])
            suffix = place(row[shared : sampled[-1]])
            before = sampled - 1  # the token whose hidden state predicts; the prefix's last for a suffix's first
            predictors.append(np.where(before < shared, prefix[0] + before, suffix[0] + before - shared))
            tokens.append(row[sampled])
            suffixes.append(suffix)
        families.append(Family(prefix, tuple(suffixes)))
    order = np.concatenate(pieces)
    return Layout(
        input_ids=torch.from_numpy(batch.input_ids[order]),
        position_ids=torch.from_numpy(batch.position_ids[order]),
        families=tuple(families),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        tokens=torch.from_numpy(np.concatenate(tokens)),
    )


def shared_prefix(batch: Packed, group: Sequence[int]) -> int:
    """How many leading tokens all rows of `group` share, before the first that any of them sampled."""
    rows = [_positions(batch, index) for index in group]
    limit = min(int(batch.loss_mask[row].argmax()) for row in rows)
    heads = np.stack([batch.input_ids[row[:limit]] for row in rows])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else limit


def micro_batches(batch: Packed, rows: Sequence[int], *, tokens_max: int) -> Iterator[list[list[int]]]:
    """Splits `rows` into runs of at most `tokens_max` laid-out tokens (one row may exceed it alone), group by group.

    The bound is on memory: activations of a layout live until its backward pass.
    """
    families = [[row for row in rows if batch.group_index[row] == group] for group in _groups_of(batch, rows)]
    current: list[list[int]] = []
    used = 0
    for family in families:
        shared = shared_prefix(batch, family)
        current.append([])
        for row in family:
            length = len(_positions(batch, row))
            cost = length - shared if current[-1] else length
            if used > 0 and used + cost > tokens_max:
                yield [part for part in current if part]
                current, used, cost = [[]], 0, length
            current[-1].append(row)
            used += cost
    if used > 0:
        yield current


def _groups_of(batch: Packed, rows: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(int(batch.group_index[row]) for row in rows))


def _positions(batch: Packed, row: int) -> Indices:
    return np.arange(batch.num_tokens)[batch.row(row)]
