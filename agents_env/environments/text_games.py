"""Games of the `textarena` library, for one player or two; each player is a session of its own.

    user       You are Player 0 in Tic Tac Toe. ... Available Moves: '[0]', '[1]', ...
    assistant  [4]
    user       Player 1: [0] ... Current Board: ...

The second player is the same model (self-play, both are trained), or the model at an older version (only the first is
trained). The rollout's own session is the player that begins, so that it has a turn to reward.

Scoring: the library's reward; that of a game of two, from -1 to 1, becomes 0 to 1. A game that is not over after
`TURNS_MAX` turns is truncated, with a reward of 0 for all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agents_env.environment import Chat, Message, Outcome, Seats

GAMES: Mapping[str, int] = {
    "2048": 1,
    "FrozenLake": 1,
    "GuessTheNumber": 1,
    "KuhnPoker": 2,
    "LightsOut": 1,
    "Mastermind": 1,
    "Minesweeper": 1,
    "Sudoku": 1,
    "TicTacToe": 2,
    "TowerOfHanoi": 1,
}
"""The families of games that are known to need nothing but the library, with their number of players."""
DEFAULT_GAME = "GuessTheNumber-v0"
OPPONENT = "opponent"
TURNS_MAX = 60
MAX_TOKENS = 64


class UnknownGame(ValueError):
    """No such game, or one that needs more than the library."""


@dataclass(frozen=True, slots=True)
class GameTask:
    """A game's beginning."""

    game: str
    seed: int

    @property
    def task_id(self) -> str:
        return f"{self.game}-{self.seed}"


class TextGames:
    """The environment of one game. `version`: the second player's, which is then not trained; None: the model's own."""

    name = "textarena"

    def __init__(self, game: str = DEFAULT_GAME, *, version: int | None = None, max_tokens: int = MAX_TOKENS) -> None:
        self._game = game
        self._num_players = num_players(game)
        if version is not None and self._num_players == 1:
            raise UnknownGame(f"{game} has one player, so no opponent of another version")
        self._version = version
        self._max_tokens = max_tokens
        _Game(GameTask(game, 0), self._num_players)  # refuses a game that cannot begin here

    def tasks(self, seed: int) -> Iterator[GameTask]:
        rng = random.Random(f"textarena {self._game} {seed}")
        while True:
            yield GameTask(self._game, rng.getrandbits(31))

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> GameTask:
        """`data`: `{"seed": 7}`."""
        return GameTask(self._game, int(data["seed"]))

    def data_of(self, task: GameTask) -> Mapping[str, Any]:
        return {"seed": task.seed}

    async def rollout(self, task: GameTask, client: Chat) -> Outcome:
        """A game whose players share one session, each with a conversation of its own: for callers without seats."""
        return (await self._play(task, [client] * self._num_players))[0]

    async def match(self, task: GameTask, client: Chat, seats: Seats) -> Outcome:
        if self._num_players == 1:
            return await self.rollout(task, client)
        own, other = await self._play(task, [client, await seats.take(OPPONENT, version=self._version)])
        await seats.leave(OPPONENT, other)
        return own

    async def _play(self, task: GameTask, chats: Sequence[Chat]) -> list[Outcome]:
        """The outcomes of the players, the one that begins first."""
        game = _Game(task, self._num_players)
        number, news = game.observe()
        order = [number, *(other for other in range(self._num_players) if other != number)]
        players = {who: _Player(who, chat, self._max_tokens) for who, chat in zip(order, chats, strict=True)}
        turns = 1
        over = game.step(await players[number].turn(news))
        while not over and turns < TURNS_MAX:
            number, news = game.observe()
            over = game.step(await players[number].turn(news))
            turns += 1
        rewards = game.rewards() if over else {}
        status: Literal["completed", "truncated"] = "completed" if over else "truncated"
        metrics = {"turns": turns, "over": float(over)}
        return [Outcome(self._scaled(rewards.get(who)), status, metrics) for who in order]

    def _scaled(self, reward: float | None) -> float:
        return 0.0 if reward is None else scaled(reward, self._num_players)


def num_players(game: str) -> int:
    """Raises UnknownGame."""
    family = game.partition("-v")[0]
    if family not in GAMES:
        raise UnknownGame(
            f"{game} is not among the games that need only the library, and neither the net, a judge nor a "
            f"newer Python: {', '.join(GAMES)}"
        )
    return GAMES[family]


def scaled(reward: float, num_players: int) -> float:
    return min(max((reward + 1) / 2 if num_players == 2 else reward, 0.0), 1.0)


@dataclass(slots=True)
class _Player:
    number: int
    chat: Chat
    max_tokens: int
    messages: list[Message] = field(default_factory=list)

    async def turn(self, news: list[tuple[int, str]]) -> str:
        said = [text if sender < 0 else f"Player {sender}: {text}" for sender, text in news if sender != self.number]
        self.messages.append({"role": "user", "content": "\n".join(said)})
        reply = await self.chat.reply(self.messages, max_tokens=self.max_tokens)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply.text


class _Game:
    """One game of the library, which draws from Python's global generator: each game has a state of it for itself."""

    def __init__(self, task: GameTask, num_players: int) -> None:
        try:
            import textarena  # takes seconds to import, which the others need not pay
        except ModuleNotFoundError as error:
            raise UnknownGame(f"{error}; install laminar-rl[games]") from error
        self._random: Any = None
        try:
            self._game = textarena.make(f"{task.game}-raw")  # raw: what is new, instead of the whole history again
        except (ValueError, ImportError) as error:
            raise UnknownGame(f"textarena has no game {task.game!r}: {error}") from error
        self._with_own_random(self._game.reset, num_players=num_players, seed=task.seed)

    def observe(self) -> tuple[int, list[tuple[int, str]]]:
        """The player whose turn it is, and what is new to them: senders, -1 for the game, and texts."""
        number, news = self._with_own_random(self._game.get_observation)
        return number, [(sender, str(text)) for sender, text, _ in news]

    def step(self, action: str) -> bool:
        """Makes a move; returns whether the game is over."""
        over, _ = self._with_own_random(self._game.step, action)
        return bool(over)

    def rewards(self) -> dict[int, float]:
        rewards, _ = self._with_own_random(self._game.close)
        return {int(number): float(reward) for number, reward in (rewards or {}).items()}

    def _with_own_random(self, call: Any, *arguments: Any, **named: Any) -> Any:
        before = random.getstate()
        if self._random is not None:
            random.setstate(self._random)
        try:
            return call(*arguments, **named)
        finally:
            self._random = random.getstate()
            random.setstate(before)
