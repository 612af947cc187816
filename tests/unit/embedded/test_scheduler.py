"""Continuous batching as pure decisions: who computes what, who waits, who gives way."""

from __future__ import annotations

import random

import pytest

from gateway.engines.embedded.batching.blocks import BlockPool
from gateway.engines.embedded.batching.scheduler import Load, Move, Save, Scheduler, Segment
from gateway.engines.embedded.batching.sequence import GenerationRequest, SamplingParams, Sequence
from gateway.engines.embedded.config import BLOCK_TOKENS


class Driver:
    """Stands for the engine: computes what is planned and appends a token where one is sampled."""

    def __init__(self, num_blocks: int = 64, max_num_seqs: int = 4, max_batched_tokens: int = 64) -> None:
        self.scheduler = Scheduler(BlockPool(num_blocks), max_num_seqs, max_batched_tokens)
        self.arrivals = 0

    def add(self, prompt: list[int], salt: str = "") -> Sequence:
        sequence = Sequence(
            GenerationRequest(f"r{self.arrivals}", tuple(prompt), SamplingParams(), salt), self.arrivals
        )
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Segment]:
        segments = self.scheduler.plan()
        sampling = [segment.sequence for segment in segments if segment.samples]
        for segment in segments:
            self.scheduler.computed(segment)
        for sequence in sampling:
            sequence.token_ids.append(7 + sequence.num_generated)
        self.check()
        return segments

    def check(self) -> None:
        running = self.scheduler.running
        assert [s.slot for s in running] == list(range(len(running))), "rows are dense"
        assert all(s.slot is None and not s.blocks for s in self.scheduler.waiting)
        for s in running:
            assert len(s.blocks) * BLOCK_TOKENS >= s.num_computed
        assert self.scheduler.blocks.num_used == len({b for s in running for b in s.blocks})


def shape(segments: list[Segment]) -> list[tuple[str, int]]:
    return [(s.sequence.request.request_id, s.num_tokens) for s in segments]


