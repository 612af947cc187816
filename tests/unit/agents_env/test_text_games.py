"""textarena's games: what players read, who gets which reward, and games that do not disturb each other."""

from __future__ import annotations

import asyncio
import random
import re
from itertools import islice
from typing import Any

import pytest

from agents_env.environment import Chat, Message, Outcome
from agents_env.environments.text_games import GAMES, TURNS_MAX, GameTask, TextGames, UnknownGame, scaled
from tests.unit.agents_env.scripted_chat import ScriptedChat

pytestmark = pytest.mark.slow  # the library takes seconds to import


class OneSeat:
    """The seat of one scripted opponent."""

    def __init__(self, script: Any) -> None:
        self.chat = ScriptedChat(script)
        self.version: int | None = None
        self.left: Outcome | None = None

    async def take(self, name: str, *, version: int | None = None) -> Chat:
        self.version = version
        return self.chat

    async def leave(self, name: str, outcome: Outcome) -> None:
        self.left = outcome


def bisect(messages: list[Message]) -> str:
    low, high, guess = 1, 20, 0
    for message in messages:
        if message["role"] == "assistant":
            guess = int(message["content"].strip("[]"))
        elif guess and "higher" in message["content"]:
            low = guess + 1
        elif guess and "lower" in message["content"]:
            high = guess - 1
    return f"[{(low + high) // 2}]"


def in_order(*replies: str) -> Any:
    left = list(replies)
    return lambda _: left.pop(0)


async def test_a_game_of_one_player_is_one_conversation() -> None:
    chat = ScriptedChat(bisect)
    environment = TextGames()
    outcome = await environment.rollout(GameTask("GuessTheNumber-v0", 5), chat)
    assert (outcome.reward, outcome.status) == (1.0, "completed")
    first, second = chat.conversations[0], chat.conversations[1]
    assert "between 1 and 20" in first[0]["content"]
    assert second[:2] == [*first, {"role": "assistant", "content": "[10]"}]
    assert re.search("higher|lower", second[2]["content"])
    assert "[10]" not in second[2]["content"]


async def test_both_players_of_a_game_have_their_own_reward() -> None:
    seats = OneSeat(in_order("[3]", "[4]"))
    environment = TextGames("TicTacToe-v0", version=3)
    outcome = await environment.match(GameTask("TicTacToe-v0", 1), ScriptedChat(in_order("[0]", "[1]", "[2]")), seats)
    assert seats.left is not None
    assert (outcome.reward, seats.left.reward, seats.version) == (1.0, 0.0, 3)
    told = seats.chat.conversations[0][0]["content"]
    assert "You are Player 1" in told
    assert "Player 0: [0]" in told


async def test_who_begins_is_the_rollouts_own_session_whoever_that_is() -> None:
    environment = TextGames("KuhnPoker-v0-short")
    for seed in range(6):  # the library draws who begins
        seats, chat = OneSeat(lambda _: "[fold] [check]"), ScriptedChat(lambda _: "nonsense")
        outcome = await environment.match(GameTask("KuhnPoker-v0-short", seed), chat, seats)
        assert chat.conversations
        assert outcome.reward == 0.0


async def test_a_game_without_end_is_truncated() -> None:
    environment = TextGames("TowerOfHanoi-v0")
    replies = (f"[{pair}]" for _ in range(TURNS_MAX) for pair in ("A B", "B A"))
    outcome = await environment.rollout(GameTask("TowerOfHanoi-v0", 1), ScriptedChat(lambda _: next(replies)))
    assert outcome.reward < 1.0
    assert outcome.metrics["turns"] <= TURNS_MAX


async def test_games_at_once_are_what_each_is_alone() -> None:
    environment = TextGames("2048-v0-ultra-easy")

    async def boards(seed: int) -> list[str]:
        moves = (move for _ in range(TURNS_MAX) for move in ("[left]", "[down]", "[right]", "[up]"))
        chat = ScriptedChat(lambda _: next(moves))
        await environment.rollout(GameTask("2048-v0-ultra-easy", seed), chat)
        return [message["content"] for message in chat.conversations[-1]]

    random.seed(1)
    alone = [await boards(1), await boards(2)]
    drawn = random.random()
    random.seed(1)
    assert random.random() == drawn, "a game has drawn from everybody's generator"
    random.seed(2)
    assert await asyncio.gather(boards(1), boards(2)) == alone


@pytest.mark.parametrize("game", [f"{family}-v0" for family in GAMES])
def test_each_game_of_the_list_begins(game: str) -> None:
    environment = TextGames(game)
    tasks = list(islice(environment.tasks(1), 20))
    assert tasks == list(islice(environment.tasks(1), 20))
    assert all(environment.task_of("", environment.data_of(task)) == task for task in tasks)


@pytest.mark.parametrize(
    ("game", "said"),
    [
        ("Wordle-v0", "Wordle-v0 is not among"),
        ("Nothing", "is not among"),
        ("TicTacToe-v9", "has no game 'TicTacToe-v9'"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_by_name(game: str, said: str) -> None:
    with pytest.raises(UnknownGame, match=said):
        TextGames(game)


def test_a_game_of_one_has_no_opponent() -> None:
    with pytest.raises(UnknownGame, match="one player"):
        TextGames("Sudoku-v0", version=2)


def test_rewards_are_from_0_to_1() -> None:
    assert [scaled(reward, 2) for reward in (-1, 0, 1, 9)] == [0, 0.5, 1, 1]
    assert [scaled(reward, 1) for reward in (-1, 0.25, 1)] == [0, 0.25, 1]
