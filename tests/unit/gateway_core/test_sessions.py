"""A session's record: what each turn leaves in it, what it refuses, and what a trainer reads of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.sessions import SessionState
from gateway.core.types import SamplingParams, Segment, SessionId, Trajectory, TurnId, TurnRecord, TurnRequest
from protos.errors import Conflict
from tests.unit.gateway_core.helpers import session

TURNS = itertools.count()


def request(*prompt: int) -> TurnRequest:
    sampling = SamplingParams(max_tokens=8)
    return TurnRequest(TurnId(f"t{next(TURNS)}"), SessionId("s"), 0, prompt, sampling)


def answer(asked: TurnRequest, *parts: tuple[int, int], finish: Literal["stop", "length"] = "length") -> TurnRecord:
    """What engines said: each part is a segment of so many tokens, written as (version, tokens)."""
    total = sum(tokens for _, tokens in parts)
    ends = list(itertools.accumulate((tokens for _, tokens in parts), initial=0))
    segments = [
        Segment(
            turn=asked.turn_index,
            engine=f"e{i}",
            incarnation="i",
            version=version,
            start=ends[i],
            end=ends[i + 1],
            cause="start" if i == 0 else "cut",
            started_unix_s=1.0,
            ended_unix_s=2.0,
        )
        for i, (version, _) in enumerate(parts)
    ]
    return TurnRecord(asked, [90 + i for i in range(total)], [-1.0 - i for i in range(total)], segments, finish)


def after(*turns: tuple[Sequence[int], Sequence[tuple[int, int]]], **spec: Any) -> SessionState:
    """A session after turns of (the prompt's new ids, the answer's parts)."""
    state = session(**spec)
    for new, parts in turns:
        asked = request(*state.token_ids, *new)
        state.begin_turn(asked, 101.0)
        state.end_turn(answer(asked, *parts), 102.0)
    return state


def rows(state: SessionState) -> list[tuple[int, float, int, int]]:
    """The four lists side by side; raises when their lengths differ."""
    return list(zip(state.token_ids, state.logprobs, state.loss_mask, state.versions, strict=True))


def spans(state: SessionState) -> list[tuple[int, int, int]]:
    return [(s.version, s.start, s.end) for s in state.segments]


def test_a_prompt_is_not_trained_on_and_an_answer_is_under_the_version_that_said_it() -> None:
    state = after(([1, 2], [(3, 1), (4, 2)]))
    assert rows(state) == [(1, 0.0, 0, -1), (2, 0.0, 0, -1), (90, -1.0, 1, 3), (91, -2.0, 1, 4), (92, -3.0, 1, 4)]
    assert spans(state) == [(3, 2, 3), (4, 3, 5)]
    assert state.sampled_versions == (3, 4)
    assert (state.turns, state.running, state.last_finish_reason) == (1, None, "length")


def test_a_later_turn_adds_only_what_its_prompt_has_beyond_the_record() -> None:
    state = after(([1], [(3, 1)]), ([2, 5], [(3, 2)]))
    assert state.token_ids == [1, 90, 2, 5, 90, 91]
    assert state.loss_mask == [0, 1, 0, 0, 1, 1]
    assert spans(state) == [(3, 1, 2), (3, 4, 6)], "segments count the session's tokens, not the turn's"
    assert (state.turns, state.rebased) == (2, 0)


def test_every_step_of_a_turn_touches_the_session() -> None:
    state = session()
    asked = request(1)
    state.begin_turn(asked, 110.0)
    assert state.touched_unix_s == 110.0
    state.end_turn(answer(asked, (3, 1), finish="stop"), 120.0)
    assert (state.touched_unix_s, state.last_finish_reason) == (120.0, "stop")
    state.begin_turn(request(1, 90), 130.0)
    state.drop_turn(140.0)
    assert state.touched_unix_s == 140.0


def test_a_dropped_turn_takes_its_prompt_out_again() -> None:
    state = after(([1, 2], [(3, 2)]))
    before = rows(state), spans(state)
    state.begin_turn(request(*state.token_ids, 7, 8), 103.0)
    assert len(state.token_ids) == 6
    state.drop_turn(104.0)
    assert (rows(state), spans(state)) == before
    assert (state.running, state.turns) == (None, 1)


@pytest.mark.parametrize("prompt", [(9, 90), (1, 9, 5), (1,), ()], ids=["head", "answer", "shorter", "nothing"])
def test_an_edited_history_starts_the_record_anew(prompt: tuple[int, ...]) -> None:
    state = after(([1], [(3, 1)]))
    asked = request(*prompt)
    state.begin_turn(asked, 103.0)
    assert rows(state) == [(token, 0.0, 0, -1) for token in prompt]
    state.end_turn(answer(asked, (4, 1)), 104.0)
    assert spans(state) == [(4, len(prompt), len(prompt) + 1)]
    assert (state.rebased, state.sampled_versions) == (1, (4,))
    assert state.trajectory(0.0, "completed", {"x": 2.0}, 105.0).metrics == {"x": 2.0, "rebased": 1.0}


@pytest.mark.parametrize(
    ("surplus", "left"),
    [
        (0, [(3, 5, 7), (4, 7, 10)]),
        (1, [(3, 5, 7), (4, 7, 9)]),
        (3, [(3, 5, 7)]),
        (4, [(3, 5, 6)]),
        (5, []),
    ],
    ids=["nothing", "within the last segment", "a whole segment", "into the one before", "the whole answer"],
)
def test_a_stop_string_found_late_takes_the_surplus_back(surplus: int, left: list[tuple[int, int, int]]) -> None:
    state = after(([1, 2], [(3, 2)]), ([5], [(3, 2), (4, 3)]))
    whole = rows(state)
    state.shorten_turn(surplus)
    assert rows(state) == whole[: len(whole) - surplus]
    assert spans(state) == [(3, 2, 4), *left]
    assert state.last_finish_reason == "stop"
    asked = request(*state.token_ids, 6)
    state.begin_turn(asked, 103.0)
    assert state.rebased == 0, "the shortened record is what the next prompt extends"


def test_a_second_turn_while_one_runs_is_refused_and_changes_nothing() -> None:
    state = after(([1], [(3, 1)]))
    running = request(1, 90, 2)
    state.begin_turn(running, 103.0)
    before = rows(state), state.running, state.touched_unix_s, state.rebased
    with pytest.raises(Conflict, match="has a turn under way"):
        state.begin_turn(request(7), 104.0)
    assert (rows(state), state.running, state.touched_unix_s, state.rebased) == before
    state.end_turn(answer(running, (3, 1)), 105.0)


def test_a_session_is_not_finished_while_a_turn_runs_but_may_be_abandoned() -> None:
    state, asked = session(), request(1)
    state.begin_turn(asked, 101.0)
    with pytest.raises(Conflict, match="under way"):
        state.end("finished")
    assert (state.phase, state.running) == ("live", asked.turn_id)
    state.end("abandoned")
    assert (state.phase, state.running) == ("abandoned", asked.turn_id)


@pytest.mark.parametrize("again", ["finished", "abandoned"])
@pytest.mark.parametrize("first", ["finished", "abandoned"])
def test_an_ended_session_never_lives_again(
    first: Literal["finished", "abandoned"], again: Literal["finished", "abandoned"]
) -> None:
    state = after(([1], [(3, 1)]))
    state.end(first)
    with pytest.raises(Conflict, match=f"already {first}"):
        state.end(again)
    with pytest.raises(Conflict, match=f"is {first}"):
        state.begin_turn(request(1, 90, 2), 103.0)
    assert (state.phase, state.token_ids) == (first, [1, 90])


def test_a_trainer_reads_the_whole_record() -> None:
    tags = {"environment": "calculator"}
    state = after(
        ([1], [(3, 1)]), ([2], [(3, 1)]), name="s7", group="g", sample_index=2, group_size=4, split="eval", tags=tags
    )
    assert state.trajectory(0.5, "truncated", {"steps": 2.0}, 109.0) == Trajectory(
        session_id="s7",
        group_id="g",
        sample_index=2,
        reward=0.5,
        status="truncated",
        mixed=False,
        split="eval",
        token_ids=[1, 90, 2, 90],
        logprobs=[0.0, -1.0, 0.0, -1.0],
        loss_mask=[0, 1, 0, 1],
        versions=[-1, 3, -1, 3],
        turns=2,
        segments=state.segments,
        started_unix_s=100.0,
        finished_unix_s=109.0,
        tags=tags,
        metrics={"steps": 2.0},
    )


@pytest.mark.parametrize(
    ("turns", "mixed"),
    [
        ([[(3, 2), (3, 2)], [(3, 1)]], False),
        ([[(3, 1), (4, 1)]], True),
        ([[(3, 1)], [(4, 1)]], True),
        ([[(3, 1), (4, 0)]], False),
        ([[]], False),
    ],
    ids=["one version", "within a turn", "between turns", "a version that said nothing", "nothing said"],
)
def test_mixed_says_that_more_than_one_version_sampled_it(turns: list[list[tuple[int, int]]], mixed: bool) -> None:
    state = after(*(([1], parts) for parts in turns))
    assert state.trajectory(1.0, "completed", {}, 109.0).mixed is mixed


def test_a_stop_found_when_the_next_turn_runs_comes_too_late() -> None:
    state = after(([1], [(3, 2)]))
    state.begin_turn(request(*state.token_ids, 5), 103.0)
    told = rows(state)
    state.shorten_turn(1)
    assert rows(state) == told


def test_a_trajectory_handed_out_never_changes() -> None:
    state = after(([1], [(3, 2)]))
    handed = state.trajectory(1.0, "completed", {}, 109.0)
    state.begin_turn(request(*state.token_ids, 5), 110.0)
    assert len(handed.token_ids) == len(handed.versions) == 3


class SessionLife(RuleBasedStateMachine):
    """Turns, answers, given-up turns, late stop strings and ends in any order, beside a model of the record."""

    def __init__(self) -> None:
        super().__init__()
        self.state = session()
        self.record: list[tuple[int, float, int, int]] = []
        self.before: tuple[list[tuple[int, float, int, int]], int] = [], 0  # the running turn: record and rebases
        self.running: TurnRequest | None = None
        self.said = 0  # tokens of the latest answer, until a turn follows it
        self.phase, self.rebased, self.turns = "live", 0, 0

    @rule(new=st.lists(st.integers(0, 3), max_size=3), edit=st.sampled_from(["none", "none", "change", "cut"]))
    def begin(self, new: list[int], edit: str) -> None:
        ids = [token for token, *_ in self.record]
        asked = request(
            *{"none": [*ids, *new], "change": [*(-token - 1 for token in ids), *new], "cut": ids[:-1]}[edit]
        )
        if self.running is not None or self.phase != "live":
            with pytest.raises(Conflict):
                self.state.begin_turn(asked, 103.0)
            return
        edited = bool(ids) and edit != "none"
        self.before = list(self.record), self.rebased
        self.rebased += edited
        kept_rows = [] if edited else self.record
        self.record = kept_rows + [(token, 0.0, 0, -1) for token in asked.prompt_ids[len(kept_rows) :]]
        self.running, self.said = asked, 0
        self.state.begin_turn(asked, 103.0)

    @precondition(lambda self: self.running is not None)
    @rule(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3))
    def end(self, parts: list[tuple[int, int]]) -> None:
        assert self.running is not None
        told = answer(self.running, *parts)
        versions = [version for version, tokens in parts for _ in range(tokens)]
        self.record += [
            (t, logprob, 1, v) for t, logprob, v in zip(told.token_ids, told.logprobs, versions, strict=True)
        ]
        self.running, self.said, self.turns = None, len(versions), self.turns + 1
        self.state.end_turn(told, 104.0)

    @precondition(lambda self: self.running is not None)
    @rule()
    def drop(self) -> None:
        self.state.drop_turn(104.0)
        self.record, self.rebased = self.before
        self.running = None

    @precondition(lambda self: self.running is None and self.said)
    @rule(data=st.data())
    def shorten(self, data: st.DataObject) -> None:
        surplus = data.draw(st.integers(0, self.said))
        if self.phase == "live":  # else it is too late
            self.said -= surplus
            self.record = self.record[: len(self.record) - surplus]
        self.state.shorten_turn(surplus)

    @precondition(lambda self: self.turns > 2)  # not at once: most lives should see a few turns
    @rule(phase=st.sampled_from(["finished", "abandoned"]))
    def close(self, phase: Literal["finished", "abandoned"]) -> None:
        if self.phase != "live" or (phase == "finished" and self.running is not None):
            with pytest.raises(Conflict):
                self.state.end(phase)
        else:
            self.state.end(phase)
            self.phase = phase

    @invariant()
    def the_record_is_what_was_asked_and_said(self) -> None:
        assert rows(self.state) == self.record
        assert (self.state.turns, self.state.rebased) == (self.turns, self.rebased)

    @invariant()
    def segments_cover_exactly_what_was_sampled(self) -> None:
        covered = [(i, s.version) for s in self.state.segments for i in range(s.start, s.end)]
        assert covered == [(i, version) for i, (_, _, mask, version) in enumerate(rows(self.state)) if mask]
        assert all(s.start < s.end for s in self.state.segments)

    @invariant()
    def at_most_one_turn_runs_and_an_ended_session_stays_ended(self) -> None:
        assert self.state.running == (None if self.running is None else self.running.turn_id)
        assert self.state.phase == self.phase


TestSessionLife = SessionLife.TestCase
TestSessionLife.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
