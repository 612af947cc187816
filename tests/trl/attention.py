"""TRL's asynchronous trainer on a CPU: its attention kernel is for GPUs alone, so two of its functions are replaced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def on_a_cpu() -> None:
    """Replaces them, for the tests alone."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention_of_segments)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def attention_of_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What the kernel computes: [tokens, heads, dimension], segment by segment, causal from their common end."""
    assert causal
    assert window_size == (-1, -1)
    repeat = query.shape[1] // key.shape[1]
    parts = []
    for (q0, q1), (k0, k1) in zip(_spans(starts_q), _spans(starts_k), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(diagonal=(k1 - k0) - (q1 - q0))
        found = scaled_dot_product_attention(
            q, k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0), attn_mask=seen, scale=softmax_scale
        )
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


def _spans(starts: torch.Tensor) -> Iterator[tuple[int, int]]:
    bounds = starts.tolist()
    return itertools.pairwise(bounds)
