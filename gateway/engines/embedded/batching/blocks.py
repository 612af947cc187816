"""Accounting of the paged KV pool: the users of each block, and the blocks with a reusable prefix.

Invariants:
- every block is in exactly one place: free, cached (unused, its prefix may be reused), or used (count > 0);
- a block has a hash only after its content was saved into the pool;
- allocation takes free blocks first, then evicts the least recently used cached one; it never grows.

Pure bookkeeping: no tensors here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence as Seq


def hash_block(parent: bytes, token_ids: Seq[int]) -> bytes:
    """Hash of a full block given the hash of everything before it (the salt for the first)."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks, with a least-recently-used prefix cache over the unused ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._uses: list[int] = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def find(self, hashes: Seq[bytes]) -> list[int]:
        """Blocks of the longest known prefix of the chain; nothing is acquired yet."""
        found: list[int] = []
        for key in hashes:
            block = self._by_hash.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def known(self, key: bytes) -> bool:
        return key in self._by_hash

    def num_evictable_among(self, blocks: Seq[int]) -> int:
        """How many of `blocks` count as available now and would not once they are acquired."""
        return sum(1 for block in blocks if self._uses[block] == 0)

    def acquire(self, blocks: Seq[int]) -> None:
        """Adds one use to each; cached ones leave the eviction list."""
        for block in blocks:
            self._uses[block] += 1
            self._cached.pop(block, None)

    def allocate(self) -> int | None:
        """A block for the caller alone, or None when every block is in use."""
        if self._free:
            block = self._free.popleft()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._uses[block] = 1
        return block

    def release(self, blocks: Seq[int]) -> None:
        """Takes one use from each. Later blocks of a chain are evicted before earlier ones, which are worth more."""
        for block in reversed(blocks):
            assert self._uses[block] > 0, f"block {block} released twice"
            self._uses[block] -= 1
            if self._uses[block] > 0:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, key: bytes) -> bool:
        """Makes a used block's prefix findable; False when the same prefix is known already."""
        assert self._uses[block] > 0, f"block {block} published while unused"
        if key in self._by_hash:
            return False
        self._by_hash[key] = block
        self._hash_of[block] = key
        return True

    def forget_all(self) -> None:
        """Flushes the prefix cache: used blocks stay used, but none can be found again."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._by_hash.clear()

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._by_hash[key]
