"""Compares answers and snapshots with the weights of their versions, which follow from their steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tests.soak.judge import Span
from tests.support.greedy import stray_of
from tests.support.tiny_model import tiny_model, weights

MODELS_KEPT = 16
"""Versions whose weights are kept, of those asked for last: engines are a few versions behind the newest at most."""


class Answers:
    """For one thread at a time, which its lock sees to: the models are shared."""

    def __init__(self) -> None:
        self._models: OrderedDict[int, torch.nn.Module] = OrderedDict()
        self._lock = threading.Lock()

    def stray(self, span: Span, step: int) -> int | None:
        """The index of the first token that the weights of `step` would not choose."""
        with self._lock:
            return stray_of(self._model(step), span.found, span.before)

    def differing(self, snapshot: Path, step: int) -> list[str]:
        """Names of tensors of a snapshot that are not those of `step`, bit for bit."""
        found: dict[str, torch.Tensor] = {}
        for file in sorted(snapshot.glob("*.safetensors")):
            try:
                found |= load_file(file)
            except SafetensorError as error:  # a pin that did not hold: the file is written again, as another version
                return [f"{file.name}: {error}"]
        wanted = weights("llama", "float32", step)
        names = sorted(found.keys() ^ wanted.keys())
        return names or [name for name, tensor in wanted.items() if not _same(tensor, found[name])]

    def _model(self, step: int) -> torch.nn.Module:
        from transformers import (  # here: it takes seconds, and most that import this file use no model
            AutoConfig,
            AutoModelForCausalLM,
        )

        if step not in self._models:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model()))  # type: ignore[no-untyped-call]
            model.load_state_dict(weights("llama", "float32", step))
            self._models[step] = model.eval()
            if len(self._models) > MODELS_KEPT:
                self._models.popitem(last=False)
        self._models.move_to_end(step)
        return self._models[step]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bits, not numbers: a NaN is equal to itself, and -0.0 is not 0.0."""
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
