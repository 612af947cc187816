"""Transfer progress: every chunk verified once, resumed at its byte, whatever breaks in whatever order."""

from __future__ import annotations

import random

import pytest

from paramserver.core.records import ChunkMap
from paramserver.core.transfer import SPANS_MAX, ActiveTime, TransferState, Want


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


def test_time_in_which_several_stripes_are_active_counts_once() -> None:
    active = ActiveTime()
    active.add(0.0, 1.0)
    active.add(0.5, 1.5)  # beside the first
    active.add(2.0, 3.0)  # nothing came before it for half a second
    assert active.seconds == 2.5
    active.add(1.25, 4.0)  # a slow stripe was active all the while
    assert active.seconds == 4.0


@pytest.mark.parametrize("seed", range(20))
def test_active_time_is_that_of_every_stripes_spans_together(seed: int) -> None:
    rng, spans, active = random.Random(seed), [], ActiveTime()
    for _ in range(4):
        at = 0
        for _ in range(2 * SPANS_MAX):
            began = at + rng.choice((0, 0, 1, 9))
            at = began + rng.randint(1, 9)
            spans.append((began, at))
    for began, ended in sorted(spans, key=lambda span: span[1]):
        active.add(began, ended)
    assert active.seconds == len({moment for began, ended in spans for moment in range(began, ended)})


def test_spans_long_gone_are_counted_and_not_kept() -> None:
    active = ActiveTime()
    for at in range(10 * SPANS_MAX):
        active.add(2.0 * at, 2.0 * at + 1.0)
    assert active.seconds == 10 * SPANS_MAX
    assert len(active._spans) <= SPANS_MAX
    active.add(0.0, 20.0 * SPANS_MAX)
    assert 10 * SPANS_MAX < active.seconds <= 20.0 * SPANS_MAX, "none of it is counted twice"
