"""Attention over the tiled KV workspace, planned once per forward pass and carried out in every layer.

Two implementations of the same mathematics:
- `tiled`: each token alone against the tiles of its row, any number of tokens in one batched product. Every matrix in
  the batch has the same shape (64 keys of one head, the queries of its group), whatever the token's position and
  whoever else is in the batch; sums over tiles are ours, in order, and tiles beyond a token's length add exact zeros.
  So a token's result depends on its own sequence alone. Decoding always uses it; prefill only in batch-invariant mode;
- `prefill`: the tokens of one sequence together, through torch's fused kernel: faster, but rounded otherwise.

Keys times queries (not queries times keys) and probabilities times values: in bf16 these two orientations let oneDNN
read the cache as it lies, at twice the speed of torch's fused kernel for one query per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from gateway.engines.embedded.compute.kv import TILE, KvMemory

PRODUCT_SIZE_MIN = 1 << 15
"""Multiply-adds in a batched product at least, by repeating a token where there are fewer: below some size (2^12 in
torch 2.13) torch takes another kernel, which rounds otherwise."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive input rows that belong to one workspace row: tokens at positions start..start+count-1."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Token:
    row: int
    slot: int
    length: int
    """Keys that it attends to."""

    @property
    def num_tiles(self) -> int:
        return -(-self.length // TILE)


@dataclass(frozen=True, slots=True)
class _Tiled:
    """Tokens that attend in one batched product, padded to a common number of tiles."""

    rows: torch.Tensor | None
    """Input rows; None: the first `num_tokens`."""
    num_tokens: int
    num_tiles: int
    gather: torch.Tensor | None
    """Which workspace tiles, [num_tiles * num_tokens]; None: the first `num_tiles` of all rows, as they lie."""
    mask: torch.Tensor
    """[num_tokens, 1, 1, num_tiles * 64]: 0 or -inf."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    first: int
    count: int
    slot: int
    length: int
    mask: torch.Tensor
    """[1, 1, groups * count, length]."""


class AttentionPlan:
    """How each input row of one forward pass attends; the same plan serves every layer."""

    def __init__(self, kv: KvMemory, spans: list[Span], num_heads: int, *, by_token: bool) -> None:
        self._kv = kv
        self._groups = num_heads // kv.num_kv_heads
        self._prefills: list[_Prefill] = []
        tokens: list[_Token] = []
        row = 0
        for span in spans:
            if by_token or span.count == 1:
                tokens += [_Token(row + i, span.slot, span.start + i + 1) for i in range(span.count)]
            else:
                self._prefills.append(self._plan_prefill(row, span))
            row += span.count
        self._tiled = [self._plan_tiled(group) for group in _by_length(tokens)]

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """`q` [T, heads, head_dim], scaled; writes `out` [T, heads * head_dim]. KV of the inputs is already stored."""
        for tiled in self._tiled:
            self._attend_tiled(tiled, layer, q, out)
        for prefill in self._prefills:
            self._attend_prefill(prefill, layer, q, out)

    def _plan_tiled(self, tokens: list[_Token]) -> _Tiled:
        num_tiles = max(token.num_tiles for token in tokens)
        size = TILE * self._kv.head_dim * self._groups * self._kv.num_kv_heads
        tokens = tokens + [tokens[0]] * (-(-PRODUCT_SIZE_MIN // size) - len(tokens))
        rows, slots = [token.row for token in tokens], [token.slot for token in tokens]
        lengths = torch.tensor([token.length for token in tokens])
        hidden = torch.arange(num_tiles * TILE)[None, :] >= lengths[:, None]
        in_order = rows == list(range(len(tokens)))
        whole = slots == list(range(self._kv.num_rows))
        gather = None
        if not whole:
            gather = (torch.arange(num_tiles)[:, None] * self._kv.num_rows + torch.tensor(slots)).reshape(-1)
        device = self._kv.tiles.device
        return _Tiled(
            None if in_order else torch.tensor(rows, device=device),
            len(tokens),
            num_tiles,
            None if gather is None else gather.to(device),
            self._additive(hidden)[:, None, None, :],
        )

    def _plan_prefill(self, first: int, span: Span) -> _Prefill:
        length = span.start + span.count
        hidden = torch.arange(length)[None, :] > torch.arange(span.start, length)[:, None]
        mask = self._additive(hidden).repeat(self._groups, 1)[None, None]
        return _Prefill(first, span.count, span.slot, length, mask)

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._kv.tiles.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self._kv.tiles.device)

    def _attend_tiled(self, plan: _Tiled, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        heads, dim, groups = self._kv.num_kv_heads, self._kv.head_dim, self._groups
        tokens, tiles = plan.num_tokens, plan.num_tiles
        keys, values = self._tiles(plan, 0, layer), self._tiles(plan, 1, layer)
        rows = q[:tokens] if plan.rows is None else q[plan.rows]
        queries = rows.reshape(1, tokens * heads, groups, dim).expand(tiles, -1, -1, -1).reshape(-1, groups, dim)
        scores = torch.bmm(keys, queries.transpose(1, 2)).view(tiles, tokens, heads, TILE, groups)
        scores = scores.permute(1, 2, 4, 0, 3).reshape(tokens, heads, groups, tiles * TILE).add_(plan.mask)
        weights = torch.softmax(scores, -1).view(tokens * heads, groups, tiles, TILE)
        attended = torch.bmm(weights.permute(2, 0, 1, 3).reshape(-1, groups, TILE), values).view(tiles, tokens, -1)
        result = attended[0] if tiles == 1 else attended.sum(0)
        if plan.rows is None:
            out[:tokens] = result
        else:
            out[plan.rows] = result

    def _tiles(self, plan: _Tiled, kind: int, layer: int) -> torch.Tensor:
        tiles = self._kv.tiles[kind, layer]
        chosen = tiles[: plan.num_tiles] if plan.gather is None else tiles.flatten(0, 1)[plan.gather]
        return chosen.reshape(-1, TILE, self._kv.head_dim)

    def _attend_prefill(self, plan: _Prefill, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        heads, dim, groups = self._kv.num_kv_heads, self._kv.head_dim, self._groups
        at = slice(plan.first, plan.first + plan.count)
        queries = q[at].view(plan.count, heads, groups, dim).permute(1, 2, 0, 3).reshape(1, heads, -1, dim)
        keys, values = (self._row(kind, layer, plan) for kind in (0, 1))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=plan.mask, scale=1.0)
        out[at] = attended.view(heads, groups, plan.count, dim).permute(2, 0, 1, 3).reshape(plan.count, -1)

    def _row(self, kind: int, layer: int, plan: _Prefill) -> torch.Tensor:
        """Keys or values of one workspace row, [1, kv_heads, length, head_dim]."""
        tiles = self._kv.tiles[kind, layer, : -(-plan.length // TILE), plan.slot]
        return tiles.permute(1, 0, 2, 3).flatten(1, 2)[None, :, : plan.length]


def _by_length(tokens: list[_Token]) -> list[list[_Token]]:
    """Groups in which the longest has at most twice the tiles of the shortest, so that padding costs little.

    One group, in order, as long as that holds for all of them.
    """
    if not tokens:
        return []
    counts = [token.num_tiles for token in tokens]
    if max(counts) <= 2 * min(counts):
        return [tokens]
    groups: list[list[_Token]] = []
    for token in sorted(tokens, key=lambda t: (t.num_tiles, t.row)):
        if groups and token.num_tiles <= 2 * groups[-1][0].num_tiles:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups
