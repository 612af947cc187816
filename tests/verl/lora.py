"""Merged LoRA weights as the SDK streams them, beside those of peft's `merge_and_unload`; prints what differs."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.pytorch_utils import Conv1D

from protos.errors import InvalidRequest
from trainer_client import merged_lora


class Net(torch.nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.square = Conv1D(6, 6)
        self.q = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 13, bias=False)
        self.score = torch.nn.Linear(6, 2)
        if tied:
            self.head.weight = self.embed.weight


CASES: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["q"]},
    "rslora": {"target_modules": ["q"], "use_rslora": True, "modules_to_save": ["score"]},
    "transposed": {"target_modules": ["square"], "fan_in_fan_out": True},
    "embedding": {"target_modules": ["embed", "q"]},
}


def noisy(model: Any) -> Any:
    """B begins as zeros: adapters that change nothing would prove nothing."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return model


def differing(model: Any, dtype: torch.dtype | None) -> list[str]:
    merged = merged_lora(model, dtype=dtype)
    found = dict(merged.tensors())
    found |= {alias: found[owner] for alias, owner in merged.manifest.tied.items()}
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    expected = {name: one.to(dtype) if dtype is not None else one for name, one in expected.items()}
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [
        name for name, one in expected.items() if one.dtype != found[name].dtype or not torch.equal(one, found[name])
    ]


def added() -> list[str]:
    """What differs when transformers' own `add_adapter` has put the adapters into the model."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=16, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    torch.manual_seed(1)
    plain = Qwen2ForCausalLM(config)
    lora = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"])
    wrapped = noisy(get_peft_model(copy.deepcopy(plain), lora))
    plain.add_adapter(lora)
    names = {f"base_model.model.{name}": one for name, one in plain.named_parameters()}
    with torch.no_grad():
        for name, one in wrapped.named_parameters():
            names[name].copy_(one)
    merged, expected = dict(merged_lora(plain).tensors()), dict(merged_lora(wrapped).tensors())
    return [name for name in expected | merged if not torch.equal(expected[name], merged[name])]


def main() -> None:
    report: dict[str, Any] = {}
    for base in (torch.float32, torch.bfloat16):
        for name, options in CASES.items():
            torch.manual_seed(1)
            config = LoraConfig(r=3, lora_alpha=5, **options)
            model = noisy(
                get_peft_model(Net(tied=name != "embedding").to(base), config, autocast_adapter_dtype=name != "linear")
            )
            before = {key: one.clone() for key, one in model.state_dict().items()}
            report[f"{name} {base}"] = differing(model, None) + differing(model, torch.float16)
            after = model.state_dict()
            assert all(torch.equal(one, after[key]) for key, one in before.items()), "the model is only read"
    two = get_peft_model(Net(), LoraConfig(r=3, target_modules=["q"]), adapter_name="one")
    two.add_adapter("two", LoraConfig(r=2, target_modules=["q"]))
    two.base_model.set_adapter(["one", "two"])
    report["two adapters"] = differing(noisy(two), None)
    kinds = {"dora": {"use_dora": True}, "tokens": {"trainable_token_indices": {"embed": [1, 3]}}}
    for what, options in kinds.items():
        try:
            merged_lora(get_peft_model(Net(), LoraConfig(r=2, target_modules=["q"], **options)))
        except InvalidRequest as error:
            report[what] = str(error)
    report["add_adapter"] = added()
    linear = get_peft_model(Net(), LoraConfig(r=2, target_modules=["q"]))
    linear.merge_adapter()
    try:
        merged_lora(linear)
    except InvalidRequest as error:
        report["merged"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
