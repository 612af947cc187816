"""A platform of verl's for machines without a GPU, so that its FSDP engine trains on a CPU: a stand-in for CUDA.

`VERL_USE_EXTERNAL_MODULES=tests.verl.cpu` loads it into each process of verl, `VERL_ENGINE_DEVICE=cuda` chooses the
engine, and Ray is started with a GPU that is not there.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class DeviceModule(types.ModuleType):
    """What verl calls of `torch.cuda`: of `torch.cpu` what it has, else a function that gives 0."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


MODULE = DeviceModule("cpu_as_device")
MODULE.is_available = lambda: True
MODULE.mem_get_info = lambda *_: (1 << 30, 1 << 30)
MODULE.get_device_name = lambda *_: "CPU"
MODULE.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30, name="CPU")


class PlatformCPU(PlatformCUDA):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: MODULE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs ahead."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """There is none."""

    def communication_backend_name(self) -> str:
        return "gloo"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


_init_process_group = dist.init_process_group


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """verl names a backend for the CPU and one for its device, which are the same here."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)


dist.init_process_group = init_process_group
set_platform(PlatformCPU())
