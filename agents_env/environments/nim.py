"""Nim, a game of two players: each in turn takes one or more objects from one heap; who takes the last one wins.

    user       A 3, B 5, C 2
    assistant  B 4
    user       You took 4 from B. The other took 1 from C. A 3, B 1, C 1
    ...

Each player is a session of its own: the rollout's, and its opponent's, which is the same model (self-play, both are
trained), the model at an older version (only the first is trained), or a program. Who begins is part of the task.

Scoring: 1 for the winner, 0 for the loser. Who writes anything but a move that the rules allow has lost. If the other
had no turn until then, it gets one, and loses as well if it does the same: every session has a turn to reward.
`metrics` have the share of the first player's moves that keep a won position won (Bouton's theorem: the heaps'
exclusive or is 0).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import Any, Literal

from agents_env.environment import Chat, Message, Outcome, Seats

SYSTEM = (
    "Nim: take one or more objects from one heap, in turn. Who takes the last object wins. Write only a heap and a "
    "number, such as: B 2"
)
MAX_TOKENS = 8
NAMES = "ABCDEFGH"
HEAP_MAX = 7
OPPONENT = "opponent"
_MOVE = re.compile(r"([A-H])\s*[:,]?\s*(\d{1,3})")

Kind = Literal["self", "random", "perfect"]
Heaps = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    heap: int
    number: int

    def __str__(self) -> str:
        return f"{self.number} from {NAMES[self.heap]}"


@dataclass(frozen=True, slots=True)
class Position:
    """A task: the heaps, and whether the rollout's own session begins."""

    heaps: Heaps
    begins: bool

    @property
    def task_id(self) -> str:
        return "-".join(map(str, self.heaps)) + ("-first" if self.begins else "-second")


class Nim:
    """The environment of this module. `version`: the opponent's, which is then not trained; None: the model's own."""

    name = "nim"

    def __init__(
        self, *, opponent: Kind = "self", version: int | None = None, num_heaps: int = 3, max_tokens: int = MAX_TOKENS
    ) -> None:
        if version is not None and opponent != "self":
            raise ValueError(f"an opponent that is a program ({opponent}) has no version")
        if not 1 <= num_heaps <= len(NAMES):
            raise ValueError(f"1 to {len(NAMES)} heaps, not {num_heaps}")
        self._opponent = opponent
        self._version = version
        self._num_heaps = num_heaps
        self._max_tokens = max_tokens

    def tasks(self, seed: int) -> Iterator[Position]:
        rng = random.Random(f"nim {seed}")
        while True:
            heaps = tuple(rng.randint(1, HEAP_MAX) for _ in range(self._num_heaps))
            yield Position(heaps, rng.random() < 0.5)

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> Position:
        """`data`: `{"heaps": [3, 5, 2], "begins": true}`."""
        heaps = tuple(int(size) for size in data["heaps"])
        if not 1 <= len(heaps) <= len(NAMES) or not all(1 <= size <= 100 for size in heaps):
            raise ValueError(f"`heaps` are 1 to {len(NAMES)} numbers from 1 to 100")
        return Position(heaps, bool(data["begins"]))

    def data_of(self, task: Position) -> Mapping[str, Any]:
        return {"heaps": list(task.heaps), "begins": task.begins}

    async def rollout(self, task: Position, client: Chat) -> Outcome:
        """A game whose players share one session, each with a conversation of its own: for callers without seats."""
        return await self.match(task, client, _SameSession(client))

    async def match(self, task: Position, client: Chat, seats: Seats) -> Outcome:
        first = _Model(client, self._max_tokens)
        other: _Model | _Program
        if self._opponent == "self":
            other = _Model(await seats.take(OPPONENT, version=self._version), self._max_tokens)
        else:
            other = _Program(_PROGRAMS[self._opponent], random.Random(f"nim opponent {task.task_id}"))
        game = await _play(task, first, other)
        if self._opponent == "self":
            await seats.leave(OPPONENT, Outcome(float(game.lost), metrics={"won": float(game.lost)}))
        metrics = {
            "won": float(game.won),
            "moves": game.moves,
            "illegal": float(game.illegal),
            "kept_won": game.kept_won / game.won_positions if game.won_positions else 1.0,
        }
        return Outcome(float(game.won), metrics=metrics)


