"""A program: TRL's `AsyncGRPOTrainer` on a fleet. Prints one JSON object a version, then one for the run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tests.support.training.ratios import Row, Weights
from tests.trl.attention import on_a_cpu
from tests.trl.task import ROWS, letters, with_a_branch
from trainer_client.integrations.trl import LaminarRolloutWorker, LaminarWeightTransfer

GROUP_SIZE = 8


class Transfer(LaminarWeightTransfer):
    """Keeps every version's weights, and notes what TRL calls."""

    def __init__(self, relay: str) -> None:
        super().__init__(relay)
        self.calls: list[str] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def init_weight_transfer(self) -> None:
        self.calls.append("init")
        super().init_weight_transfer()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("send")
        sent: dict[str, torch.Tensor] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in iterator:
                sent[name] = tensor.clone()
                yield name, tensor

        super().send_weights(noted())
        self.weights[self.version] = sent

    def destroy(self) -> None:
        self.calls.append("destroy")
        super().destroy()


class Worker(LaminarRolloutWorker):
    """Notes every row."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: list[Any] = []

    def _samples(self, *args: Any) -> list[Any]:
        samples = super()._samples(*args)
        self.rows += samples
        return samples


def reports(worker: Worker, transfer: Transfer, model: Any) -> Iterator[Mapping[str, Any]]:
    """By version: what was sampled under it, against its weights and those of the version before."""
    weights = Weights(model)
    for version in sorted(transfer.weights):
        found = [row for row in worker.rows if row.metrics["laminar/version"] == version]
        if not found:
            continue
        rows = [Row(row.input_ids.tolist(), row.completion_mask.tolist(), row.old_log_probs.tolist()) for row in found]
        yield {
            "version": version,
            "counted_by_trl_as": sorted({row.model_version for row in found}),
            "rows": len(found),
            "groups": len({row.group_id for row in found}),
            "reward": round(sum(row.metrics["reward"] for row in found) / len(found), 4),
            "ratio_off": weights.deviation(rows, transfer.weights[version]),
            "ratio_off_version_before": weights.deviation(rows, transfer.weights.get(version - 1, {})),
        }


def expected_reward(model: Any, tokenizer: Any, weights: Mapping[str, torch.Tensor]) -> float:
    """Of a version: the mean over some 500 answers. What the run sampled would not do: it lags behind by as many
    versions as this machine is busy."""
    model.load_state_dict(weights, strict=False)
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in ROWS], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    sampled = model.generate(
        **prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=24, num_return_sequences=64
    )
    answers = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(letters, answers)) / len(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("relay", "gateway", "model", "directory"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=20)  # after 10 the reward may be below the first
    flags = parser.parse_args()
    on_a_cpu()
    torch.manual_seed(0)
    transfer = Transfer(flags.relay)
    worker = Worker(
        flags.gateway,
        transfer,
        ROWS,
        with_a_branch,
        group_size=GROUP_SIZE,
        groups_ahead=4,
        sampling={"max_tokens": 24, "temperature": 1.0},
        concurrency=16,
    )
    args = AsyncGRPOConfig(
        output_dir=flags.directory,
        max_steps=flags.steps,
        per_device_train_batch_size=32,
        num_generations=GROUP_SIZE,
        token_budget=4096,
        learning_rate=6e-3,
        lr_scheduler_type="constant",
        bf16=False,
        dtype="float32",
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = AsyncGRPOTrainer(
        flags.model,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(flags.model, padding_side="left"),
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    trainer.train()
    reference = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32)
    for report in reports(worker, transfer, reference):
        print(json.dumps(report), flush=True)
    logged = [log for log in trainer.state.log_history if "sample/staleness_mean" in log]
    run = {
        "calls": transfer.calls,
        "versions_by_sync": {count: worker.versions.version_of(count) for count in range(1, trainer.model_version + 1)},
        "rewards": [round(log["reward"], 4) for log in logged],
        "expected_rewards": [
            round(expected_reward(reference, trainer.processing_class, transfer.weights[version]), 4)
            for version in (min(transfer.weights), max(transfer.weights))
        ],
        "staleness": [log["sample/staleness_mean"] for log in logged],
        "ratio": {key: value for key, value in logged[0].items() if "ratio" in key},
    }
    print(json.dumps(run), flush=True)


if __name__ == "__main__":
    main()
