"""Whether what was sampled came from the weights that were published: importance ratios, by `transformers` itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TIED = {"lm_head.weight"}
"""With the embedding, of which a stream of parameters gives one name."""


@dataclass(frozen=True)
class Row:
    """One sequence as a plug handed it to its trainer; `logprobs` count where `mask` is 1."""

    token_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]


class Weights:
    """A model's weights as they were when each version was published, the newest two."""

    def __init__(self, model: Any) -> None:
        self._model = copy.deepcopy(model).eval()
        self.now: dict[str, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor] = {}

    def published(self, model: Any) -> None:
        self.before, self.now = self.now, {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def deviation(self, rows: Sequence[Row], weights: dict[str, torch.Tensor]) -> float | None:
        """The largest |ratio - 1| of a sampled token between `weights` and the logprobs reported for it."""
        if not weights:
            return None
        loaded = self._model.load_state_dict(weights, strict=False)
        assert not loaded.unexpected_keys
        assert set(loaded.missing_keys) <= TIED, loaded.missing_keys
        return max(float(self._deviations(row).max()) for row in rows)

    @torch.no_grad()
    def _deviations(self, row: Row) -> torch.Tensor:
        ids = torch.tensor([list(row.token_ids)])
        logprobs = self._model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        sampled = torch.tensor(list(row.mask))[1:].bool()
        reported = torch.tensor(list(row.logprobs))[1:]
        return ((logprobs - reported)[sampled].exp() - 1).abs()
