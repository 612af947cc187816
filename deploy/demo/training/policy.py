"""The policy that the demo trains: logprobs of sampled tokens, and AdamW on float32 master weights.

Invariants:
- logits exist only for sampled tokens;
- what is published has the checkpoint's dtype, or the one computed in where that is narrower, and is always the
  rounded master weights (a step of 1e-5 on a bf16 weight rounds to nothing); what is computed with has exactly these
  values, also in float32: an engine that loads a version computes with the weights that the trainer has;
- gradients are summed in float32, however many micro-batches there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from deploy.demo.training.families import Family, Layout


def family_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    families: Sequence[Family],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] queries, [1, kv heads, T, D] keys and values, to [1, T, heads, D]. Scores are float32:
    bf16 ones differ from the engine's by more than a training step does."""
    kv_heads, length, width = key.shape[1:]
    spans = [end - start for family in families for start, end in (family.prefix, *family.suffixes)]
    grouped = (query[0].float() * scaling).reshape(kv_heads, -1, length, width)
    # split, not slices: the gradient of a slice is a zero-filled tensor of the whole length
    queries = iter(torch.split(grouped, spans, dim=2))
    keys, values = (iter(torch.split(part[0].float(), spans, dim=1)) for part in (key, value))
    outputs = []
    for family in families:
        k_prefix, v_prefix = next(keys), next(values)
        outputs.append(_attend(next(queries), k_prefix, v_prefix))
        for _suffix in family.suffixes:
            k, v = torch.cat([k_prefix, next(keys)], dim=1), torch.cat([v_prefix, next(values)], dim=1)
            outputs.append(_attend(next(queries), k, v))
    output = torch.cat(outputs, dim=2).to(query.dtype)  # [kv heads, heads per kv head, T, D]
    return output.reshape(1, -1, length, width).transpose(1, 2).contiguous(), None


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[kv heads, heads per kv head, S, D] queries of the last S of the keys' positions; causal."""
    kv_heads, shared_by, num_queries, width = queries.shape
    mask = _causal_mask(num_queries, keys.shape[1]).repeat(shared_by, 1).expand(kv_heads, -1, -1)
    scores = torch.baddbmm(mask, queries.reshape(kv_heads, -1, width), keys.transpose(1, 2))
    return (scores.softmax(-1) @ values).reshape(queries.shape)


@lru_cache(maxsize=256)
def _causal_mask(num_queries: int, num_keys: int) -> torch.Tensor:
    """To add to scores: query i is the key at `num_keys - num_queries + i` and sees no later one."""
    return torch.full((num_queries, num_keys), -torch.inf).triu(num_keys - num_queries + 1)


AttentionInterface.register("laminar_families", family_attention)


class Policy:
    """A causal language model in `dtype` that is trained through float32 master weights by AdamW."""

    def __init__(self, model_dir: Path, *, lr: float, dtype: torch.dtype = torch.bfloat16) -> None:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="laminar_families", local_files_only=True
        )
        self._weights = list(self.model.parameters())  # tied ones once
        stored = AutoConfig.from_pretrained(model_dir, local_files_only=True).dtype or dtype
        narrower = min(stored, dtype, key=lambda kind: kind.itemsize)
        self._published = [w.detach().to(narrower) for w in self._weights]  # no copy where that is theirs
        self._masters = [weight.detach().float().clone().requires_grad_() for weight in self._weights]
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = torch.zeros_like(master)
            hook: Any = weight.register_post_accumulate_grad_hook
            hook(_accumulate_into(master.grad))
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0.0, fused=True)

    def logprobs(self, layout: Layout, batch_ids: torch.Tensor) -> torch.Tensor:
        """[M] logprobs (float32, temperature 1) of the layout's sampled tokens; `batch_ids` are the batch's."""
        hidden = self.model.model(
            input_ids=layout.input_ids[None],
            position_ids=layout.position_ids[None],
            use_cache=False,
            families=layout.families,
        ).last_hidden_state[0]
        logits = self.model.lm_head(hidden[layout.predictors]).float()
        targets = batch_ids[layout.tokens]
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights that engines load, by the names of the model's own checkpoint."""
        published = {w.data_ptr(): tensor for w, tensor in zip(self._weights, self._published, strict=True)}
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return {name: published.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}

    @torch.no_grad()
    def update(self, *, grad_norm_max: float) -> float:
        """Applies the gradients of all `backward` calls since the last update; returns their norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._masters, grad_norm_max)
        self._optimizer.step()
        self.drop_gradients()
        for weight, published, master in zip(self._weights, self._published, self._masters, strict=True):
            published.copy_(master)
            weight.copy_(published)
        return float(norm)

    def drop_gradients(self) -> None:
        for master in self._masters:
            assert master.grad is not None
            master.grad.zero_()


def _accumulate_into(total: torch.Tensor) -> Any:
    def hook(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        total.add_(weight.grad)
        weight.grad = None

    return hook
