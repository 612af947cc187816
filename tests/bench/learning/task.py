"""The task: count down from a number, then stop. Pure.

The prompt is `down N`, the right answer N-1, N-2, ..., 0 and the end of the text: N + 1 tokens, one for each number.
Numbers are drawn so that answers have a long tail: the 99th percentile is some ten times the median, as in the paper
(arXiv 2510.12633, section 2). Nothing but the model ends an answer before `ANSWER_MAX` tokens.

Invariants:
- prompts depend on the seed and their number alone, so that all modes get the same ones in the same order;
- a reward depends on the answer's tokens alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

UNKNOWN, DOWN, END = 0, 1, 2
FIRST_NUMBER = 16
"""Token id of the number 0; the ids between are unused."""
NUMBER_MAX = 255
VOCAB = FIRST_NUMBER + NUMBER_MAX + 1
ANSWER_MAX = NUMBER_MAX + 33
"""A bound on answers that lost count. The longest right one has `NUMBER_MAX + 1` tokens."""

MEDIAN = 20.0
SIGMA = 1.0
"""Of the logarithm. exp(2.33 sigma) is 10.3: the 99th percentile over the median."""
STUMBLE = 0.12
"""How often a demonstration of the warm start is wrong at a number."""


def words() -> dict[str, int]:
    """The whole vocabulary: a token is a word."""
    numbers = {str(n): FIRST_NUMBER + n for n in range(NUMBER_MAX + 1)}
    return {"<unk>": UNKNOWN, "down": DOWN, "</s>": END, **numbers}


def prompt(n: int) -> list[int]:
    return [DOWN, FIRST_NUMBER + n]


def right_answer(n: int) -> list[int]:
    return [*range(FIRST_NUMBER + n - 1, FIRST_NUMBER - 1, -1), END]


def reward(n: int, answer: Sequence[int]) -> float:
    """The share of the right answer that was written before the first mistake. 1.0: counted to 0, and stopped there."""
    right = right_answer(n)
    same = 0
    for written, wanted in zip(answer, right, strict=False):
        if written != wanted:
            break
        same += 1
    return same / len(right)


def number(seed: int, index: int) -> int:
    """The number of prompt `index` (from 0)."""
    drawn = random.Random(f"{seed}/{index}").lognormvariate(math.log(MEDIAN), SIGMA)
    return max(1, min(NUMBER_MAX, round(drawn)))


def even_numbers(count: int) -> list[int]:
    """`count` numbers that are spread as the prompts' are, the same for everybody: its quantiles."""
    of = NormalDist(math.log(MEDIAN), SIGMA)
    drawn = (math.exp(of.inv_cdf((i + 0.5) / count)) for i in range(count))
    return [max(1, min(NUMBER_MAX, round(n))) for n in drawn]


def demonstration(rng: random.Random) -> list[int]:
    """A prompt and an answer that stumbles: at some numbers it repeats the last one or leaves one out."""
    n = rng.randint(1, NUMBER_MAX)
    tokens, at = prompt(n), n
    while at > 0 and len(tokens) < ANSWER_MAX:
        step = rng.choice((0, 2)) if rng.random() < STUMBLE else 1
        at = max(0, at - step)
        tokens.append(FIRST_NUMBER + at)
    return [*tokens, END]
