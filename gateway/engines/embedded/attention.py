"""Attention over the dense KV workspace, for a batch of rows prepared once per step.

Three ways, the same mathematics:
- `decode`: all decoding rows in two batched products over one strided view, padded to a common length and masked;
- `prefill`: the tokens of one sequence together, through torch's fused kernel;
- `by row`: each token alone, at a padded length that depends on nothing but its own position, with the same products
  in the same shapes in prefill and decode. That is what batch-invariant mode uses; and decode uses it where rows are
  so unequal that padding would cost more than it saves.

Keys times queries (not queries times keys) and probabilities times values: in bf16 these two orientations let oneDNN
read the cache as it lies, twice as fast as torch's fused kernel for one query per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from gateway.engines.embedded.kv import KvMemory

LENGTH_STEP = 64
"""Key lengths are padded to multiples of this: few kernel shapes, and in by-row attention a shape fixed by position."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive input rows that belong to one workspace row: tokens at positions start..start+count-1."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Decode:
    slots: torch.Tensor | None
    """None when input row i belongs to workspace row i."""
    num_rows: int
    height: int
    """Workspace rows in the view."""
    length: int
    mask: torch.Tensor
    """[height, 1, 1, length]: 0 or -inf."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    first: int
    count: int
    slot: int
    length: int
    mask: torch.Tensor
    """[1, 1, groups * count, length]."""


@dataclass(frozen=True, slots=True)
class _Row:
    row: int
    slot: int
    length: int
    mask: torch.Tensor
    """[1, 1, length]."""


class AttentionPlan:
    """How each input row of one forward pass attends; the same plan serves every layer."""

    def __init__(self, kv: KvMemory, spans: list[Span], num_heads: int, dtype: torch.dtype, *, by_row: bool) -> None:
        self._kv = kv
        self._groups = num_heads // kv.num_kv_heads
        self._dtype = dtype
        self._decode: _Decode | None = None
        self._prefills: list[_Prefill] = []
        self._rows: list[_Row] = []
        decoding = 0
        while decoding < len(spans) and spans[decoding].count == 1:
            decoding += 1
        if by_row or _too_uneven(spans[:decoding], kv.max_len):
            self._rows = [row for i, span in enumerate(spans[:decoding]) for row in self._span_rows(i, span)]
        elif decoding:
            self._decode = self._plan_decode(spans[:decoding])
        first = decoding
        for span in spans[decoding:]:
            if by_row:
                self._rows += self._span_rows(first, span)
            else:
                self._prefills.append(self._plan_prefill(first, span))
            first += span.count

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """`q` [T, heads, head_dim], scaled; writes `out` [T, heads * head_dim]. KV of the inputs is already stored."""
        k, v = self._kv.k[layer], self._kv.v[layer]
        if self._decode is not None:
            self._attend_decode(self._decode, k, v, q, out)
        for prefill in self._prefills:
            self._attend_prefill(prefill, k, v, q, out)
        for row in self._rows:
            self._attend_row(row, k, v, q, out)

    def _plan_decode(self, spans: list[Span]) -> _Decode:
        slots = [span.slot for span in spans]
        height = max(slots) + 1
        lengths = torch.zeros(height, dtype=torch.long)
        lengths[slots] = torch.tensor([span.start + 1 for span in spans])
        length = _padded(int(lengths.max()), self._kv.max_len)
        hidden = torch.arange(length)[None, :] >= lengths.clamp(min=1)[:, None]
        mask = self._additive(hidden)[:, None, None, :]
        dense = slots == list(range(height))
        return _Decode(None if dense else torch.tensor(slots).to(mask.device), len(spans), height, length, mask)

    def _plan_prefill(self, first: int, span: Span) -> _Prefill:
        length = span.start + span.count
        positions = torch.arange(span.start, length)
        hidden = torch.arange(length)[None, :] > positions[:, None]
        return _Prefill(
            first, span.count, span.slot, length, self._additive(hidden).repeat(self._groups, 1)[None, None]
        )

    def _span_rows(self, first: int, span: Span) -> list[_Row]:
        rows = []
        for offset in range(span.count):
            position = span.start + offset
            length = _padded(position + 1, self._kv.max_len)
            mask = self._additive(torch.arange(length) > position)[None, None]
            rows.append(_Row(first + offset, span.slot, length, mask))
        return rows

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self._kv.k.device)

    def _attend_decode(
        self, plan: _Decode, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv_heads, head_dim, groups = self._kv.num_kv_heads, self._kv.head_dim, self._groups
        rows = q[: plan.num_rows]
        if plan.slots is not None:
            rows = rows.new_zeros((plan.height, *rows.shape[1:])).index_copy_(0, plan.slots, rows)
        keys = k[: plan.height, :, : plan.length].flatten(0, 1)
        values = v[: plan.height, :, : plan.length].flatten(0, 1)
        queries = rows.reshape(plan.height * kv_heads, groups, head_dim)
        scores = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2).contiguous()
        scores.view(plan.height, kv_heads, groups, plan.length).add_(plan.mask)
        attended = torch.bmm(torch.softmax(scores, -1), values).view(plan.height, -1)
        out[: plan.num_rows] = attended if plan.slots is None else attended[plan.slots]

    def _attend_prefill(
        self, plan: _Prefill, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv_heads, head_dim, groups = self._kv.num_kv_heads, self._kv.head_dim, self._groups
        rows = q[plan.first : plan.first + plan.count].view(plan.count, kv_heads, groups, head_dim)
        queries = rows.permute(1, 2, 0, 3).reshape(1, kv_heads, groups * plan.count, head_dim)
        at = slice(plan.slot, plan.slot + 1)
        attended = F.scaled_dot_product_attention(
            queries, k[at, :, : plan.length], v[at, :, : plan.length], attn_mask=plan.mask, scale=1.0
        )
        tokens = attended.view(kv_heads, groups, plan.count, head_dim).permute(2, 0, 1, 3)
        out[plan.first : plan.first + plan.count] = tokens.reshape(plan.count, -1)

    def _attend_row(self, row: _Row, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        queries = q[row.row].view(self._kv.num_kv_heads, self._groups, self._kv.head_dim)
        keys, values = k[row.slot, :, : row.length], v[row.slot, :, : row.length]
        scores = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2).contiguous().add_(row.mask)
        out[row.row] = torch.bmm(torch.softmax(scores, -1), values).view(-1)


def _padded(length: int, length_max: int) -> int:
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, length_max)


def _too_uneven(spans: list[Span], length_max: int) -> bool:
    """Whether one batch padded to the longest would read more than twice the keys that there are."""
    lengths = [_padded(span.start + 1, length_max) for span in spans]
    height = max((span.slot for span in spans), default=0) + 1
    return bool(lengths) and max(lengths) * height > 2 * sum(lengths) + 1024
