"""Packing trajectories into flat arrays."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from protos.errors import InvalidRequest
from protos.trajectories import Trajectory
from tests.support.trajectories import make_trajectory
from trainer_client import pack

FIRST = make_trajectory("g1", 0, [5, 6], ([7], [8]), ([9, 10], []), reward=1.0, version=3, logprob=-0.5)
SECOND = make_trajectory("g0", 0, [5, 6], ([11], []), reward=0.25, version=4)
THIRD = make_trajectory("g1", 1, [5, 6], ([12, 13], []), reward=-1.0, version=3)


def test_rows_lie_back_to_back_in_the_order_of_the_batch() -> None:
    packed = pack([FIRST, SECOND, THIRD])
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 10, 5, 6, 11, 5, 6, 12, 13]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 6, 9, 13]
    assert packed.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]
    assert packed.logprobs[packed.loss_mask].tolist() == [-0.5, -0.5, -0.5, -1, -1, -1]
    assert packed.versions[packed.row(1)].tolist() == [-1, -1, 4]
    assert packed.rewards.tolist() == [1.0, 0.25, -1.0]
    assert packed.group_index.tolist() == [0, 1, 0]
    assert (packed.num_trajectories, packed.num_tokens) == (3, 13)
    assert packed.input_ids[packed.row(2)].tolist() == THIRD.token_ids


def test_padded_rows_are_those_of_the_packed_ones() -> None:
    packed = pack([FIRST, SECOND, THIRD])
    padded = packed.padded(7, pad_id=99)
    assert padded.input_ids.shape == (3, 7)
    assert padded.input_ids[1].tolist() == [5, 6, 11, 99, 99, 99, 99]
    assert padded.attention_mask.sum(axis=1).tolist() == [6, 3, 4]
    assert padded.versions[1].tolist() == [-1, -1, 4, -1, -1, -1, -1]
    for name in ("input_ids", "position_ids", "loss_mask", "logprobs", "versions"):
        assert np.array_equal(getattr(padded, name)[padded.attention_mask], getattr(packed, name)), name
    assert not padded.loss_mask[~padded.attention_mask].any()
    assert pack([]).padded().input_ids.shape == (0, 0)
    with pytest.raises(InvalidRequest, match="6 tokens, more than 5"):
        packed.padded(5)


def test_staleness_counts_sampled_tokens_only() -> None:
    assert pack([FIRST, SECOND]).staleness(trainer_version=5).tolist() == [2, 2, 2, 1]


@pytest.mark.slow
def test_torch_tensors_share_the_memory_and_have_the_dtypes_that_kernels_take() -> None:
    import torch

    assert pack([]).torch().input_ids.shape == (0,)
    assert pack([FIRST, SECOND, THIRD]).padded().torch().input_ids.shape == (3, 6)
    packed = pack([FIRST, SECOND])
    tensors = packed.torch()
    assert tensors.input_ids.dtype == tensors.position_ids.dtype == torch.int64
    assert tensors.cu_seqlens.dtype == torch.int32
    assert tensors.loss_mask.dtype == torch.bool
    assert tensors.logprobs.dtype == tensors.rewards.dtype == torch.float32
    tensors.input_ids[0] = 99
    assert packed.input_ids[0] == 99
    for name in tensors._fields:
        assert np.array_equal(getattr(tensors, name).numpy(), getattr(packed, name)), name


def test_an_empty_batch_packs_to_empty_arrays() -> None:
    packed = pack([])
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.num_tokens == packed.num_trajectories == 0


@pytest.mark.parametrize("name", ["logprobs", "loss_mask", "versions"])
def test_lists_of_different_lengths_are_refused_by_the_session_id(name: str) -> None:
    broken = msgspec.structs.replace(FIRST, **{name: [0]})
    with pytest.raises(InvalidRequest, match=f"'g1-0'.*{name}"):
        pack([SECOND, broken])


def test_words_and_fields_of_a_later_gateway_are_read() -> None:
    said = msgspec.to_builtins(FIRST) | {"coming": 1}
    said["segments"][0] |= {"cause": "a new cause", "evidence": "proved"}
    read = msgspec.convert(said, Trajectory)
    assert (read.segments[0].cause, read.segments[0].evidence) == ("a new cause", "proved")
