"""A program: verl's updates of weights and its rollouts, on local Ray.

Some updates are made by verl's own manager, and some by ours for engines that live outside verl; rollouts follow each.
Prints a JSON object for each update (digests of what was sent and of what was received) and for each batch of rollouts.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.workers.config import RolloutConfig

from deploy.setup_env import ROOT
from tests.verl.queued import QueuedRollouts
from tests.verl.rollouts import Rollouts
from tests.verl.workers import (
    Replica,
    RolloutWorker,
    TrainingWorker,
    engine_config,
    group,
    local_ray,
    parsed,
    taken_whole,
)
from tests.verl.workers import digest as digest_of


def documented(name: str) -> Any:
    """What the program in docs/verl.md defines under this name."""
    [program] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "verl.md").read_text(), re.M | re.S)
    found: dict[str, Any] = {}
    exec(program, found)
    return found[name]


def main() -> None:
    flags = parsed()
    with local_ray():
        run(flags)


def run(flags: argparse.Namespace) -> None:
    config = engine_config(flags.relay)
    trainer = group(TrainingWorker, 2, config, flags.model)
    receivers = group(RolloutWorker, 2, RolloutConfig(name="vllm", checkpoint_engine=config))
    replica = Replica(receivers.workers)
    rollouts = Rollouts(flags)
    cache = CheckpointEngineRegistry.new("laminar", bucket_size=0, relay=flags.relay)

    inside = CheckpointEngineManager(config, trainer, [replica])
    outside = documented("fleet_manager")(trainer, flags.relay)
    # 7 twice: after a failed validation, say. 3: a trainer that went back to an earlier checkpoint.
    for manager, step in ((inside, 0), (inside, 7), (inside, 7), (outside, 8), (inside, 3)):
        replica.calls.clear()
        trained = trainer.train()
        metrics = manager.update_weights(global_steps=step)
        loaded = [found.get(step) for found in ray.get([worker.loaded.remote() for worker in receivers.workers])]
        cached = taken_whole(cache.get_weights())
        state = trainer.digest_and_taken()
        report = {
            "manager": type(manager).__name__,
            "step": step,
            "version": metrics["laminar/version"],
            "sent": trained,
            "loaded": loaded,
            "cached": digest_of(cached),
            "taken": [taken for _, taken in state],
            "replica_calls": replica.calls,
        }
        print(json.dumps(report), flush=True)
        rollouts.published(cached)
        print(json.dumps(rollouts.report(step)), flush=True)
    queued = QueuedRollouts(flags)
    print(json.dumps(queued.report(step, rollouts.weights)), flush=True)
    queued.close()


if __name__ == "__main__":
    main()
