"""Merged LoRA weights as the SDK streams them, beside those of peft's `merge_and_unload`; prints what differs."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
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
    for what, config in {"dora": LoraConfig(r=2, target_modules=["q"], use_dora=True)}.items():
        try:
            merged_lora(get_peft_model(Net(), config))
        except InvalidRequest as error:
            report[what] = str(error)
    linear = get_peft_model(Net(), LoraConfig(r=2, target_modules=["q"]))
    linear.merge_adapter()
    try:
        merged_lora(linear)
    except InvalidRequest as error:
        report["merged"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
