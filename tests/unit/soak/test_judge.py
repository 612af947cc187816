"""The judge finds what is lost, doubled or altered, whichever side it is on, and says nothing of what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.soak.journal import Entry
from tests.soak.judge import Judge
from tests.soak.work import Session, body_of, merged, session_name, session_of

NAME = next(name for number in range(100) if len(session_of(name := session_name(1, 1, number), 2).turns) == 3)
SESSION = session_of(NAME, 2)


def answers(session: Session) -> list[list[int]]:
    return [[100 * number + n for n in range(turn.num_tokens)] for number, turn in enumerate(session.turns)]


def rolled_out(session: Session = SESSION, version: int = 3) -> list[Entry]:
    """A runner's journal of a session that went well."""
    entries: list[Entry] = [{"did": "begin", "session": session.name}]
    for number, ids in enumerate(answers(session)):
        entries.append(
            {"did": "turn", "session": session.name, "turn": number, "ids": ids, "spans": [[0, len(ids), version]]}
        )
    return [*entries, {"did": "finish", "session": session.name}]


def used(session: Session = SESSION, version: int = 3) -> Entry:
    """The trainer's entry of the same."""
    ids: list[int] = []
    runs = []
    for turn, answer in zip(session.turns, answers(session), strict=True):
        ids += turn.prompt
        runs.append([len(ids), len(ids) + len(answer), version])
        ids += answer
    one = {"session": session.name, "reward": session.reward, "leaf": 0, "leaves": 1, "ids": ids, "runs": runs}
    return {"did": "used", "lease": "l", "used": [one], "reader": {}}


def judged(*entries: Entry) -> Judge:
    judge = Judge(2)
    for entry in entries:
        (judge.trainer if entry["did"] in ("used", "late", "published") else judge.runner)(entry)
    judge.close()
    return judge


def test_what_is_right_is_no_finding_in_either_order() -> None:
    for entries in ([*rolled_out(), used()], [*rolled_out()[:-1], used(), rolled_out()[-1]]):
        judge = judged(*entries)
        assert (judge.findings, judge.outstanding) == ([], 0)
        assert judge.counts["turns"] == 3
        assert judge.counts["tokens"] == sum(map(len, answers(SESSION)))


def _without_an_answer(entry: Entry) -> None:
    del entry["used"][0]["ids"][-1]


def _another_reward(entry: Entry) -> None:
    entry["used"][0]["reward"] += 0.5


def _another_version(entry: Entry) -> None:
    entry["used"][0]["runs"][1][2] += 1


def _masked(entry: Entry) -> None:
    del entry["used"][0]["runs"][1]


def _another_token(entry: Entry) -> None:
    entry["used"][0]["ids"][-1] += 1


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_without_an_answer, "turn lost"),
        (_another_token, "turn lost"),
        (_another_reward, "wrong reward"),
        (_another_version, "wrong versions"),
        (_masked, "wrong versions"),
    ],
)
def test_a_trajectory_that_is_not_what_its_runner_was_answered(change: Callable[[Entry], None], kind: str) -> None:
    entry = used()
    change(entry)
    assert judged(*rolled_out(), entry).failures == {kind: 1}


def test_a_trajectory_that_never_comes_is_lost_with_all_its_turns() -> None:
    assert judged(*rolled_out()).failures == {"turn lost": 3}
    assert judged(*rolled_out()[:2]).failures == {"turn lost": 1}, "never finished"


def test_a_trajectory_that_comes_twice_is_doubled_also_after_its_session_was_settled() -> None:
    assert judged(*rolled_out(), used(), used()).failures == {"turn doubled": 3}
    assert judged(*rolled_out()[:-1], used(), used(), rolled_out()[-1]).failures == {"turn doubled": 3}


def test_a_second_leaf_is_a_turn_that_was_recorded_twice() -> None:
    entry = used()
    entry["used"].append({**entry["used"][0], "leaf": 1, "leaves": 2})
    assert judged(*rolled_out(), entry).failures == {"turn doubled": 1}


def test_what_nobody_began_and_what_was_refused() -> None:
    assert judged(used()).failures == {"unknown session": 1}
    refused = {"did": "refused", "session": NAME, "why": "404"}
    assert judged(*rolled_out()[:2], refused).failures == {"turn lost": 1}


def test_an_answer_of_another_length_or_with_spans_that_do_not_cover_it() -> None:
    turn = rolled_out()[1]
    assert judged({**turn, "spans": [[1, len(turn["ids"]), 3]]}, *rolled_out()[2:]).failures["wrong versions"] == 1
    short = {**turn, "ids": turn["ids"][:-1], "spans": [[0, len(turn["ids"]) - 1, 3]]}
    assert judged(short, *rolled_out()[2:]).failures["turn lost"] >= 1


def test_each_span_is_to_be_compared_after_what_was_said_before_it() -> None:
    judge = Judge(2)
    first = rolled_out()[1]
    ids = first["ids"]
    spans = judge.runner({**first, "spans": [[0, 5, 3], [5, len(ids), 4]]})
    prompt = SESSION.turns[0].prompt
    assert [(s.version, s.before, s.found) for s in spans] == [
        (3, prompt, tuple(ids[:5])),
        (4, (*prompt, *ids[:5]), tuple(ids[5:])),
    ]


def published(step: int, version: int) -> dict[str, Any]:
    return {"did": "published", "step": step, "version": version}


def test_versions_grow_and_each_has_one_step() -> None:
    judge = judged(published(1, 1), published(2, 3))
    judge.shown("relay-1", 1, 1)
    judge.shown("relay-1", 3, 2)
    assert not judge.failures
    judge.shown("relay-1", 1, 1)
    assert judge.failures == {"version went back": 1}
    judge.shown("relay-2", 3, 7)
    assert judge.failures["wrong versions"] == 1
    assert judged(published(1, 2), published(2, 2)).failures["version went back"] == 1


def test_a_lease_that_ended_before_its_acknowledgement() -> None:
    assert judged({"did": "late", "lease": "l", "why": "gone"}).failures == {"lease lost": 1}


def test_sessions_follow_from_their_names_alone() -> None:
    assert session_of(NAME, 2) == session_of(NAME, 2) != session_of(session_name(2, 1, 0), 2)
    assert {session_of(session_name(1, 1, n), 2).gateway for n in range(4)} == {0, 1}
    body = body_of(SESSION.turns[0], SESSION.turns[0].prompt)
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (SESSION.turns[0].num_tokens, 0, True)


def test_neighbouring_runs_of_one_version_are_one() -> None:
    assert merged([(0, 3, 1), (3, 5, 1), (5, 5, 2), (5, 6, 2), (9, 10, 2)]) == [(0, 5, 1), (5, 6, 2), (9, 10, 2)]