def test_long_prompt_is_cut_into_steps_and_decoding_goes_on_beside_it() -> None:
    driver = Driver(max_batched_tokens=32)
    driver.add([1] * 5)
    assert shape(driver.step()) == [("r0", 5)]
    driver.add([2] * 50)
    assert shape(driver.step()) == [("r0", 1), ("r1", 31)]
    assert shape(driver.step()) == [("r0", 1), ("r1", 19)]
    assert shape(driver.step()) == [("r0", 1), ("r1", 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    driver = Driver(max_num_seqs=2)
    for i in range(3):
        driver.add([i + 1] * 4)
    assert len(driver.step()) == 2
    driver.scheduler.finish(driver.scheduler.running[0])
    assert ("r2", 4) in shape(driver.step())


def test_siblings_share_the_prompt_after_the_first_has_computed_it() -> None:
    driver = Driver(max_batched_tokens=128)
    prompt = list(range(40))
    first, second = driver.add(prompt), driver.add(prompt)
    assert shape(driver.step()) == [("r0", 40)], "the second waits for the blocks in the making"
    segments = driver.step()
    assert shape(segments) == [("r0", 1), ("r1", 8)], "two full blocks were shared"
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert Load(1, tuple(first.blocks[:2])) in driver.scheduler.take_effects()


def test_next_turn_reuses_prompt_and_generated_tokens() -> None:
    driver = Driver()
    first = driver.add(list(range(30)))
    while first.num_generated < 20:
        driver.step()
    driver.scheduler.finish(first)
    driver.add([*first.token_ids, 99])
    assert shape(driver.step()) == [("r1", 51 - 48)]
    assert driver.scheduler.counters.prefix_hits == 48


def test_the_last_token_is_always_computed() -> None:
    driver = Driver()
    first = driver.add(list(range(32)))
    driver.step()
    driver.scheduler.finish(first)
    driver.add(list(range(32)))
    assert shape(driver.step()) == [("r1", 16)], "a fully known prompt still computes its last block"


@pytest.mark.parametrize("change", ["salt", "epoch"])
def test_prefix_is_not_shared_across_salts_or_weights(change: str) -> None:
    driver = Driver()
    first = driver.add(list(range(40)))
    driver.step()
    driver.scheduler.finish(first)
    if change == "epoch":
        driver.scheduler.new_epoch()
    driver.add(list(range(40)), salt="other" if change == "salt" else "")
    assert shape(driver.step()) == [("r1", 40)]


def test_a_running_sequence_of_the_old_weights_publishes_nothing() -> None:
    driver = Driver()
    old = driver.add(list(range(10)))
    driver.step()
    driver.scheduler.new_epoch()
    while old.num_generated < 40:
        driver.step()
    driver.scheduler.finish(old)
    driver.add(list(old.token_ids))
    assert shape(driver.step()) == [("r1", 50)]


def test_youngest_gives_way_and_is_computed_again() -> None:
    driver = Driver(num_blocks=6, max_batched_tokens=64)
    old, young = driver.add(list(range(40))), driver.add(list(range(100, 140)))
    for _ in range(15):
        driver.step()
    assert driver.scheduler.counters.preemptions == 1
    assert old.slot == 0
    assert young.slot is None
    assert young.num_generated > 0
    driver.scheduler.finish(old)
    generated = young.num_generated
    driver.step()
    assert young.num_generated == generated + 1, "it goes on where it was"


def test_a_hole_is_filled_by_the_last_row() -> None:
    driver = Driver()
    sequences = [driver.add([i + 1] * 20) for i in range(3)]
    driver.step()
    driver.scheduler.take_effects()
    driver.scheduler.finish(sequences[0])
    assert driver.scheduler.take_effects() == [Move(2, 0, 20)]
    assert sequences[2].slot == 0
    driver.check()


def test_full_blocks_are_saved_once() -> None:
    driver = Driver()
    sequence = driver.add(list(range(33)))
    driver.step()
    saves = [e for e in driver.scheduler.take_effects() if isinstance(e, Save)]
    assert saves == [Save(0, 0, sequence.blocks[0]), Save(0, 1, sequence.blocks[1])]
    driver.step()
    assert driver.scheduler.take_effects() == []


def test_preempt_all_keeps_order_and_computes_anew() -> None:
    driver = Driver()
    for i in range(3):
        driver.add([i + 1] * 20)
    driver.step()
    driver.scheduler.preempt_all()
    assert [s.request.request_id for s in driver.scheduler.waiting] == ["r0", "r1", "r2"]
    assert driver.scheduler.blocks.num_used == 0
    driver.scheduler.new_epoch()
    assert shape(driver.step()) == [("r0", 21), ("r1", 21), ("r2", 21)]


@pytest.mark.parametrize("seed", range(8))
def test_everything_ends_whatever_comes(seed: int) -> None:
    """Safety after every step (in `check`), and liveness: random requests, finishes and flushes, a tight pool."""
    rng = random.Random(seed)
    driver = Driver(num_blocks=12, max_num_seqs=rng.randrange(1, 6), max_batched_tokens=rng.choice([8, 32, 100]))
    common = [rng.randrange(50) for _ in range(60)]
    wanted: dict[Sequence, int] = {}
    for _ in range(400):
        if len(wanted) < 12 and rng.random() < 0.3:
            prompt = common[: rng.randrange(1, 60)] + [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
            wanted[driver.add(prompt)] = rng.randrange(1, 60)
        if rng.random() < 0.02:
            driver.scheduler.new_epoch()
        driver.step()
        for sequence in [s for s, n in wanted.items() if s.num_generated >= n or rng.random() < 0.002]:
            driver.scheduler.finish(sequence)
            del wanted[sequence]
    for _ in range(3000):
        driver.step()
        for sequence in [s for s, n in wanted.items() if s.num_generated >= n]:
            driver.scheduler.finish(sequence)
            del wanted[sequence]
    assert not wanted
    assert driver.scheduler.idle
    assert driver.scheduler.blocks.num_used == 0
