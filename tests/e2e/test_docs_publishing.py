"""The programs of docs/publishing.md, as they stand but for the relay's address."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from paramserver.client import RelayClient
from tests.e2e.test_publish_stream import read
from tests.support.pages import blocks
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.tiny_model import tiny_model
from trainer_client import Publisher

pytestmark = pytest.mark.slow


async def sealed(daemon: Daemon, model: str, version: int) -> None:
    async with RelayClient(daemon.ready["grpc"]) as relay:

        async def there() -> bool:
            return version in [one.version for one in await relay.versions(model)]

        await until(there, f"version {version} of {model} is sealed")


PAGE = "docs/publishing.md"


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_command_of_the_page_publishes_a_directory(relays: Relays) -> None:
    first, _ = relays.start("a"), relays.start("b")
    (text,) = blocks(PAGE, "sh")
    model = tiny_model()
    here = text.replace("trainer-0:7070", first.ready["grpc"]).replace("./checkpoint", str(model))
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(here)], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert read(first, 1).keys() == load_file(model / "model.safetensors").keys()


class Adapted(torch.nn.Module):
    """As peft wraps a linear layer. Its B is zero: the adapter changes nothing."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        layer = torch.nn.Module()
        layer.base_layer, layer.scaling = base, {"default": 2.0}
        layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        layer.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 3, bias=False)})
        torch.nn.init.zeros_(layer.lora_B["default"].weight)
        self.base_model = torch.nn.Module()
        self.base_model.model = layer


def test_the_programs_of_the_page_publish_what_they_show(relays: Relays, one_rank: None) -> None:
    daemon = relays.start("a")
    model, reader = torch.nn.Linear(4, 3), SimpleNamespace(trainer_version=None)
    for number, text in enumerate(blocks(PAGE, "python")):
        name = f"shown-{number}"
        here = text.replace('"trainer-0:7070"', f'"{daemon.ready["grpc"]}", "{name}"').replace("range(100)", "range(2)")
        names: dict[str, Any] = {"model": model, "train": lambda _: None, "job_id": "job", "reader": reader}
        names["peft_model"] = Adapted(model)
        with Publisher(daemon.ready["grpc"], name) as publisher:
            if "with Publisher(" not in text:  # it continues the program before it
                names |= {"publisher": publisher, "step": 1, "frozen_names": ["bias"]}
            exec(compile(here, PAGE, "exec"), names)
        if "load_state_dict" in text:
            assert reader.trainer_version == 0
            continue
        newest = 2 if "range" in text else 1
        asyncio.run(sealed(daemon, name, newest))
        dtype = torch.bfloat16 if "bfloat16" in text else torch.float32
        found = read(daemon, newest, name)
        assert found.keys() == model.state_dict().keys()
        assert torch.equal(found["weight"], model.weight.detach().to(dtype))
