"""A program for torchrun: a trainer whose ranks send weights by vLLM's factory, and rank 0 samples from the fleet.

Under FSDP2: to take a tensor is a collective of both ranks. Prints a JSON object for each version: the largest
|ratio - 1| of what was sampled under it, by the published weights and by those before.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource, ParamMeta, WeightSource, WeightTransferTrainerFactory

from deploy.setup_env import ROOT
from protos.errors import InvalidRequest
from tests.support.training.ratios import Row, Weights
from trainer_client import ExperienceReader
from trainer_client.integrations.rollouts import Planned, Rollouts, single_turn
from trainer_client.integrations.rows import row_of
from trainer_client.integrations.vllm import LaminarTrainerInitInfo
from trainer_client.sessions import Sessions

VERSIONS = 3
SESSIONS = 4
LEARNING_RATE = 3e-3
SAMPLING = {"max_tokens": 24, "temperature": 1.0}


class Counted(WeightSource):
    """A source that counts what was taken of it, and may announce one dtype for another."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._source = ModuleSource(module)
        self.taken = 0
        self.announced: torch.dtype | None = None

    def metadata(self) -> list[ParamMeta]:
        found = self._source.metadata()
        return [ParamMeta(meta.name, self.announced or meta.dtype, meta.shape) for meta in found]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._source:
            self.taken += 1
            yield pair


class Fleet:
    """Sessions through the gateway, under one version."""

    def __init__(self, gateway: str) -> None:
        client = Sessions(gateway)
        self._rollouts = Rollouts(client, single_turn(lambda text, task: 0.0), concurrency=SESSIONS)
        self._reader = ExperienceReader(gateway)

    def rows(self, version: int) -> list[Row]:
        tasks = [{"prompt": [{"role": "user", "content": f"What is {number} and 30?"}]} for number in range(SESSIONS)]
        self._reader.trainer_version = version
        names = self._rollouts.play([Planned(task, {"min_version": version}) for task in tasks], SAMPLING)
        batch = self._reader.sample(session_ids=names, wait_s=60.0)
        self._reader.ack(batch)
        rows = [row for trajectory in batch.trajectories if (row := row_of(trajectory)) is not None]
        assert [row.version for row in rows] == [version] * SESSIONS
        return [Row(row.token_ids, row.mask, row.logprobs) for row in rows]

    def close(self) -> None:
        self._rollouts.close()
        self._reader.close()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(64).reshape(2, 32)
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def documented(relay: str, **names: Any) -> dict[str, Any]:
    """Runs the program of docs/vllm-trainers.md for one step, with this trainer's names; what it defined."""
    [program] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "vllm-trainers.md").read_text(), re.M | re.S)
    assert "trainer-0:7070" in program
    assert "range(1, 101)" in program
    exec(program.replace("trainer-0:7070", relay).replace("range(1, 101)", "range(1, 2)"), names)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("relay", "gateway", "model", "directory"):
        parser.add_argument(f"--{name}", required=True)
    flags = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    source = Counted(model)
    engine = WeightTransferTrainerFactory.trainer_init(
        LaminarTrainerInitInfo(relay=flags.relay, rank=rank), client=None, source=source
    )
    weights = Weights(whole)
    fleet = Fleet(flags.gateway) if rank == 0 else None

    for step in range(1, VERSIONS + 1):
        train_step(model, optimizer)
        engine.send_weights()
        now = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        if fleet is not None:
            whole.load_state_dict(now, strict=False)
            whole.tie_weights()
            weights.published(whole)
            rows = fleet.rows(engine.version)
            report = {
                "step": step,
                "version": engine.version,
                "rows": len(rows),
                "ratio_off": weights.deviation(rows, weights.now),
                "ratio_off_version_before": weights.deviation(rows, weights.before),
            }
            print(json.dumps(report), flush=True)
        dist.barrier()

    # What cannot be published leaves no rank behind in a collective.
    before, source.taken, source.announced = engine.version, 0, torch.bfloat16
    error = ""
    try:
        engine.send_weights()
    except InvalidRequest as refused:
        error = str(refused)
    taken = torch.tensor([source.taken])
    everywhere = [torch.zeros_like(taken) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, taken)
    if fleet is not None:
        report = {
            "refused": error,
            "taken": [int(one) for one in everywhere],
            "tensors": len(source.metadata()),
            "version_after": engine.version - before,
        }
        print(json.dumps(report), flush=True)
        fleet.close()
    engine.shutdown()

    shown = documented(flags.relay, rank=rank, model=model, train=lambda model: train_step(model, optimizer))
    if rank == 0:
        print(json.dumps({"documented": shown["engine"].version}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
