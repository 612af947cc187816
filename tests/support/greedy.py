"""What `transformers` itself says: the yardstick for every engine's greedy tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from tests.support.tiny_model import HEAD_DIM, tiny_model

TIE = 1e-3
"""Logits this close are equally likely: float32 sums of another order differ by some 1e-5 here. Other weights' choices
are some units apart."""


@functools.cache
def transformers_greedy(seed: int, prompt: tuple[int, ...], count: int, head_dim: int = HEAD_DIM) -> list[int]:
    """Greedy ids after a prompt, from the tiny model of this seed in float32."""
    model = _model(seed, head_dim)
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in ids[0, len(prompt) :]]


def first_stray(found: Sequence[int], seed: int, prompt: tuple[int, ...], head_dim: int = HEAD_DIM) -> int | None:
    """Index of the first token that the model of this seed would not choose after the prompt and those before it."""
    return stray_of(_model(seed, head_dim), found, prompt)


def stray_of(model: torch.nn.Module, found: Sequence[int], prompt: Sequence[int]) -> int | None:
    """Index of the first token that `model` would not choose after the prompt and those before it.

    Each token is judged after what was really said, so that a long turn may pass a tie (`TIE`) on either side.
    """
    if not found:
        return None
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *found[:-1]]])).logits[0, len(prompt) - 1 :]
    short_by = logits.max(dim=-1).values - logits.gather(-1, torch.tensor(found)[:, None])[:, 0]
    strays = (short_by > TIE).nonzero()
    return int(strays[0]) if len(strays) else None


def check_greedy(
    found: Sequence[int], seed: int, prompt: tuple[int, ...], count: int, head_dim: int = HEAD_DIM
) -> None:
    """Fails unless these are `count` tokens that the model of this seed says, ties apart."""
    assert len(found) == count
    at = first_stray(found, seed, prompt, head_dim)
    assert at is None, (
        f"weights of seed {seed}: token {at} of {count} is {found[at]}, "
        f"transformers says {transformers_greedy(seed, (*prompt, *found[:at]), 1, head_dim)}"
    )


@functools.cache
def _model(seed: int, head_dim: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM  # here: it takes seconds, and most that import this file use no model

    return AutoModelForCausalLM.from_pretrained(tiny_model(seed=seed, head_dim=head_dim))
