"""Chooses the dtype and the number of threads with which a processor computes a model fastest, from measurements. Pure.

Processors differ: one with bf16 instructions is two to four times faster in bfloat16, one without them two to four
times faster in float32. A processor's flags do not show how well a library uses them, so measurements decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Dtype = Literal["float32", "bfloat16"]

FLOAT32_MARGIN = 1.1
"""bfloat16 has to be faster than this: at about the same speed float32 is better, since its greedy moves are exact."""
THREADS_MARGIN = 1.25
"""More threads have to be faster than this: they are taken from another process."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of one dtype with so many threads: tokens per second of the whole model's matrix products alone.

    Upper bounds, for comparison: attention, norms and sampling take time, too.
    """

    dtype: Dtype
    threads: int
    decode: float  # a step of few sequences: limited by memory
    prefill: float
    train: float  # forward and backward


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of each kind a job has, in proportion."""

    decode: float
    prefill: float
    train: float = 0.0

    def seconds(self, figure: Figure) -> float:
        return self.decode / figure.decode + self.prefill / figure.prefill + self.train / figure.train


SERVING = Work(decode=1.0, prefill=2.0)
"""An engine alone: multi-turn prompts, whose beginnings the prefix cache has, beside short answers."""
TRAINING = Work(decode=1.0, prefill=2.0, train=4.0)
"""Engines and their trainer on one processor, as the demo has them: a trainer reads prompts and answers whole."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """`threads` of a process that has the processor to itself."""

    dtype: Dtype
    threads: int
    reason: str
    figures: tuple[Figure, ...]

    @property
    def chosen(self) -> Figure:
        return next(f for f in self.figures if (f.dtype, f.threads) == (self.dtype, self.threads))


def choose(figures: Sequence[Figure], work: Work) -> Choice:
    """The dtype by its figures with one thread, then the number of threads by the figures of that dtype.

    `figures` has both dtypes with one thread.
    """
    one = {figure.dtype: work.seconds(figure) for figure in figures if figure.threads == 1}
    gain = one["float32"] / one["bfloat16"]
    dtype: Dtype = "bfloat16" if gain > FLOAT32_MARGIN else "float32"
    single = next(f for f in figures if f.dtype == dtype and f.threads == 1)
    more = [f for f in figures if f.dtype == dtype and f.threads > 1]
    best = min(more, key=work.seconds, default=single)
    speedup = work.seconds(single) / work.seconds(best)
    threads = best.threads if speedup > THREADS_MARGIN else 1
    return Choice(dtype=dtype, threads=threads, reason=_reason(gain, best.threads, speedup), figures=tuple(figures))


def _reason(gain: float, threads: int, speedup: float) -> str:
    how = f"{gain:.1f} times as fast as" if gain >= 1 else f"{1 / gain:.1f} times slower than"
    words = f"bfloat16 is {how} float32 here"
    if 1 < gain <= FLOAT32_MARGIN:
        words += ", too little for what float32 has: exact moves"
    return words if threads == 1 else f"{words}; {threads} threads do {speedup:.1f} times the work of one"


def table(choice: Choice) -> list[str]:
    """The figures as lines for people, the chosen one marked."""
    lines = [f"{'dtype':<10}{'threads':>8}{'decode':>10}{'prefill':>10}{'training':>10}   tokens/s"]
    for f in choice.figures:
        mark = "   chosen" if f == choice.chosen else ""
        lines.append(f"{f.dtype:<10}{f.threads:>8}{f.decode:>10.0f}{f.prefill:>10.0f}{f.train:>10.0f}{mark}")
    return lines
