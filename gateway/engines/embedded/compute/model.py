"""The forward pass of the Llama and Qwen2 families, over fused and packed weights.

The layers are our own because `transformers`' loop spends most of a small model's step outside the matrix products.
Rounding follows `transformers`: norms in float32, rotary tables in the model's dtype.

Names follow the checkpoint: `ModelShape.layout` lists every tensor that a snapshot must hold, with its shape, and
`load` takes them by those names, layer by layer, so that at most one layer is alive twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from gateway.engines.embedded.compute.attention import AttentionPlan, Span
from gateway.engines.embedded.compute.kv import KvMemory
from gateway.engines.embedded.compute.linear import Linear
from gateway.engines.embedded.compute.shape import ModelShape
from protos.errors import InvalidRequest

Tensors = Callable[[str], torch.Tensor]
"""Returns a checkpoint tensor by name, in any float dtype."""


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class DecoderModel:
    """Weights of one model and its forward pass; not thread-safe, owned by the model loop."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device, context: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._layers: list[_Layer] = []
        self._embed = torch.empty(0)
        self._norm = torch.empty(0)
        self._head: Linear | None = None
        self._cos, self._sin = self._rotary_tables(context)
        self._num_qk_heads = shape.num_heads + shape.num_kv_heads
        # Queries are scaled through their rotary table: one multiplication less in every layer.
        scale = torch.ones(self._num_qk_heads, 1)
        scale[: shape.num_heads] = shape.head_dim**-0.5
        self._head_scale = scale.to(device, dtype)

    def _rotary_tables(self, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, `[context, head_dim]` each. The sines have the signs of `rotate_half` folded in."""
        frequencies, factor = _rotary_frequencies(self.shape)
        angles = torch.arange(context)[:, None].float() * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)

    @torch.inference_mode()
    def load(self, tensors: Tensors) -> None:
        """Takes every weight anew; afterwards nothing refers to memory behind `tensors`."""

        def get(name: str) -> torch.Tensor:
            return tensors(name).to(self.device, self.dtype, copy=True)

        self._embed = get("model.embed_tokens.weight")
        self._head = _renewed(self._head, self._embed if self.shape.tied else get("lm_head.weight"), None)
        for index in range(self.shape.num_layers):
            old = self._layers[index] if index < len(self._layers) else None
            layer = self._load_layer(f"model.layers.{index}", get, old)
            if old is None:
                self._layers.append(layer)
            else:
                self._layers[index] = layer
        self._norm = get("model.norm.weight")

    def _load_layer(self, at: str, get: Tensors, old: _Layer | None) -> _Layer:
        def fused(field: str, bias: bool, *names: str) -> Linear:
            weight = torch.cat([get(f"{at}.{name}.weight") for name in names])
            biases = torch.cat([get(f"{at}.{name}.bias") for name in names]) if bias else None
            return _renewed(None if old is None else getattr(old, field), weight, biases)

        s = self.shape
        return _Layer(
            input_norm=get(f"{at}.input_layernorm.weight"),
            qkv=fused("qkv", s.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o=fused("o", s.o_bias, "self_attn.o_proj"),
            post_norm=get(f"{at}.post_attention_layernorm.weight"),
            gate_up=fused("gate_up", s.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
            down=fused("down", s.mlp_bias, "mlp.down_proj"),
        )

    @torch.inference_mode()
    def forward(self, kv: KvMemory, token_ids: list[int], spans: list[Span], *, by_token: bool) -> torch.Tensor:
        """Stores the KV of `token_ids` (the spans' tokens, in order; spans of one token first) and returns the
        hidden states before the head, `[T, hidden]`."""
        s = self.shape
        num_tokens = len(token_ids)
        positions = torch.tensor([p for span in spans for p in range(span.start, span.start + span.count)])
        rows = torch.tensor([span.slot for span in spans for _ in range(span.count)])
        positions, rows = positions.to(self.device), rows.to(self.device)
        write = kv.write_index(rows, positions)
        cos = self._cos[positions][:, None] * self._head_scale
        sin = self._sin[positions][:, None] * self._head_scale
        real = [span for span in spans if span.slot != kv.padding_row]
        attention = AttentionPlan(kv, real, s.num_heads, by_token=by_token)
        qk_size = self._num_qk_heads * s.head_dim
        half = s.head_dim // 2
        attended = torch.zeros(num_tokens, s.num_heads * s.head_dim, dtype=self.dtype, device=self.device)

        x = F.embedding(torch.tensor(token_ids, device=self.device), self._embed)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, (s.hidden,), layer.input_norm, s.norm_eps)
            qkv = layer.qkv(normed)
            qk = qkv[:, :qk_size].view(num_tokens, self._num_qk_heads, s.head_dim)
            qk = torch.addcmul(qk * cos, torch.roll(qk, half, -1), sin)
            keys, values = kv.flat[index]
            keys.index_copy_(0, write, qk[:, s.num_heads :].reshape(-1, s.head_dim))
            values.index_copy_(0, write, qkv[:, qk_size:].reshape(-1, s.head_dim))
            attention.attend(index, qk[:, : s.num_heads], attended)
            x = x + layer.o(attended)
            normed = F.rms_norm(x, (s.hidden,), layer.post_norm, s.norm_eps)
            gate_up = layer.gate_up(normed)
            x = x + layer.down(F.silu(gate_up[:, : s.intermediate]) * gate_up[:, s.intermediate :])
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits of some hidden states, `[R, vocab]`, in the model's dtype."""
        assert self._head is not None, "load() comes first"
        return self._head(F.rms_norm(hidden, (self.shape.hidden,), self._norm, self.shape.norm_eps))


def _rotary_frequencies(shape: ModelShape) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, `[head_dim / 2]`, and the factor of cosines and sines.

    Scaled ones come from `transformers`; unscaled ones are made here, as it takes seconds of processor time to import.
    """
    if shape.rope_type == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        return 1.0 / shape.rope_theta**exponents, 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        config = AutoConfig.from_pretrained(shape.directory, local_files_only=True)
        frequencies, factor = ROPE_INIT_FUNCTIONS[shape.rope_type](config)
    except (OSError, ValueError, KeyError) as e:
        raise InvalidRequest(f"{shape.directory}/config.json cannot be read: {e}") from e
    return frequencies, factor


def _renewed(old: Linear | None, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if old is None:
        return Linear(weight, bias)
    old.set(weight, bias)
    return old
