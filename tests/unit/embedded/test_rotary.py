"""Rotary tables are those of `transformers`' own module, number for number, for every scaling that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gateway.engines.embedded.compute.model import DecoderModel
from gateway.engines.embedded.compute.shape import ROPE_TYPES, read_shape

pytestmark = pytest.mark.slow  # the models of transformers take seconds to import

CONTEXT, HEAD_DIM = 256, 16
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10_000.0},
    "linear": {"factor": 2.0, "rope_theta": 10_000.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500_000.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1_000_000.0},
}


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_they_are_those_of_transformers(tmp_path: Path, family: Any, rope_type: str) -> None:
    config = family(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=96,
        vocab_size=128,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": rope_type, **SCALINGS[rope_type]},
    )
    config.save_pretrained(tmp_path)
    shape, half = read_shape(tmp_path), HEAD_DIM // 2
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(CONTEXT)[None])
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    for dtype in (torch.float32, torch.bfloat16):
        model = DecoderModel(shape, dtype, torch.device("cpu"), CONTEXT)
        assert torch.equal(model._cos, cos[0].to(dtype))
        assert torch.equal(model._sin, signed.to(dtype))
