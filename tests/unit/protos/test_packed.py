"""Packed trajectories: back to the bit, small where that pays, and refused where they are damaged."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import packed
from protos.packed import COLUMNS, Damaged
from protos.trajectories import Trajectory
from tests.support.trajectories import make_trajectory

LEAF = make_trajectory("g", 1, [5, 6], ([7], [8]), ([9, 10], []), reward=0.5, version=3, logprob=-0.1)
LONG = make_trajectory("g", 2, range(300), (range(1000), range(100)), version=9, logprob=-0.25)


@st.composite
def leaves(draw: st.DrawFn) -> list[Trajectory]:
    numbers = st.integers(-(1 << 63), (1 << 63) - 1)
    floats = st.floats(width=32) | st.floats()
    return [
        msgspec.structs.replace(
            LEAF,
            leaf=leaf,
            token_ids=draw(st.lists(st.integers(0, 1 << 17) | numbers, max_size=8)),
            logprobs=draw(st.lists(floats.filter(lambda x: not math.isnan(x)), max_size=8)),
            loss_mask=draw(st.lists(st.integers(0, 1), max_size=8)),
            versions=draw(st.lists(st.integers(-1, 9) | numbers, max_size=8)),
        )
        for leaf in range(draw(st.integers(1, 3)))
    ]


@given(leaves())
def test_what_was_packed_is_the_same_again(found: list[Trajectory]) -> None:
    assert packed.unpack(packed.pack(found)) == found


def test_arrays_are_narrow_where_nothing_is_lost_and_aligned() -> None:
    row = packed.Row(packed.pack([LONG, LONG]))
    exact = {name: row.column(name) for name in COLUMNS}
    assert {name: array.dtype.str for name, array in exact.items()} == {
        "token_ids": "<u4",
        "logprobs": "<f4",
        "loss_mask": "|u1",
        "versions": "<i4",
    }
    assert packed.Row(packed.pack([LEAF])).column("logprobs").dtype == np.dtype("<f8"), "-0.1 is no float32"
    assert len(packed.pack([LEAF])) % 8 == 0


def test_columns_are_compressed_where_that_pays() -> None:
    random = np.random.default_rng(1)
    noise = random.standard_normal(4096).astype(np.float32)
    leaf = msgspec.structs.replace(
        LONG,
        token_ids=[7] * 4096,
        logprobs=noise.astype(float).tolist(),
        loss_mask=[1] * 4096,
        versions=[3] * 4096,
    )
    row = packed.pack([leaf])
    assert 4 * 4096 < len(row) < 4 * 4096 + 1000, "of 13 bytes a token, those of the logprobs are left"
    assert packed.unpack(row) == [leaf]


def test_a_row_changed_or_cut_anywhere_is_refused() -> None:
    row = packed.pack([LEAF])
    for at in range(len(row)):
        changed = bytearray(row)
        changed[at] ^= 0x10
        with pytest.raises(Damaged):
            packed.check(bytes(changed))
        with pytest.raises(Damaged):
            packed.Row(row[:at])


def test_a_batch_has_the_rows_as_they_were() -> None:
    rows = [packed.pack([LEAF]), packed.pack([LONG, LEAF])]
    body = packed.batch("lease-1", rows)
    lease_id, found = packed.rows_of(body)
    assert (lease_id, [bytes(row) for row in found]) == ("lease-1", rows)
    assert packed.rows_of(packed.batch("", [])) == ("", [])
    for cut in (0, 3, 20, len(body) - 1):
        with pytest.raises(Damaged):
            packed.rows_of(body[:cut])
    with pytest.raises(Damaged, match="begins no packed batch"):
        packed.rows_of(b"{}" + body)


def test_the_facts_are_those_of_all_leaves() -> None:
    other = msgspec.structs.replace(LEAF, reward=1.5, versions=[-1, -1, 4, -1, 3, 3])
    facts = packed.facts_of([LEAF, other], 99)
    assert (facts.rewards, facts.reward, facts.num_tokens, facts.num_bytes) == ([0.5, 1.5], 1.0, 12, 99)
    assert (facts.versions, facts.oldest_version, facts.num_sampled) == ({3: 5, 4: 1}, 3, 6)
