"""The block pool's books: nothing leaks, nothing is in two places, prefixes are found until evicted."""

from __future__ import annotations

import random

import pytest

from gateway.engines.embedded.batching.blocks import BlockPool, hash_block


def chain(*blocks: list[int], salt: bytes = b"") -> list[bytes]:
    hashes, parent = [], salt
    for block in blocks:
        parent = hash_block(parent, block)
        hashes.append(parent)
    return hashes


def test_hash_depends_on_everything_before() -> None:
    assert chain([1, 2], [3])[1] != chain([1, 9], [3])[1]
    assert chain([1], salt=b"a") != chain([1], salt=b"b")
    assert chain([1, 2]) == chain([1, 2])


def test_allocates_every_block_once_then_says_none() -> None:
    pool = BlockPool(3)
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    assert pool.allocate() is None
    assert pool.num_used == 3


def test_released_prefix_is_found_again_and_shared() -> None:
    pool = BlockPool(4)
    hashes = chain([1], [2])
    blocks = [pool.allocate(), pool.allocate()]
    for block, key in zip(blocks, hashes, strict=True):
        assert pool.publish(block, key)
    pool.release(blocks)
    assert (pool.num_used, pool.num_cached) == (0, 2)
    assert pool.find([*hashes, b"unknown"]) == blocks
    pool.acquire(blocks)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_used == 2, "the second user still holds them"


def test_find_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    hashes = chain([1], [2], [3])
    for index in (0, 2):
        block = pool.allocate()
        pool.publish(block, hashes[index])
    assert len(pool.find(hashes)) == 1


def test_evicts_least_recently_used_and_tails_before_heads() -> None:
    pool = BlockPool(3)
    hashes = chain([1], [2], [3])
    blocks = [pool.allocate() for _ in range(3)]
    for block, key in zip(blocks, hashes, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.allocate() == blocks[2]
    assert pool.find(hashes) == blocks[:2]
    assert pool.allocate() == blocks[1]


def test_same_prefix_is_published_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert pool.publish(first, b"k")
    assert not pool.publish(second, b"k")
    pool.release([second])
    assert pool.find([b"k"]) == [first]


def test_flush_forgets_prefixes_but_not_users() -> None:
    pool = BlockPool(2)
    used, cached = pool.allocate(), pool.allocate()
    pool.publish(used, b"u")
    pool.publish(cached, b"c")
    pool.release([cached])
    pool.forget_all()
    assert pool.find([b"u"]) == pool.find([b"c"]) == []
    assert (pool.num_used, pool.num_available) == (1, 1)
    pool.release([used])
    assert pool.num_available == 2


def test_double_release_is_a_bug() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


@pytest.mark.parametrize("seed", range(5))
def test_books_balance_under_random_use(seed: int) -> None:
    rng, pool, held = random.Random(seed), BlockPool(8), []
    for _ in range(2000):
        action = rng.random()
        if action < 0.5 and (block := pool.allocate()) is not None:
            held.append([block])
            if rng.random() < 0.6:
                pool.publish(block, bytes([rng.randrange(12)]))
        elif action < 0.7 and (found := pool.find([bytes([rng.randrange(12)])])):
            pool.acquire(found)
            held.append(found)
        elif action < 0.99 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action >= 0.99:
            pool.forget_all()
        assert pool.num_used == len({block for blocks in held for block in blocks})
        assert pool.num_used + pool.num_available == 8
