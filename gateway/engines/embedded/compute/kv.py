"""KV memory: a workspace of tiles that the forward pass reads, and the paged pool that outlives a sequence.

Two stores, both allocated once:
- workspace: one row per running sequence, cut along the positions into tiles of 64:
  `[layers, tiles, rows, kv_heads, 64, head_dim]`. Tile-major, so that the first tiles of all rows are one contiguous
  block: a decode batch is one batched product without copying, and every product has the same small shape;
- pool: `num_blocks` blocks of 16 tokens, `[blocks, 2, layers, kv_heads, 16, head_dim]`; a block is copied in once,
  when it is full, and out when a sequence that shares the prefix is admitted.

The extra last workspace row takes the writes of padding rows and is never read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gateway.engines.embedded.batching.scheduler import Effect, Load, Move, Save
from gateway.engines.embedded.config import BLOCK_TOKENS

TILE = 64
"""Positions in one workspace tile; no product's inner dimension over keys is longer."""


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
        self.num_rows = num_rows
        self.padding_row = num_rows
        self.num_tiles = -(-max_len // TILE)
        # Padding writes go past the tiles' end, so that the tiles themselves stay contiguous.
        heads_per_layer = self.num_tiles * num_rows * num_kv_heads + num_kv_heads
        # Zeros, not garbage: masked positions are read (times zero), and 0 * NaN would poison a row.
        flat = torch.zeros((2, num_layers, heads_per_layer * TILE, head_dim), dtype=dtype, device=device)
        self.flat = [(flat[0, layer], flat[1, layer]) for layer in range(num_layers)]
        """Per layer (keys, values), `[heads * 64, head_dim]`: where `write_index` points."""
        used = self.num_tiles * num_rows * num_kv_heads * TILE
        shape = (2, num_layers, self.num_tiles, num_rows, num_kv_heads, TILE, head_dim)
        self.tiles = flat[:, :, :used].view(shape)
        self.pool = torch.zeros(
            (num_blocks, 2, num_layers, num_kv_heads, BLOCK_TOKENS, head_dim), dtype=dtype, device=device
        )

    def write_index(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens go in `flat`: `[T * kv_heads]`, token-major."""
        tile = (positions // TILE) * self.num_rows + rows
        tile = torch.where(rows == self.padding_row, self.num_tiles * self.num_rows, tile)
        heads = tile[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads, device=rows.device)
        return (heads * TILE + (positions % TILE)[:, None]).reshape(-1)

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carries out the scheduler's copies, in order."""
        for effect in effects:
            match effect:
                case Load(slot, blocks):
                    self._load(slot, blocks)
                case Save(slot, index, block):
                    self.pool[block].copy_(self._block(slot, index))
                case Move(source, destination, num_tokens):
                    used = -(-num_tokens // TILE)
                    self.tiles[:, :, :used, destination] = self.tiles[:, :, :used, source]

    def _block(self, slot: int, index: int) -> torch.Tensor:
        """View of one block of a row: [2, layers, kv_heads, 16, head_dim]."""
        tile, within = divmod(index * BLOCK_TOKENS, TILE)
        return self.tiles[:, :, tile, slot, :, within : within + BLOCK_TOKENS]

    def _load(self, slot: int, blocks: tuple[int, ...]) -> None:
        for index, block in enumerate(blocks):
            self._block(slot, index).copy_(self.pool[block])
