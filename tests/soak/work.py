"""What clients ask, and what is right: sessions by number, and weights by step. Pure.

Invariants:
- a session follows from the run's seed, its runner and its number, so whoever knows these knows its prompts, the number
  of tokens of each answer, and its reward;
- the weights of a step follow from the step, so a version can be compared bit for bit, and greedy tokens with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MODEL = "policy"
FIRST_ID, LAST_ID = 3, 500
"""Token ids of prompts: none of the tokenizer's special ones."""
TURNS_MAX = 3
PROMPT_MIN, PROMPT_MAX = 4, 40
ANSWER_MIN, ANSWER_MAX = 8, 160
"""Tokens. The longest answers take an engine some seconds, so that most faults meet turns in their middle."""
REWARDS = 1 << 20
"""Different rewards: one that is another session's is noticed."""

Run = tuple[int, int, int]
"""Tokens `start` to `end`, exclusive, of one version: (start, end, version)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`prompt`: the new ids of this turn. The answer has exactly `num_tokens`: the end token is ignored."""

    prompt: tuple[int, ...]
    num_tokens: int
    stream: bool


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    gateway: int
    turns: tuple[Turn, ...]
    reward: float


def session_name(seed: int, runner: int, number: int) -> str:
    return f"soak{seed}-{runner}-{number}"


def session_of(name: str, num_gateways: int) -> Session:
    """The session of that name."""
    _, runner, number = (int(part) for part in name.removeprefix("soak").split("-"))
    chance = random.Random(name)
    turns = tuple(_turn(chance) for _ in range(chance.randint(1, TURNS_MAX)))
    return Session(name, (runner + number) % num_gateways, turns, chance.randrange(REWARDS) / REWARDS)


def _turn(chance: random.Random) -> Turn:
    prompt = tuple(chance.randint(FIRST_ID, LAST_ID) for _ in range(chance.randint(PROMPT_MIN, PROMPT_MAX)))
    return Turn(prompt, chance.randint(ANSWER_MIN, ANSWER_MAX), chance.random() < 0.5)


def body_of(turn: Turn, history: Sequence[int]) -> dict[str, Any]:
    """The request of a turn, to `/v1/completions`. `history` has its prompt at the end."""
    return {
        "model": MODEL,
        "prompt": list(history),
        "max_tokens": turn.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": turn.stream,
        "return_token_ids": True,
        "return_weight_versions": True,
    }


def merged(runs: Sequence[Run]) -> list[Run]:
    """Neighbours of one version as one run; empty ones are left out."""
    found: list[Run] = []
    for start, end, version in runs:
        if found and found[-1][1:] == (start, version):
            found[-1] = (found[-1][0], end, version)
        elif end > start:
            found.append((start, end, version))
    return found
