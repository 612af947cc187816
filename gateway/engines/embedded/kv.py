"""KV memory: a dense workspace that the forward pass reads, and the paged pool that outlives a sequence.

Two stores, both allocated once:
- workspace: one row per running sequence, `[layers, rows, kv_heads, max_len, head_dim]`; dense, so that one strided
  view serves a whole decode batch and no step gathers pages (gathering costs as much as attention itself);
- pool: `num_blocks` blocks of 16 tokens, `[blocks, 2, layers, kv_heads, 16, head_dim]`; a block is copied in once,
  when it is full, and out when a sequence that shares the prefix is admitted.

The extra last workspace row takes the writes of padding rows and is never read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gateway.engines.embedded.config import BLOCK_TOKENS
from gateway.engines.embedded.scheduler import Effect, Load, Move, Save


class KvMemory:
    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_rows: int,
        max_len: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.padding_row = num_rows
        self.max_len = max_len
        shape = (num_layers, num_rows + 1, num_kv_heads, max_len, head_dim)
        # Zeros, not garbage: masked positions are read (times zero), and 0 * NaN would poison a row.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.pool = torch.zeros(
            (num_blocks, 2, num_layers, num_kv_heads, BLOCK_TOKENS, head_dim), dtype=dtype, device=device
        )
        self.k_flat = [layer.view(-1, head_dim) for layer in self.k]
        self.v_flat = [layer.view(-1, head_dim) for layer in self.v]

    def write_index(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens go in `k_flat[layer]`: `[T * kv_heads]`, token-major."""
        heads = torch.arange(self.num_kv_heads, device=rows.device)
        first = (rows[:, None] * self.num_kv_heads + heads[None, :]) * self.max_len
        return (first + positions[:, None]).reshape(-1)

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carries out the scheduler's copies, in order."""
        for effect in effects:
            match effect:
                case Load(slot, blocks):
                    self._load(slot, blocks)
                case Save(slot, index, block):
                    at = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
                    self.pool[block, 0].copy_(self.k[:, slot, :, at])
                    self.pool[block, 1].copy_(self.v[:, slot, :, at])
                case Move(source, destination, num_tokens):
                    self.k[:, destination, :, :num_tokens] = self.k[:, source, :, :num_tokens]
                    self.v[:, destination, :, :num_tokens] = self.v[:, source, :, :num_tokens]

    def _load(self, slot: int, blocks: tuple[int, ...]) -> None:
        pages = self.pool[list(blocks)]  # [n, 2, layers, kv_heads, 16, head_dim]
        dense = pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        length = dense.shape[3]
        self.k[:, slot, :, :length] = dense[0]
        self.v[:, slot, :, :length] = dense[1]