@dataclass(frozen=True, slots=True)
class _SameSession:
    chat: Chat

    async def take(self, name: str, *, version: int | None = None) -> Chat:
        return self.chat

    async def leave(self, name: str, outcome: Outcome) -> None:
        """The session's end is the rollout's."""


@dataclass(slots=True)
class _Game:
    won: bool = False
    lost: bool = False  # both are False when both broke the rules
    illegal: bool = False
    moves: int = 0
    won_positions: int = 0
    kept_won: int = 0


async def _play(task: Position, first: _Model | _Program, other: _Model | _Program) -> _Game:
    """Plays to the end; the result is the first player's."""
    heaps, game = task.heaps, _Game()
    mine = task.begins
    while any(heaps):
        player = first if mine else other
        move = await player.move(heaps)
        if mine:
            game.moves += 1
            game.won_positions += nim_sum(heaps) != 0
        if move is None:
            opposite = other if mine else first
            obeys = opposite.turns > 0 or await opposite.move(heaps) is not None
            game.illegal = mine or not obeys
            game.won, game.lost = obeys and not mine, obeys and mine
            return game
        before, heaps = heaps, after(heaps, move)
        if mine:
            game.kept_won += nim_sum(before) != 0 and nim_sum(heaps) == 0
        (other if mine else first).heard.append(f"The other took {move}.")
        player.heard.append(f"You took {move}.")
        game.won, game.lost = mine, not mine  # whoever moved last
        mine = not mine
    return game


@dataclass(slots=True)
class _Model:
    """A player that is a session: the whole conversation is its own."""

    chat: Chat
    max_tokens: int
    messages: list[Message] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    heard: list[str] = field(default_factory=list)
    """What happened since its last turn."""
    turns: int = 0

    async def move(self, heaps: Heaps) -> Move | None:
        self.turns += 1
        self.messages.append({"role": "user", "content": " ".join([*self.heard, show(heaps)])})
        self.heard.clear()
        reply = await self.chat.reply(self.messages, max_tokens=self.max_tokens)
        self.messages.append({"role": "assistant", "content": reply.text})
        return move_of(reply.text, heaps)


@dataclass(slots=True)
class _Program:
    choose: Callable[[Heaps, random.Random], Move]
    rng: random.Random
    heard: list[str] = field(default_factory=list)
    turns: int = 0

    async def move(self, heaps: Heaps) -> Move:
        self.turns += 1
        self.heard.clear()
        return self.choose(heaps, self.rng)


def show(heaps: Heaps) -> str:
    return ", ".join(f"{NAMES[index]} {size}" for index, size in enumerate(heaps))


def move_of(text: str, heaps: Heaps) -> Move | None:
    """The move that a reply is; None when it is anything else, or against the rules."""
    match = _MOVE.fullmatch(text.strip().removesuffix(".").upper())
    if match is None:
        return None
    move = Move(NAMES.index(match[1]), int(match[2]))
    return move if move.heap < len(heaps) and 1 <= move.number <= heaps[move.heap] else None


def after(heaps: Heaps, move: Move) -> Heaps:
    return tuple(size - move.number if index == move.heap else size for index, size in enumerate(heaps))


def nim_sum(heaps: Heaps) -> int:
    return reduce(xor, heaps, 0)


def all_moves(heaps: Heaps) -> list[Move]:
    return [Move(index, number) for index, size in enumerate(heaps) for number in range(1, size + 1)]


def _random_move(heaps: Heaps, rng: random.Random) -> Move:
    return rng.choice(all_moves(heaps))


def _perfect_move(heaps: Heaps, rng: random.Random) -> Move:
    winning = [move for move in all_moves(heaps) if nim_sum(after(heaps, move)) == 0]
    return rng.choice(winning or all_moves(heaps))


_PROGRAMS: Mapping[str, Callable[[Heaps, random.Random], Move]] = {"random": _random_move, "perfect": _perfect_move}
