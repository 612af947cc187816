"""A session's record: what each turn leaves in it, what it refuses, and what a trainer reads of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core import sessions
from gateway.core.sessions import SessionState
from gateway.core.tree import PathRecord
from gateway.core.types import SamplingParams, SessionId, TurnId, TurnRecord, TurnRequest
from protos.errors import Conflict, OutOfCapacity
from protos.trajectories import Segment, Trajectory
from tests.support.quick import examples
from tests.unit.gateway_core.helpers import session

TURNS = itertools.count()


def request(*prompt: int, parent: TurnId | None = None) -> TurnRequest:
    sampling = SamplingParams(max_tokens=8)
    return TurnRequest(TurnId(f"t{next(TURNS)}"), SessionId("s"), 0, prompt, sampling, parent)


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


def turn(state: SessionState, new: Sequence[int], *parts: tuple[int, int], parent: TurnId | None = None) -> TurnId:
    """A whole turn: after `parent`, or a root."""
    before = [] if parent is None else state.tree.ids(state.tree.turns[parent])
    asked = request(*before, *new, parent=parent)
    state.begin_turn(asked, 101.0)
    state.end_turn(answer(asked, *parts), 102.0)
    return asked.turn_id


def after(*turns: tuple[Sequence[int], Sequence[tuple[int, int]]], **spec: Any) -> SessionState:
    """A session after turns of (the prompt's new ids, the answer's parts), one upon the other."""
    state, parent = session(**spec), None
    for new, parts in turns:
        parent = turn(state, new, *parts, parent=parent)
    return state


def rows(record: PathRecord | Trajectory) -> list[tuple[int, float, int, int]]:
    """The four lists side by side; raises when their lengths differ."""
    return list(zip(record.token_ids, record.logprobs, record.loss_mask, record.versions, strict=True))


def spans(record: PathRecord | Trajectory) -> list[tuple[int, int, int]]:
    return [(s.version, s.start, s.end) for s in record.segments]


def told(state: SessionState) -> list[Trajectory]:
    return list(state.trajectories(1.0, "completed", {}, 109.0))


def test_a_prompt_is_not_trained_on_and_an_answer_is_under_the_version_that_said_it() -> None:
    state = after(([1, 2], [(3, 1), (4, 2)]))
    assert rows(state.newest) == [
        (1, 0.0, 0, -1),
        (2, 0.0, 0, -1),
        (90, -1.0, 1, 3),
        (91, -2.0, 1, 4),
        (92, -3.0, 1, 4),
    ]
    assert spans(state.newest) == [(3, 2, 3), (4, 3, 5)]
    assert state.sampled_versions == (3, 4)
    assert (state.turns, state.running, state.tree.newest.finish_reason) == (1, {}, "length")


def test_a_later_turn_adds_only_what_its_prompt_has_beyond_the_record() -> None:
    state = after(([1], [(3, 1)]), ([2, 5], [(3, 2)]))
    assert state.token_ids == [1, 90, 2, 5, 90, 91]
    assert state.newest.loss_mask == [0, 1, 0, 0, 1, 1]
    assert spans(state.newest) == [(3, 1, 2), (3, 4, 6)], "segments count the path's tokens, not the turn's"
    assert (state.turns, state.branches, state.tokens) == (2, 1, 6)


def test_every_step_of_a_turn_touches_the_session() -> None:
    state = session()
    asked = request(1)
    state.begin_turn(asked, 110.0)
    assert state.touched_unix_s == 110.0
    state.end_turn(answer(asked, (3, 1), finish="stop"), 120.0)
    assert (state.touched_unix_s, state.tree.newest.finish_reason) == (120.0, "stop")
    again = request(1, 90, parent=asked.turn_id)
    state.begin_turn(again, 130.0)
    state.drop_turn(again.turn_id, 140.0)
    assert state.touched_unix_s == 140.0


def test_a_dropped_turn_leaves_no_trace() -> None:
    state = after(([1, 2], [(3, 2)]))
    before = rows(state.newest), spans(state.newest)
    [parent] = state.tree.turns
    asked = request(*state.token_ids, 7, 8, parent=parent)
    state.begin_turn(asked, 103.0)
    state.drop_turn(asked.turn_id, 104.0)
    assert (rows(state.newest), spans(state.newest)) == before
    assert (state.running, state.turns) == ({}, 1)


def test_each_leaf_is_a_trajectory_and_what_they_share_counts_once() -> None:
    state = session()
    first = turn(state, [1], (3, 1))
    turn(state, [2], (3, 2), parent=first)
    turn(state, [5], (4, 1), parent=first)
    linear, edited = told(state)
    assert rows(linear)[:2] == [(1, 0.0, 0, -1), (90, -1.0, 1, 3)]
    assert (linear.token_ids, linear.loss_mask) == ([1, 90, 2, 90, 91], [0, 1, 0, 1, 1])
    assert rows(edited) == [(1, 0.0, 0, -1), (90, 0.0, 0, -1), (5, 0.0, 0, -1), (90, -1.0, 1, 4)]
    assert spans(edited) == [(3, 1, 2), (4, 3, 4)], "who said what is shared is still told"
    assert [(t.leaf, t.leaves, t.turns, t.mixed) for t in (linear, edited)] == [(0, 2, 2, True), (1, 2, 2, True)]


def test_a_conversation_of_its_own_within_a_session_is_a_root() -> None:
    state = session()
    turn(state, [1], (3, 1))
    turn(state, [7, 8], (3, 1))
    assert [t.token_ids for t in told(state)] == [[1, 90], [7, 8, 90]]
    assert [sum(t.loss_mask) for t in told(state)] == [1, 1]


def test_turns_run_side_by_side_and_end_in_any_order() -> None:
    state = session()
    first = turn(state, [1], (3, 1))
    asked = [request(1, 90, 2, parent=first) for _ in range(3)]
    for one in asked:
        state.begin_turn(one, 103.0)
    for one in (asked[2], asked[0]):
        state.end_turn(answer(one, (3, 1)), 104.0)
    assert list(state.running) == [asked[1].turn_id]
    state.drop_turn(asked[1].turn_id, 105.0)
    assert [t.turn_id for t in state.tree.leaves()] == [asked[2].turn_id, asked[0].turn_id]


def test_rewards_stand_by_turn_and_by_leaf() -> None:
    state = session()
    first = turn(state, [1], (3, 1))
    left, right = turn(state, [2], (3, 1), parent=first), turn(state, [5], (3, 1), parent=first)
    assert [t.turn_rewards for t in told(state)] == [[], []]
    state.tree.turns[first].reward = 0.25
    state.tree.turns[left].leaf_reward = -1.0
    one, other = told(state)
    assert (one.reward, one.turn_rewards) == (-1.0, [0.25, None])
    assert (other.reward, other.turn_rewards) == (1.0, [0.25, None])
    state.tree.turns[right].reward = 0.5
    assert told(state)[1].turn_rewards == [0.25, 0.5]


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (5, [(3, 5, 7), (4, 7, 10)]),
        (4, [(3, 5, 7), (4, 7, 9)]),
        (2, [(3, 5, 7)]),
        (1, [(3, 5, 6)]),
        (0, []),
    ],
    ids=["nothing", "within the last segment", "a whole segment", "into the one before", "the whole answer"],
)
def test_a_stop_string_found_late_takes_the_surplus_back(kept: int, left: list[tuple[int, int, int]]) -> None:
    state = after(([1, 2], [(3, 2)]), ([5], [(3, 2), (4, 3)]))
    whole, last = rows(state.newest), list(state.tree.turns)[-1]
    state.shorten_turn(last, kept)
    assert rows(state.newest) == whole[: 5 + kept]
    assert spans(state.newest) == [(3, 2, 4), *left]
    assert state.tree.newest.finish_reason == "stop"
    turn(state, [6], (3, 1), parent=last)  # the shortened turn is what the next prompt extends
    assert state.branches == 1


def test_a_turn_begins_only_on_what_is_there() -> None:
    state = after(([1], [(3, 1)]))
    with pytest.raises(Conflict, match="no turn t-gone"):
        state.begin_turn(request(1, parent=TurnId("t-gone")), 104.0)
    assert state.running == {}
    [parent] = state.tree.turns
    asked = request(1, 91, 2, parent=parent)
    state.begin_turn(asked, 104.0)
    with pytest.raises(ValueError, match="does not begin with the ids"):
        state.end_turn(answer(asked, (3, 1)), 105.0)


def test_turns_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RUNNING_MAX", 2)
    monkeypatch.setattr(sessions, "TURNS_MAX", 3)
    state = session()
    for _ in range(2):
        state.begin_turn(request(1), 101.0)
    with pytest.raises(OutOfCapacity, match="2 running turns"):
        state.begin_turn(request(1), 101.0)
    for asked in list(state.running.values()):
        state.end_turn(answer(asked, (3, 1)), 102.0)
    turn(state, [1], (3, 1))
    with pytest.raises(Conflict, match="3 turns"):
        state.begin_turn(request(1), 103.0)


def test_a_session_is_not_finished_while_a_turn_runs_but_may_be_abandoned() -> None:
    state, asked = session(), request(1)
    state.begin_turn(asked, 101.0)
    with pytest.raises(Conflict, match="running turn"):
        state.end("finished")
    assert (state.phase, list(state.running)) == ("live", [asked.turn_id])
    state.end("abandoned")
    assert (state.phase, list(state.running)) == ("abandoned", [asked.turn_id])


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
    assert list(state.trajectories(0.5, "truncated", {"steps": 2.0}, 109.0)) == [
        Trajectory(
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
            segments=list(state.newest.segments),
            started_unix_s=100.0,
            finished_unix_s=109.0,
            tags=tags,
            metrics={"steps": 2.0},
            turn_ids=list(state.tree.turns),
        )
    ]


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
    assert told(after(*(([1], parts) for parts in turns)))[0].mixed is mixed


def test_a_stop_found_when_the_next_turn_runs_comes_too_late() -> None:
    state = after(([1], [(3, 2)]))
    [parent] = state.tree.turns
    state.begin_turn(request(*state.token_ids, 5, parent=parent), 103.0)
    before = rows(state.newest)
    state.shorten_turn(parent, 1)
    assert rows(state.newest) == before


def test_a_trajectory_handed_out_never_changes() -> None:
    state = after(([1], [(3, 2)]))
    [handed] = told(state)
    state.shorten_turn(next(iter(state.tree.turns)), 0)
    assert len(handed.token_ids) == len(handed.versions) == 3


class SessionLife(RuleBasedStateMachine):
    """Turns, answers, given-up turns, late stop strings and ends in any order, beside a model of every path."""

    def __init__(self) -> None:
        super().__init__()
        self.state = session()
        self.paths: dict[TurnId, list[tuple[int, int]]] = {}  # by turn: ids with their version, -1 for prompts
        self.parents: dict[TurnId, TurnId | None] = {}
        self.running: dict[TurnId, TurnRequest] = {}
        self.phase = "live"

    def free(self) -> list[TurnId]:
        """Turns that nothing goes on from."""
        used = {*self.parents.values(), *(asked.parent for asked in self.running.values())}
        return [turn_id for turn_id in self.paths if turn_id not in used]

    @rule(new=st.lists(st.integers(0, 3), min_size=1, max_size=3), data=st.data())
    def begin(self, new: list[int], data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([None, *self.paths]))
        asked = request(*(i for i, _ in self.paths.get(parent, [])), *new, parent=parent)  # type: ignore[arg-type]
        if self.phase != "live":
            with pytest.raises(Conflict):
                self.state.begin_turn(asked, 103.0)
            return
        self.state.begin_turn(asked, 103.0)
        self.running[asked.turn_id] = asked

    @precondition(lambda self: self.running)
    @rule(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3), data=st.data())
    def end(self, parts: list[tuple[int, int]], data: st.DataObject) -> None:
        asked = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        record = answer(asked, *parts)
        versions = [version for version, tokens in parts for _ in range(tokens)]
        before = self.paths[asked.parent] if asked.parent is not None else []
        prompt = [(i, -1) for i in asked.prompt_ids[len(before) :]]
        self.paths[asked.turn_id] = [*before, *prompt, *zip(record.token_ids, versions, strict=True)]
        self.parents[asked.turn_id] = asked.parent
        self.state.end_turn(record, 104.0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[turn_id]
        self.state.drop_turn(turn_id, 104.0)

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def shorten(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(self.free()))
        kept = data.draw(st.integers(0, len(self.state.tree.turns[turn_id].token_ids)))
        surplus = len(self.state.tree.turns[turn_id].token_ids) - kept
        if self.phase == "live":  # else it is too late
            self.paths[turn_id] = self.paths[turn_id][: len(self.paths[turn_id]) - surplus]
        self.state.shorten_turn(turn_id, kept)

    @precondition(lambda self: len(self.paths) > 3)  # not at once: most lives should see a few turns
    @rule(phase=st.sampled_from(["finished", "abandoned"]))
    def close(self, phase: Literal["finished", "abandoned"]) -> None:
        if self.phase != "live" or (phase == "finished" and self.running):
            with pytest.raises(Conflict):
                self.state.end(phase)
        else:
            self.state.end(phase)
            self.phase = phase

    @invariant()
    def each_leaf_is_what_was_asked_and_said_on_its_path(self) -> None:
        parents = set(self.parents.values())
        leaves = [path for turn_id, path in self.paths.items() if turn_id not in parents]
        assert [t.token_ids for t in told(self.state)] == [[i for i, _ in path] for path in leaves]

    @invariant()
    def every_sampled_token_is_trained_on_once_under_its_version(self) -> None:
        trained = sorted(v for t in told(self.state) for _, _, mask, v in rows(t) if mask)
        said = [v for t in self.state.tree.turns.values() for v in t.versions]
        assert trained == sorted(said)
        assert len(said) == self.state.sampled_tokens
        assert all((mask == 0) == (version == -1) for t in told(self.state) for _, _, mask, version in rows(t))

    @invariant()
    def segments_cover_exactly_what_was_sampled(self) -> None:
        for turn_id, path in self.paths.items():
            record = self.state.tree.sequence(self.state.tree.turns[turn_id], set())
            covered = [(i, s.version) for s in record.segments for i in range(s.start, s.end)]
            assert covered == [(i, version) for i, (_, version) in enumerate(path) if version >= 0]

    @invariant()
    def what_runs_is_known_and_an_ended_session_stays_ended(self) -> None:
        assert self.state.running == self.running
        assert self.state.phase == self.phase


TestSessionLife = SessionLife.TestCase
TestSessionLife.settings = settings(examples(60), stateful_step_count=20)
