"""A program: TRL's `GRPOTrainer` on a fleet, from rollouts to reward. Prints one JSON object a step."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.support.training.ratios import Row, Weights
from tests.trl.task import ROWS, two_turns
from trainer_client.integrations.trl import LaminarRollouts, gateway_reward


class Recorded(LaminarRollouts):
    """Compares what came back with the weights of the version, and with those of the version before."""

    weights: Weights

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        self.weights.published(trainer.model)
        found = super().__call__(prompts, trainer)
        rows = [
            Row(prompt + completion, [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs)
            for prompt, completion, mask, logprobs in zip(
                found["prompt_ids"], found["completion_ids"], found["env_mask"], found["logprobs"], strict=True
            )
        ]
        report = {
            "step": trainer.state.global_step,
            "version": self.version,
            "sampled_under": sorted(set(found["version"])),
            "reward": round(sum(found["reward"]) / len(found["reward"]), 4),
            "masked_tokens": sum(mask.count(0) for mask in found["env_mask"]),
            "ratio_off": self.weights.deviation(rows, self.weights.now),
            "ratio_off_version_before": self.weights.deviation(rows, self.weights.before),
        }
        print(json.dumps(report), flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("relay", "gateway", "model", "directory"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=16)
    flags = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32)
    rollouts = Recorded(flags.relay, flags.gateway, two_turns)
    rollouts.weights = Weights(model)
    args = GRPOConfig(
        output_dir=flags.directory,
        max_steps=flags.steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=24,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        temperature=1.0,
        vllm_importance_sampling_mode="token_truncate",
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=gateway_reward,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(flags.model, padding_side="left"),
        rollout_func=rollouts,
    )
    rollouts.attach(trainer)
    try:
        trainer.train()
    finally:
        rollouts.close()
    logged = [log for log in trainer.state.log_history if "sampling/importance_sampling_ratio/max" in log]
    ratio = {end: [log[f"sampling/importance_sampling_ratio/{end}"] for log in logged] for end in ("min", "max")}
    print(json.dumps({"ratio_min": min(ratio["min"]), "ratio_max": max(ratio["max"]), "steps": len(logged)}))


if __name__ == "__main__":
    main()
