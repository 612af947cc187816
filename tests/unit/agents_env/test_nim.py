"""Nim: the rules, the two sessions of a game, and who gets which reward."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pytest

from agents_env.environment import Chat, Message, Outcome
from agents_env.environments.nim import (
    SYSTEM,
    Kind,
    Move,
    Nim,
    Position,
    _perfect_move,
    _random_move,
    after,
    all_moves,
    move_of,
    nim_sum,
    show,
)
from agents_env.runner import Plan, Runner
from agents_env.runner.phases import PhaseLimits, Phases
from agents_env.runner.seats import GatewaySeats
from agents_env.server import Sampling, Server, SessionSpec
from tests.unit.agents_env.scripted_chat import ScriptedChat
from tests.unit.agents_env.scripted_server import serving


class ScriptedSeats:
    """Seats whose players are scripted; `left` are the outcomes with which they left."""

    def __init__(self, *replies: str) -> None:
        self.chat = ScriptedChat(_in_order(*replies))
        self.version: int | None = None
        self.left: dict[str, Outcome] = {}

    async def take(self, name: str, *, version: int | None = None) -> Chat:
        self.version = version
        return self.chat

    async def leave(self, name: str, outcome: Outcome) -> None:
        self.left[name] = outcome


def _in_order(*replies: str) -> Any:
    left = list(replies)
    return lambda _: left.pop(0)


async def test_both_players_see_each_others_moves_and_the_last_object_wins() -> None:
    first, seats = ScriptedChat(_in_order("A 1", "b 1.")), ScriptedSeats("B 1")
    outcome = await Nim().match(Position((1, 2), True), first, seats)
    assert outcome.reward == 1.0
    assert seats.left["opponent"].reward == 0.0
    opening: Message = {"role": "system", "content": SYSTEM}
    assert first.conversations[-1] == [
        opening,
        {"role": "user", "content": "A 1, B 2"},
        {"role": "assistant", "content": "A 1"},
        {"role": "user", "content": "You took 1 from A. The other took 1 from B. A 0, B 1"},
    ]
    assert seats.chat.conversations == [[opening, {"role": "user", "content": "The other took 1 from A. A 0, B 2"}]]
    assert dict(outcome.metrics) == {"won": 1.0, "moves": 2, "illegal": 0.0, "kept_won": 0.5}


async def test_the_second_may_begin_and_win() -> None:
    seats = ScriptedSeats("A 2", "A 1")
    outcome = await Nim(version=3).match(Position((4,), False), ScriptedChat(_in_order("A 1")), seats)
    assert (outcome.reward, seats.left["opponent"].reward, seats.version) == (0.0, 1.0, 3)


@pytest.mark.parametrize("reply", ["", "A", "A 0", "A 9", "D 1", "A 1 B 1", "I take A 1", "A -1", "A 99999"])
async def test_who_breaks_the_rules_has_lost(reply: str) -> None:
    """The other gets its turn, so that its session has one."""
    seats = ScriptedSeats("A 1")
    outcome = await Nim().match(Position((3, 3), True), ScriptedChat(_in_order(reply)), seats)
    assert (outcome.reward, outcome.metrics["illegal"], seats.left["opponent"].reward) == (0.0, 1.0, 1.0)
    seats = ScriptedSeats(reply)
    outcome = await Nim().match(Position((3, 3), False), ScriptedChat(_in_order("A 1")), seats)
    assert (outcome.reward, outcome.metrics["illegal"], seats.left["opponent"].reward) == (1.0, 0.0, 0.0)


async def test_who_has_moved_gets_no_turn_more_and_two_who_break_the_rules_lose_both() -> None:
    seats = ScriptedSeats("nonsense")
    outcome = await Nim().match(Position((3, 3), True), ScriptedChat(_in_order("A 1")), seats)
    assert (outcome.reward, seats.left["opponent"].reward) == (1.0, 0.0)
    seats = ScriptedSeats("nonsense")
    outcome = await Nim().match(Position((3, 3), True), ScriptedChat(_in_order("what?")), seats)
    assert (outcome.reward, seats.left["opponent"].reward) == (0.0, 0.0)


@pytest.mark.parametrize(("opponent", "begins", "reward"), [("perfect", True, 0.0), ("perfect", False, 1.0)])
async def test_a_program_needs_no_seat_and_plays_as_it_is_named(opponent: Kind, begins: bool, reward: float) -> None:
    """From 1, 2, 3 whoever begins has lost against a perfect player, and here the model is one as well."""
    seats = ScriptedSeats()
    perfect = Nim(opponent=opponent)
    task = Position((1, 2, 3), begins)
    outcome = await perfect.match(task, ScriptedChat(_perfect_script), seats)
    assert (outcome.reward, seats.left) == (reward, {})


def _perfect_script(messages: Sequence[Mapping[str, Any]]) -> str:
    words = messages[-1]["content"].rpartition(". ")[2]
    heaps = tuple(int(part.split()[1]) for part in words.split(", "))
    move = _perfect_move(heaps, random.Random(0))
    return f"{'ABCDEFGH'[move.heap]} {move.number}"


def test_bouton() -> None:
    """From a position whose sum is 0 every move leads to one that is not, and from any other one move leads back."""
    for heaps in [(1, 2, 3), (5, 5), (1, 4, 5), (7, 1), (3, 3, 2), (6,)]:
        sums = [nim_sum(after(heaps, move)) for move in all_moves(heaps)]
        assert (0 in sums) == (nim_sum(heaps) != 0)
        assert _random_move(heaps, random.Random(1)) in all_moves(heaps)


def test_moves_are_read_back() -> None:
    assert show((3, 0, 2)) == "A 3, B 0, C 2"
    assert move_of(" c: 2", (3, 0, 2)) == Move(2, 2)
    assert move_of("B 1", (3, 0, 2)) is None


def test_tasks_are_the_same_for_a_seed_and_come_back_from_their_data() -> None:
    environment = Nim(num_heaps=4)
    tasks = list(islice(environment.tasks(1), 50))
    assert tasks == list(islice(environment.tasks(1), 50)) != list(islice(environment.tasks(2), 50))
    assert all(environment.task_of("", environment.data_of(task)) == task for task in tasks)
    assert {task.begins for task in tasks} == {True, False}


@pytest.mark.parametrize(
    "data", [{"heaps": [], "begins": True}, {"heaps": [0], "begins": True}, {"heaps": [101], "begins": True}]
)
def test_a_task_that_is_none_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`heaps` are"):
        Nim().task_of("x", data)


def test_a_program_has_no_version() -> None:
    with pytest.raises(ValueError, match="has no version"):
        Nim(opponent="random", version=1)


async def test_without_seats_both_players_share_the_session() -> None:
    chat = ScriptedChat(_perfect_script)
    assert (await Nim().rollout(Position((3, 5), True), chat)).reward == 1.0


@pytest.mark.parametrize("version", [None, 4])
async def test_each_player_is_a_session_of_the_gateway_with_its_own_group_and_reward(version: int | None) -> None:
    async with serving(_perfect_script) as server, Server(server.url, Sampling("policy")) as client:
        plan = Plan(run_id="r", groups=2, group_size=2, concurrency=4)
        await Runner(Nim(version=version), client, plan).run(asyncio.Event())
    assert len(server.sessions) == len(server.finished) == 8
    for index in range(2):
        for sample in range(2):
            own = f"nim-r-{index}-{sample}"
            opened = server.sessions[f"{own}-opponent"]
            assert opened["group_id"] == f"nim-r-{index}-opponent"
            assert (opened["parent_session_id"], opened["blocks_parent"], opened["sample_index"]) == (own, True, sample)
            assert (opened["train"], opened.get("version")) == (version is None, version)
            assert "parent_session_id" not in server.sessions[own]
            assert server.finished[own]["reward"] + server.finished[f"{own}-opponent"]["reward"] == 1.0


async def test_a_game_that_breaks_down_abandons_its_own_session_and_with_it_the_opponents() -> None:
    async with serving(lambda _: 1 / 0) as server, Server(server.url, Sampling("policy"), patience_s=0) as client:
        plan = Plan(run_id="r", groups=1, group_size=1, attempts=1)
        await Runner(Nim(), client, plan).run(asyncio.Event())
    assert list(server.abandoned) == ["nim-r-0-0"]
    assert server.finished == {}


async def test_a_player_without_a_turn_is_abandoned_as_it_has_nothing_to_reward() -> None:
    async with serving(lambda _: "A 1") as server, Server(server.url, Sampling("policy")) as client:
        spec = SessionSpec("s", "g", 0, 1)
        seats = GatewaySeats(client, spec, Phases(PhaseLimits()))
        await seats.take("idle")
        await seats.leave("idle", Outcome(1.0))
    assert list(server.abandoned) == ["s-idle"]
    assert server.finished == {}
