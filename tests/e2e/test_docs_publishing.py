"""The programs of docs/publishing.md, as they stand but for the relay's address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.e2e.test_docs import blocks
from tests.e2e.test_publish_stream import read
from tests.support.relays import Relays

pytestmark = pytest.mark.slow

PAGE = "docs/publishing.md"


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_programs_of_the_page_publish_what_they_show(relays: Relays, one_rank: None) -> None:
    daemon = relays.start("a")
    model = torch.nn.Linear(4, 3)
    for number, text in enumerate(blocks(PAGE, "python")):
        name = f"shown-{number}"
        here = text.replace('"trainer-0:7070"', f'"{daemon.ready["grpc"]}", "{name}"').replace("range(100)", "range(2)")
        names: dict[str, Any] = {"model": model, "train": lambda _: None, "job_id": "job"}
        exec(compile(here, PAGE, "exec"), names)
        newest = 2 if "range" in text else 1
        dtype = torch.bfloat16 if "bfloat16" in text else torch.float32
        found = read(daemon, newest, name)
        assert found.keys() == model.state_dict().keys()
        assert torch.equal(found["weight"], model.weight.detach().to(dtype))
