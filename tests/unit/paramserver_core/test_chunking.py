"""Chunk sizes: the paper's formula, its example, and its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.core.chunk_size import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    NUM_RELAYS_MIN,
    HopCost,
    choose_chunk_bytes,
    transfer_s,
    typical,
)


def best_num_chunks(num_nodes: int, num_bytes: int, hop: HopCost) -> float:
    """k* of the paper."""
    return math.sqrt(max(0, num_nodes - 2) * num_bytes / hop.rate_bytes_s / hop.start_s)


HOP = HopCost(rate_bytes_s=2e9, rtt_s=2e-4)


def test_the_papers_example() -> None:
    """140 GB over 90 GB/s and 127 hops of 5 us to start: within a few per cent of reading the bytes once."""
    hop = HopCost(9e10, 0.0)
    k = best_num_chunks(128, 140 * 10**9, hop)
    assert transfer_s(128, 140 * 10**9, int(140e9 / k), hop) == pytest.approx(1.56, rel=0.25)


@given(
    st.integers(1, 1 << 40), st.integers(1, 256), st.floats(1e7, 1e11), st.floats(1e-6, 0.2), st.sampled_from(range(7))
)
def test_no_other_size_within_the_bounds_is_faster(
    num_bytes: int, relays: int, rate: float, rtt: float, step: int
) -> None:
    hop = HopCost(rate, rtt)
    chosen = choose_chunk_bytes(num_bytes, relays, hop)
    assert CHUNK_BYTES_MIN <= chosen <= CHUNK_BYTES_MAX
    other, nodes = CHUNK_BYTES_MIN << step, 1 + max(relays, NUM_RELAYS_MIN)
    assert transfer_s(nodes, num_bytes, chosen, hop) <= transfer_s(nodes, num_bytes, other, hop)


def test_a_relay_alone_cuts_a_version_as_two_would() -> None:
    """All in one chunk is fastest to itself, but then one thread copies it, and who joins has it from one holder."""
    for size in (1 << 20, 1 << 26, 1 << 30):
        assert choose_chunk_bytes(size, 1, HopCost()) == choose_chunk_bytes(size, 2, HopCost())
        assert choose_chunk_bytes(size, 1, HopCost()) <= size // 2
    assert choose_chunk_bytes(1 << 30, 2, HopCost()) == CHUNK_BYTES_MAX


def test_longer_chains_want_smaller_chunks_and_larger_versions_larger_ones() -> None:
    sizes = [choose_chunk_bytes(1 << 30, relays, HOP) for relays in (2, 8, 32, 128)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    grown = [choose_chunk_bytes(size, 8, HOP) for size in (1 << 24, 1 << 28, 1 << 32)]
    assert grown == sorted(grown)


def test_k_star_is_where_the_formula_is_least() -> None:
    k = best_num_chunks(9, 1 << 30, HOP)
    at = [transfer_s(9, 1 << 30, int((1 << 30) / (k * factor)), HOP) for factor in (0.5, 1.0, 2.0)]
    assert at[1] <= min(at)


def test_the_middle_of_what_was_measured() -> None:
    assert typical([]) == HopCost()
    assert typical([HopCost(1e9, 1e-3), HopCost(3e9, 2e-3), HopCost(9e9, 9e-3)]) == HopCost(3e9, 2e-3)
