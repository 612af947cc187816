"""Merged LoRA weights: one at a time, by the names of the base, and the model unchanged. peft's own: tests/verl."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from protos.errors import InvalidRequest
from trainer_client import merged_lora
from trainer_client.streaming.manifest import TensorMeta

pytestmark = pytest.mark.slow  # torch takes a second to import

P = "base_model.model."


def state(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """As peft names them: a linear layer, an embedding tied to a head, a plain norm, a module that is trained whole."""
    torch.manual_seed(1)
    embedding = torch.rand(11, 4)
    found = {
        "model.embed.weight": embedding,
        "model.q.base_layer.weight": torch.rand(6, 4).bfloat16(),
        "model.q.base_layer.bias": torch.rand(6),
        "model.q.lora_A.default.weight": torch.rand(2, 4),
        "model.q.lora_B.default.weight": torch.rand(6, 2),
        "model.norm.weight": torch.rand(4),
        "score.original_module.weight": torch.zeros(3, 4),
        "score.modules_to_save.default.weight": torch.ones(3, 4),
        "head.weight": embedding,
    }
    return {P + name: tensor for name, tensor in {**found, **more}.items()}


def test_a_state_dict_becomes_the_bases_names_with_the_formulas_values() -> None:
    given = state()
    before = {name: tensor.clone() for name, tensor in given.items()}
    merged = merged_lora(given, scale=1.5)
    found = dict(merged.tensors())
    q = before[P + "model.q.base_layer.weight"]
    delta = before[P + "model.q.lora_B.default.weight"] @ before[P + "model.q.lora_A.default.weight"] * 1.5
    assert torch.equal(found["model.q.weight"], (q.float() + delta).bfloat16())
    assert torch.equal(found["score.weight"], torch.ones(3, 4))
    assert torch.equal(found["model.q.bias"], before[P + "model.q.base_layer.bias"])
    assert list(found) == ["model.embed.weight", "model.q.weight", "model.q.bias", "model.norm.weight", "score.weight"]
    assert merged.manifest.tied == {"head.weight": "model.embed.weight"}
    assert [(meta.name, meta.shape) for meta in merged.manifest.tensors] == [
        (name, tuple(tensor.shape)) for name, tensor in found.items()
    ]
    assert dict(merged.tensors()).keys() == found.keys(), "it may be taken again"
    assert all(torch.equal(given[name], before[name]) for name in given), "the model is only read"


def test_floats_are_cast_after_the_merge_and_other_dtypes_stay(caplog: pytest.LogCaptureFixture) -> None:
    merged = merged_lora(state(ids=torch.arange(3), wide=torch.tensor([7e4])), scale=2.0, dtype=torch.float16)
    found = dict(merged.tensors())
    assert [record.message[:39] for record in caplog.records] == ["tensor 'wide' has values beyond torch.f"]
    assert {name: tensor.dtype for name, tensor in found.items() if tensor.dtype != torch.float16} == {
        "ids": torch.int64
    }
    assert TensorMeta("ids", "int64", (3,)) in merged.manifest.tensors
    assert TensorMeta("model.q.weight", "float16", (6, 4)) in merged.manifest.tensors


def test_an_embeddings_adapter_is_transposed_and_ends_its_tie() -> None:
    a, b = torch.rand(2, 11), torch.rand(4, 2)
    merged = merged_lora(
        state(**{"model.embed.lora_embedding_A.default": a, "model.embed.lora_embedding_B.default": b}),
        scale={"default": 0.5},
    )
    found = dict(merged.tensors())
    plain = state()[P + "model.embed.weight"]
    assert torch.equal(found["model.embed.weight"], plain + (b @ a).T * 0.5)
    assert torch.equal(found["head.weight"], plain)
    assert merged.manifest.tied == {}


def test_several_adapters_are_chosen_by_name() -> None:
    more = {"model.q.lora_A.other.weight": torch.ones(1, 4), "model.q.lora_B.other.weight": torch.ones(6, 1)}
    with pytest.raises(InvalidRequest, match=r"the adapters are default, other .*adapters="):
        merged_lora(state(**more), scale=1.0)
    with pytest.raises(InvalidRequest, match=r"no adapter 'third' .*default, other"):
        merged_lora(state(**more), scale=1.0, adapters=["third"])
    found = dict(merged_lora(state(**more), scale={"other": 3.0}, adapters=["other"]).tensors())
    expected = (state()[P + "model.q.base_layer.weight"].float() + 3.0).bfloat16()
    assert torch.equal(found["model.q.weight"], expected)
    assert "score.weight" not in found, "that was saved with the other adapter"


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({}, {}, r"does not hold the adapters' scale .*scale=lora_alpha / r"),
        ({}, {"scale": {"x": 1.0}}, "scale has no adapter 'default' .*it has x"),
        ({"model.q.lora_magnitude_vector.default.weight": torch.ones(6)}, {"scale": 1.0}, "DoRA cannot be merged"),
        (
            {"model.embed.token_adapter.trainable_tokens_delta.default": torch.ones(2, 4)},
            {"scale": 1.0},
            "trainable_tokens_delta.default.*trainable_token_indices cannot be merged here .*merge_and_unload",
        ),
        ({"model.q.lora_B.default.bias": torch.ones(6)}, {"scale": 1.0}, "lora_B.default.bias.*merge_and_unload"),
        (
            {"model.k.lora_A.default.weight": torch.ones(2, 4)},
            {"scale": 1.0},
            "adapter 'default' of 'model.k.weight' lacks",
        ),
        (
            {"model.k.lora_A.default.weight": torch.ones(2, 4), "model.k.lora_B.default.weight": torch.ones(3, 2)},
            {"scale": 1.0},
            "'model.k.weight' has adapters and no weight",
        ),
        ({"model.q.lora_A.default.weight": torch.ones(2, 5)}, {"scale": 1.0}, r"'model.q.weight' has factors \[6, 2\]"),
    ],
)
def test_what_cannot_be_merged_is_named(more: dict[str, torch.Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        merged_lora(state(**more), **options)


class WithAdapters(torch.nn.Module):
    """As transformers' models are after `add_adapter`: names without a prefix, and a method for the active adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Module()
        self.q.base_layer = torch.nn.Linear(4, 6, bias=False)
        self.q.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2, bias=False) for name in ("one", "two")})
        self.q.lora_B = torch.nn.ModuleDict({name: torch.nn.Linear(2, 6, bias=False) for name in ("one", "two")})
        self.q.scaling = {"one": 1.5, "two": 9.0}  # type: ignore[assignment]

    def active_adapters(self) -> list[str]:
        return ["one"]


def test_a_model_with_adapters_of_its_own_is_merged_by_those_that_its_method_names() -> None:
    model = WithAdapters()
    weights = model.state_dict()
    delta = weights["q.lora_B.one.weight"] @ weights["q.lora_A.one.weight"] * 1.5
    (pair,) = merged_lora(model).tensors()
    assert pair[0] == "q.weight"
    assert torch.equal(pair[1], weights["q.base_layer.weight"] + delta)


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tensor is of a LoRA adapter"):
        merged_lora(torch.nn.Linear(2, 2))


def test_a_merged_tensor_is_let_go_before_the_next_is_made() -> None:
    before: weakref.ref[torch.Tensor] | None = None
    for _, tensor in merged_lora(state(), scale=1.0).tensors():
        assert before is None or before() is None
        before = weakref.ref(tensor) if tensor.shape == (6, 4) else None
        del tensor
