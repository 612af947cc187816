"""The scheduler of steps: continuous batching over a bounded KV pool. Decides which tokens the next step computes.

Pure and synchronous: calls in, a plan and KV effects out; no torch, no clock, no thread.

Invariants:
- running sequences occupy the workspace rows 0..n-1 densely, so that a decode batch is one strided view;
- effects are carried out in the order in which they were made, before the next forward pass;
- a step holds at most `max_batched_tokens` tokens: one of each decoding sequence, the rest prefill, oldest first;
- when no block is left the youngest running sequence gives up its KV and waits again; since one sequence of the
  longest length fits the pool, the oldest always makes progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gateway.engines.embedded.batching.blocks import BlockPool, hash_block
from gateway.engines.embedded.batching.sequence import Sequence
from gateway.engines.embedded.config import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Load:
    """Copy these pool blocks to the beginning of a workspace row."""

    slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy one full block of a workspace row into the pool, where others can share it."""

    slot: int
    index: int
    block: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `num_tokens` of one workspace row to another (rows stay dense)."""

    source: int
    destination: int
    num_tokens: int


Effect = Load | Save | Move


@dataclass(frozen=True, slots=True)
class Segment:
    """Compute `num_tokens` of a sequence, from its first uncomputed one on."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last token's logits give a new token."""
        return self.num_tokens == self.sequence.num_pending


@dataclass(slots=True)
class SchedulerCounters:
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of those, tokens found."""


class Scheduler:
    """Owns every sequence from `add` to its end, and the block pool's books."""

    def __init__(self, blocks: BlockPool, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = SchedulerCounters()
        self.epoch = 0
        self._effects: list[Effect] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def take_effects(self) -> list[Effect]:
        """KV copies due before the next forward pass, in order."""
        effects, self._effects = self._effects, []
        return effects

    def plan(self) -> list[Segment]:
        """The next step's segments; decoding sequences first, in the order of their rows."""
        segments: list[Segment] = []
        budget = self.max_batched_tokens
        preempted = False
        for sequence in sorted((s for s in self.running if s.num_pending == 1), key=lambda s: s.order):
            if sequence.slot is None:  # preempted for an older one in this loop
                continue
            preempted |= self._make_room(sequence)
            if sequence.slot is not None:
                segments.append(Segment(sequence, 1))
                budget -= 1
        segments.sort(key=lambda segment: segment.sequence.slot or 0)
        for sequence in sorted((s for s in self.running if s.num_pending > 1), key=lambda s: s.order):
            if budget > 0:
                segments.append(Segment(sequence, min(sequence.num_pending, budget)))
                budget -= segments[-1].num_tokens
        while budget > 0 and not preempted and self.waiting and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            segments.append(Segment(sequence, min(sequence.num_pending, budget)))
            budget -= segments[-1].num_tokens
        return segments

    def computed(self, segment: Segment) -> None:
        """Records that a segment's KV stands in the workspace, and publishes the blocks that it filled."""
        sequence = segment.sequence
        sequence.num_computed += segment.num_tokens
        if sequence.epoch != self.epoch:
            return
        self._extend_hashes(sequence)
        while (sequence.num_published + 1) * BLOCK_TOKENS <= sequence.num_computed:
            index = sequence.num_published
            block = sequence.blocks[index]
            assert sequence.slot is not None
            if self.blocks.publish(block, sequence.hashes[index]):
                self._effects.append(Save(sequence.slot, index, block))
            sequence.num_published += 1

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting; its published blocks stay in the prefix cache."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def preempt_all(self) -> None:
        """Every running sequence gives up its KV and will be computed anew, oldest first."""
        for sequence in sorted(self.running, key=lambda s: s.order, reverse=True):
            self._preempt(sequence)

    def new_epoch(self) -> None:
        """The weights change: KV of earlier weights is never shared again."""
        self.epoch += 1
        self.blocks.forget_all()

    # -- inside --

    def _make_room(self, sequence: Sequence) -> bool:
        """Gives a decoding sequence the block its next token needs; True when a sequence was preempted for it."""
        preempted = False
        while len(sequence.blocks) * BLOCK_TOKENS < len(sequence.token_ids):
            block = self.blocks.allocate()
            if block is not None:
                sequence.blocks.append(block)
                continue
            victim = max(self.running, key=lambda s: s.order)
            self._preempt(victim)
            preempted = True
            if victim is sequence:
                break
        return preempted

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a row and blocks for all its tokens; or returns False and changes nothing."""
        if len(self.running) == self.max_num_seqs:
            return False
        if sequence.epoch != self.epoch or not sequence.hashes:
            sequence.epoch, sequence.hashes = self.epoch, []
        self._extend_hashes(sequence)
        # The last token is always computed: its logits are what the first sampled token comes from.
        shareable = sequence.hashes[: (len(sequence.token_ids) - 1) // BLOCK_TOKENS]
        found = self.blocks.find(shareable)
        if len(found) < len(shareable) and shareable[len(found)] in self._being_computed():
            return False  # a sibling computes these blocks: the next step can share them
        needed = -(-len(sequence.token_ids) // BLOCK_TOKENS) - len(found)
        if needed > self.blocks.num_available - self.blocks.num_evictable_among(found):
            return False
        self.blocks.acquire(found)
        fresh = [self.blocks.allocate() for _ in range(needed)]
        sequence.blocks = [*found, *(block for block in fresh if block is not None)]
        assert len(sequence.blocks) == len(found) + needed
        sequence.num_published = len(found)
        sequence.num_computed = len(found) * BLOCK_TOKENS
        if sequence.num_generated == 0:
            sequence.num_cached = sequence.num_computed
        self.counters.prefix_queries += len(sequence.token_ids)
        self.counters.prefix_hits += sequence.num_computed
        sequence.slot = len(self.running)
        self.running.append(sequence)
        if found:
            self._effects.append(Load(sequence.slot, tuple(found)))
        return True

    def _being_computed(self) -> set[bytes]:
        """Hashes of full blocks that running prefills will publish."""
        return {
            key
            for s in self.running
            if s.num_pending > 1 and s.epoch == self.epoch
            for key in s.hashes[s.num_published :]
        }

    def _extend_hashes(self, sequence: Sequence) -> None:
        while (len(sequence.hashes) + 1) * BLOCK_TOKENS <= len(sequence.token_ids):
            index = len(sequence.hashes)
            parent = sequence.hashes[-1] if index else f"{self.epoch}:{sequence.request.cache_salt}".encode()
            tokens = sequence.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            sequence.hashes.append(hash_block(parent, tokens))

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        """Frees row and blocks; the last row moves into the hole."""
        self.blocks.release(sequence.blocks)
        hole = sequence.slot
        assert hole is not None
        sequence.blocks, sequence.slot, sequence.num_computed, sequence.num_published = [], None, 0, 0
        last = self.running.pop()
        if last is not sequence:
            self.running[hole] = last
            self._effects.append(Move(last.slot or 0, hole, last.num_computed))
            last.slot = hole
