"""What `transformers` itself says: the yardstick for every engine's greedy tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_model import HEAD_DIM, tiny_model


@functools.cache
def transformers_greedy(seed: int, prompt: tuple[int, ...], count: int, head_dim: int = HEAD_DIM) -> list[int]:
    """Greedy ids after a prompt, from the tiny model of this seed in float32."""
    model = _model(seed, head_dim)
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in ids[0, len(prompt) :]]


def check_greedy(
    found: Sequence[int], seed: int, prompt: tuple[int, ...], count: int, head_dim: int = HEAD_DIM
) -> None:
    """Fails at the first token that differs, telling how close the model's first two choices were there."""
    wanted = transformers_greedy(seed, prompt, count, head_dim)
    if list(found) == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), count))
    with torch.inference_mode():
        logits = _model(seed, head_dim)(torch.tensor([[*prompt, *wanted[:at]]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    raise AssertionError(
        f"weights of seed {seed}: token {at} of {len(found)} is {found[at : at + 1]}, transformers says "
        f"{wanted[at : at + 1]}; its first two choices are {first - second:.2g} apart"
    )


@functools.cache
def _model(seed: int, head_dim: int) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model(seed=seed, head_dim=head_dim))
