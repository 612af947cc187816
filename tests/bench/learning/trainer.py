"""The trainer: GRPO in plain torch on the gateway's experience, a version published after every step.

The arithmetic is the demo's (`deploy.demo.training`): advantages within groups, a loss per token whose ratio to the
recorded logprobs is clipped to [0.8, 1.28], AdamW. It is the same in every mode: it waits for whole groups within the
bound of staleness, and for nothing else.

Writes one JSON object for each step to OUT/steps.jsonl, and every few versions to OUT/versions.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from deploy.demo.training.policy import Policy
from deploy.demo.training.trainer import Settings, next_batches, train_step
from protos.process import write_ready_file
from trainer_client import ExperienceReader, Packed, Publisher, pack

MICRO_TOKENS = 8192


def train(settings: Settings, eval_every: int, ready_file: Path | None) -> None:
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    policy = Policy(settings.model_dir, lr=settings.lr, dtype=torch.float32)
    versions = settings.out / "versions"
    versions.mkdir(parents=True)
    stop = threading.Event()
    with (
        (settings.out / "steps.jsonl").open("w", buffering=1) as events,
        Publisher(settings.relay, settings.model) as publisher,
        ExperienceReader(settings.gateway) as reader,
    ):
        ticket = publisher.publish(policy.state_dict(), step=0)
        reader.trainer_version = ticket.version
        save_file(policy.state_dict(), versions / "0.safetensors")
        write_ready_file(ready_file, {"model": settings.model})
        cpu_before_s = time.process_time()
        for step in range(1, settings.steps + 1):
            asked = time.monotonic()
            batches = next_batches(reader, settings, stop)
            began = time.monotonic()
            batch = pack([trajectory for leased in batches for trajectory in leased.trajectories])
            stats = train_step(policy, batch, settings, stop)
            assert stats is not None, "nothing stops this trainer"
            trained, used = time.monotonic(), describe(batch, reader.trainer_version)
            ticket = publisher.publish(policy.state_dict(), step=step)
            reader.trainer_version = ticket.version
            published, published_unix_s = time.monotonic(), time.time()
            for leased in batches:
                reader.ack(leased)
            if step % eval_every == 0 or step == settings.steps:
                save_file(policy.state_dict(), versions / f"{step}.safetensors")
            spent = {"wait_s": began - asked, "train_s": trained - began, "publish_s": published - trained}
            spent["other_s"] = time.monotonic() - published
            spent["cpu_s"] = time.process_time() - cpu_before_s  # of all steps so far
            times = {name: round(seconds, 4) for name, seconds in spent.items()}
            line = {"t": published_unix_s, "step": step, "version": ticket.version, **used, **asdict(stats), **times}
            events.write(json.dumps(line) + "\n")
        ticket.wait_sealed()


def describe(batch: Packed, trainer_version: int) -> dict[str, Any]:
    """`staleness`: sampled tokens by versions behind, at use. `mixed`: trajectories of more than one version."""
    behind, counts = np.unique(batch.staleness(trainer_version), return_counts=True)
    rows = [batch.versions[batch.row(n)][batch.loss_mask[batch.row(n)]] for n in range(batch.num_trajectories)]
    return {
        "reward": round(float(batch.rewards.mean()), 5),
        "tokens": int(batch.loss_mask.sum()),
        "longest": max(len(row) for row in rows),
        "mixed": sum(len(set(row.tolist())) > 1 for row in rows),
        "staleness": {int(b): int(count) for b, count in zip(behind, counts, strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--relay", "--gateway"):
        parser.add_argument(name, required=True)
    for name in ("--model-dir", "--out", "--ready-file"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--steps", "--groups", "--group-size", "--staleness-max", "--eval-every", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    given = vars(parser.parse_args())
    eval_every, ready_file = given.pop("eval_every"), given.pop("ready_file")
    relay, gateway, model_dir = (given.pop(name) for name in ("relay", "gateway", "model_dir"))
    train(Settings(relay, gateway, model_dir, micro_tokens=MICRO_TOKENS, **given), eval_every, ready_file)


if __name__ == "__main__":
    main()
