"""verl's worker groups on local Ray, as far as they go on a CPU.

verl's own training engines exist for GPUs and NPUs alone, and so do its inference servers. `TrainingWorker` takes the
place of the first: a model of `transformers`, with the methods and the dispatch of verl's actor worker. `Adapter` takes
the place of what loads weights into an inference server; the worker around it is verl's.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

LEARNING_RATE = 3e-3
CPUS = 7
"""A bundle for each worker of the two groups, the agent loops, TransferQueue's controller and its storage. Ray starts
so many idle workers beforehand."""
OBJECT_STORE_BYTES = 128 << 20
"""In /dev/shm, of which the relay's pool needs its part."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("relay", "gateway", "model", "directory"):
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


def engine_config(relay: str) -> CheckpointEngineConfig:
    return CheckpointEngineConfig(backend="laminar", engine_kwargs={"laminar": {"relay": relay, "timeout_s": 120.0}})


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names and bytes, in any order."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class TrainingWorker(Worker):
    """A rank of the trainer. Its generator gathers: to take the next tensor is a collective of all ranks."""

    def __init__(self, config: CheckpointEngineConfig, model: str) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=120, backend="cpu:gloo")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )
        self.taken = 0

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffer: dict[torch.Size, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            gathered = buffer.setdefault(parameter.shape, torch.empty_like(parameter))  # filled again and again
            gathered.copy_(parameter.detach())
            dist.broadcast(gathered, src=0)
            self.taken += 1
            yield name, gathered

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]:
        assert mode == "laminar"
        return await self.checkpoint_engine.send_weights(self._weights(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self) -> str:
        """One optimiser step on fixed tokens; the digest of the weights that came of it."""
        ids = torch.arange(64).reshape(2, 32)
        self.optimizer.zero_grad()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        return self.digest()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest_and_taken(self) -> tuple[str, int]:
        return self.digest(), self.taken

    def digest(self) -> str:
        return digest(dict(self.model.named_parameters()))


class Adapter:
    """Where an inference server would load what it is given."""

    def __init__(self) -> None:
        self.loaded: dict[int | None, str] = {}

    async def update_weights(
        self, weights: AsyncIterable[tuple[str, torch.Tensor]], global_steps: int | None, wire_format: str
    ) -> None:
        assert wire_format == "named_tensors"
        self.loaded[global_steps] = digest({name: tensor.clone() async for name, tensor in weights})


class RolloutWorker(CheckpointEngineWorker):
    """verl's worker, with an adapter that says what it has loaded."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config, model_config=None, server_adapter=Adapter())

    def loaded(self) -> dict[int | None, str]:
        return self.server_adapter.loaded


class Replica:
    """What verl's manager needs of a rollout replica; counts the calls."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def called(**_: Any) -> None:
            self.calls.append(name)

        if name not in ("abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"):
            raise AttributeError(name)
        return called


def group(worker: type[Worker], count: int, *args: Any) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    wrapped = RayClassWithInitArgs(ray.remote(num_cpus=0.1)(worker), *args)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=wrapped)


@contextmanager
def local_ray(num_gpus: int = 0) -> Iterator[None]:
    # Ray's sockets lie below its folder, and their paths are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as directory:
        ray.init(
            num_cpus=CPUS,
            num_gpus=num_gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=directory,
        )
        try:
            yield
        finally:
            ray.shutdown()


def taken_whole(weights: AsyncIterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    async def collect() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() async for name, tensor in weights}

    return asyncio.run(collect())
