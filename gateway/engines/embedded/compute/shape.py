"""What a model directory says of its model's shape: config.json, for the Llama and Qwen2 families.

`transformers` reads the same file, but its import costs as much processor time as all the rest of an engine's start. So
the fields that the forward pass needs are read here, with the defaults that `transformers` 5 has for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from protos.decoding import decode_json
from protos.errors import InvalidRequest

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings whose tables do not depend on the length in use."""
ROPE_THETA = 10_000.0

Count = Annotated[int, msgspec.Meta(ge=1)]
Rope = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The fields of config.json that the forward pass needs. `directory`: where they come from."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    context: int
    """max_position_embeddings."""
    rope_type: str
    rope_theta: float
    eos_ids: frozenset[int]
    directory: Path = field(repr=False, compare=False)

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        for layer in range(self.num_layers):
            at = f"model.layers.{layer}"
            shapes[f"{at}.input_layernorm.weight"] = (self.hidden,)
            linear(f"{at}.self_attn.q_proj", q, self.hidden, self.qkv_bias)
            linear(f"{at}.self_attn.k_proj", kv, self.hidden, self.qkv_bias)
            linear(f"{at}.self_attn.v_proj", kv, self.hidden, self.qkv_bias)
            linear(f"{at}.self_attn.o_proj", self.hidden, q, self.o_bias)
            shapes[f"{at}.post_attention_layernorm.weight"] = (self.hidden,)
            linear(f"{at}.mlp.gate_proj", self.intermediate, self.hidden, self.mlp_bias)
            linear(f"{at}.mlp.up_proj", self.intermediate, self.hidden, self.mlp_bias)
            linear(f"{at}.mlp.down_proj", self.hidden, self.intermediate, self.mlp_bias)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


class _Kind(msgspec.Struct):
    model_type: str = ""


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Config(_Generation, kw_only=True):
    """What both families have, with their common defaults."""

    hidden_size: Count = 4096
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    """As `rope_parameters` before `transformers` 5; it goes first."""
    rope_theta: float | None = None


class Llama(_Config, kw_only=True):
    vocab_size: Count = 32_000
    intermediate_size: Count = 11_008
    max_position_embeddings: Count = 2048
    eos_token_id: int | list[int] | None = 2
    attention_bias: bool = False
    mlp_bias: bool = False


class Qwen2(_Config, kw_only=True):
    vocab_size: Count = 151_936
    intermediate_size: Count = 22_016
    max_position_embeddings: Count = 32_768
    num_key_value_heads: Count | None = 32


FAMILIES: dict[str, type[Llama | Qwen2]] = {"llama": Llama, "qwen2": Qwen2}


def read_shape(directory: Path) -> ModelShape:
    """The shape that `directory`'s config.json describes; InvalidRequest when we cannot run it."""
    if not (directory / "config.json").is_file():
        raise InvalidRequest(
            f"{directory} is not a model directory: it has no config.json",
            hint="give a directory with config.json, *.safetensors and tokenizer.json, as save_pretrained writes it",
        )
    family = _read(directory / "config.json", _Kind).model_type
    if family not in FAMILIES:
        raise InvalidRequest(
            f"model_type {family!r} is not supported by the embedded engine",
            hint=f"it runs {' and '.join(FAMILIES)}; serve others with vLLM or SGLang",
        )
    config = _read(directory / "config.json", FAMILIES[family])
    rope = config.rope_scaling or config.rope_parameters or {}
    rope_type: Any = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", ROPE_THETA if config.rope_theta is None else config.rope_theta)
    _refuse_unsupported(config, rope, rope_type, theta)
    eos = config.eos_token_id
    if (directory / "generation_config.json").is_file():
        eos = _read(directory / "generation_config.json", _Generation).eos_token_id
    heads = config.num_attention_heads
    return ModelShape(
        family=family,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim or config.hidden_size // heads,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=config.attention_bias if isinstance(config, Llama) else True,
        o_bias=config.attention_bias if isinstance(config, Llama) else False,
        mlp_bias=config.mlp_bias if isinstance(config, Llama) else False,
        context=config.max_position_embeddings,
        rope_type=rope_type,
        rope_theta=float(theta),
        eos_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        directory=directory,
    )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return decode_json(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError) as e:
        raise InvalidRequest(f"{path} cannot be read: {e}") from e


def _refuse_unsupported(config: Llama | Qwen2, rope: Rope, rope_type: object, theta: object) -> None:
    if config.hidden_act != "silu":
        raise InvalidRequest(f"hidden_act {config.hidden_act!r} is not supported", hint="only silu is")
    if config.use_sliding_window:
        raise InvalidRequest("sliding-window attention is not supported", hint="set use_sliding_window to false")
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        raise InvalidRequest(
            f"hidden_size {config.hidden_size} is no multiple of num_attention_heads {config.num_attention_heads}",
            hint="give head_dim in config.json if the heads have another size",
        )
    if rope_type not in ROPE_TYPES:
        raise InvalidRequest(f"rope_type {rope_type!r} is not supported", hint=f"one of {', '.join(ROPE_TYPES)} is")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidRequest("rotary positions over a part of each head are not supported")
    if not isinstance(theta, int | float):
        raise InvalidRequest(f"rope_theta {theta!r} is not a number")
