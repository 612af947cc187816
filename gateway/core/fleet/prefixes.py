"""Which engine was sent which prompts' beginnings: siblings of a group, and prompts that share a system prompt. Pure.

A prompt is cut into blocks of `BLOCK_TOKENS` ids, each named by a hash of itself and all before it, as engines' own
prefix caches do. What an engine holds is a guess: it may have evicted a prefix, and an engine that loaded or restarted
has none, so what it was sent counts only for the incarnation and version that it had then.

Invariant: at most `BLOCKS_MAX` blocks are remembered; the least recently sent go first, the ends of prompts before
their beginnings.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.types import EngineName, Version

BLOCK_TOKENS = 16
"""vLLM's, whose cache shares nothing smaller."""
TOKENS_MAX = 8192
"""Tokens of a prompt that are compared: prompts that agree so far are taken for siblings."""
BLOCKS_MAX = 1 << 16
"""A million tokens: a new group's prompts come soon after each other, and engines hold no more for long. Some 25 MB."""

Holding = tuple[str, Version]
"""Incarnation and version under which an engine's cache was filled."""

_NOBODY: Mapping[EngineName, Holding] = {}


def chain(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The names of the whole blocks of a prompt, first one first."""
    found, last = [], 0
    for at in range(0, min(len(token_ids), TOKENS_MAX) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = hash((last, tuple(token_ids[at : at + BLOCK_TOKENS])))
        found.append(last)
    return tuple(found)


@dataclass(slots=True)
class PrefixIndex:
    _blocks: OrderedDict[int, dict[EngineName, Holding]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._blocks)

    def sent(self, blocks: Sequence[int], engine: EngineName, holding: Holding) -> None:
        """A prompt of these blocks goes to `engine`. What it holds of them already is only used again."""
        held = self.held(blocks, engine, holding) // BLOCK_TOKENS
        for block in reversed(blocks[held:]):
            self._blocks.setdefault(block, {})[engine] = holding
            self._blocks.move_to_end(block)
        for block in reversed(blocks[:held]):
            self._blocks.move_to_end(block)
        while len(self._blocks) > BLOCKS_MAX:
            self._blocks.popitem(last=False)

    def held(self, blocks: Sequence[int], engine: EngineName, holding: Holding) -> int:
        """Tokens of the prompt that the engine holds from its beginning on.

        It was sent each block with all those before it, and blocks are forgotten after those behind them: so where it
        holds one, it holds the ones before, and a search by halves finds the last.
        """
        first_missing = bisect.bisect_left(blocks, True, key=lambda block: self._of(block).get(engine) != holding)
        return first_missing * BLOCK_TOKENS

    def holders(self, blocks: Sequence[int], beyond_tokens: int) -> Mapping[EngineName, Holding]:
        """Engines that were sent more of the prompt than so many tokens, and what they were then."""
        at = beyond_tokens // BLOCK_TOKENS
        return self._of(blocks[at]) if at < len(blocks) else {}

    def _of(self, block: int) -> Mapping[EngineName, Holding]:
        return self._blocks.get(block, _NOBODY)
