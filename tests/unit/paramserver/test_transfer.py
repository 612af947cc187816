"""Transfer progress: every chunk verified once, resumed at its byte, whatever breaks in whatever order."""

from __future__ import annotations

import random

import pytest

from paramserver.core.records import ChunkMap
from paramserver.core.transfer import TransferState, Want


def test_chunks_are_taken_in_order_by_whoever_asks() -> None:
    state = TransferState(ChunkMap([10], 4))
    assert [state.take("a"), state.take("b"), state.take("a"), state.take("b")] == [
        Want(0, 0),
        Want(1, 0),
        Want(2, 0),
        None,
    ]


def test_a_broken_stripe_gives_back_its_chunks_at_the_byte_where_they_stopped() -> None:
    state = TransferState(ChunkMap([12], 4))
    state.take("a"), state.take("a"), state.take("b")
    state.received(0, 3)
    assert state.broken("a") == (Want(0, 3), Want(1, 0))
    assert state.take("b") == Want(0, 3)
    assert state.take("b") == Want(1, 0)
    assert state.take("b") is None


def test_a_wrong_digest_starts_over_and_makes_the_sender_check_itself() -> None:
    state = TransferState(ChunkMap([4], 4))
    state.take("a")
    state.received(0, 4)
    state.mismatched(0)
    assert state.take("a") == Want(0, 0, suspect=True)
    state.verified(0)
    assert state.complete


def test_what_is_already_there_is_not_asked_for() -> None:
    state = TransferState(ChunkMap([12], 4), done=[0, 2])
    assert state.bytes_done == 8
    assert (state.take("a"), state.take("a")) == (Want(1, 0), None)
    state.verified(1)
    assert state.complete


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_never_lose_or_repeat_a_chunk(seed: int) -> None:
    rng = random.Random(seed)
    chunks = ChunkMap([rng.randint(1, 50) for _ in range(3)], 4)
    state = TransferState(chunks)
    holding: dict[str, list[Want]] = {stripe: [] for stripe in "abc"}
    verified: list[int] = []
    for _ in range(100_000):
        if state.complete:
            break
        stripe = rng.choice("abc")
        match rng.choice(["take", "take", "verify", "verify", "partial", "mismatch", "break"]):
            case "take":
                want = state.take(stripe)
                if want is not None:
                    holding[stripe].append(want)
            case "break":
                state.broken(stripe)
                holding[stripe] = []
            case action if holding[stripe]:
                want = holding[stripe][0]
                if action == "partial":
                    state.received(want.index, rng.randint(want.from_byte, chunks.chunk(want.index).length))
                elif action == "mismatch":
                    state.mismatched(holding[stripe].pop(0).index)
                else:
                    state.verified(holding[stripe].pop(0).index)
                    verified.append(want.index)
    assert sorted(verified) == list(range(chunks.num_chunks))
    assert state.bytes_done == sum(chunks.chunk(i).length for i in range(chunks.num_chunks))
