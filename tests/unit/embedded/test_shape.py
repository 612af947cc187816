"""The shape of a model directory is that which `transformers` reads from it; what cannot be run is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.embedded.compute.shape import FAMILIES, ModelShape, read_shape
from protos.errors import InvalidRequest

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "small": SMALL,
    "fewer key heads": {**SMALL, "num_key_value_heads": 2},
    "no number of key heads": {**SMALL, "num_key_value_heads": None},
    "heads of another size": {**SMALL, "head_dim": 24, "num_key_value_heads": 2},
    "tied, biased": {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "several ends": {**SMALL, "eos_token_id": [7, 9]},
    "no end": {**SMALL, "eos_token_id": None},
    "theta of before 5": {**SMALL, "rope_theta": 500_000.0, "rope_scaling": None},
    "scaling of before 5": {**SMALL, "rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "scaling of before 4.43": {**SMALL, "rope_theta": 10_000, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "scaling": {**SMALL, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}},
    "both": {
        **SMALL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
}


def write(directory: Path, config: object, name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(config))
    return directory


@pytest.mark.slow  # the models of transformers take seconds to import
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_transformers_reads(tmp_path: Path, family: str, name: str) -> None:
    from transformers import AutoConfig

    shape = read_shape(write(tmp_path, {"model_type": family, **CONFIGS[name]}))
    config = AutoConfig.from_pretrained(tmp_path)
    llama, eos = family == "llama", config.eos_token_id
    assert shape == ModelShape(
        family=family,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=config.attention_bias if llama else True,
        o_bias=config.attention_bias if llama else False,
        mlp_bias=config.mlp_bias if llama else False,
        context=config.max_position_embeddings,
        rope_type=config.rope_parameters["rope_type"],
        rope_theta=config.rope_parameters["rope_theta"],
        eos_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        directory=tmp_path,
    )


def test_the_ends_of_generation_come_from_its_own_file(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama", **SMALL, "eos_token_id": 3})
    assert read_shape(tmp_path).eos_ids == {3}
    write(tmp_path, {"eos_token_id": [5, 6]}, "generation_config.json")
    assert read_shape(tmp_path).eos_ids == {5, 6}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported"),
        ({}, "model_type '' is not supported"),
        ([], r"config\.json cannot be read: Expected `object`"),
        (
            {"model_type": "llama", "hidden_size": "64"},
            r"cannot be read: Expected `int`, got `str` - at `\$.hidden_size",
        ),
        ({"model_type": "llama", "num_hidden_layers": 0}, r"cannot be read: Expected `int` >= 1"),
        ({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}, "65 is no multiple"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}, "a part of each head"),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": "1e4"}}, "rope_theta '1e4' is not a number"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, config: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_shape(write(tmp_path, config))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"it has no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(InvalidRequest, match=r"config\.json cannot be read"):
        read_shape(tmp_path)
