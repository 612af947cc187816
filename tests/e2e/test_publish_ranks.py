"""Two gloo ranks publish in step: FSDP2's shards arrive whole, and when the master dies nobody hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_publish_stream import read
from tests.support.processes import Daemon
from tests.support.relays import Relays
from trainer_client import Publisher

pytestmark = pytest.mark.slow

RANK = """
import json, os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trainer_client import Publisher, TorchRanks, gathered, manifest_of
from protos.errors import LaminarError

rank, wish = int(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{wish['store']}", rank=rank, world_size=2)
torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(65, 33), torch.nn.Linear(33, 17), torch.nn.Linear(17, 5).bfloat16())
fully_shard(net)
passes = []

def tensors():
    passes.append(0)
    for number, item in enumerate(gathered(net.state_dict())):
        if wish["kill"] and rank == 0 and number == 3 and len(passes) == 1:
            os.kill(wish["kill"], signal.SIGKILL)
        passes[-1] += 1
        yield item

said = {"rank": rank}
with Publisher(wish["relay"], run="job") as publisher:
    try:
        ticket = publisher.publish_stream(
            manifest_of(net.state_dict()), tensors if wish["factory"] else tensors(), step=1,
            ranks=TorchRanks(), writers=wish["writers"], wait="sealed", **wish.get("options", {}),
        )
        said |= {"version": ticket.version, "run": ticket.run, "stage": ticket.stage()}
    except LaminarError as error:
        said |= {"error": type(error).__name__, "message": str(error)}
    dist.barrier()
said["passes"] = passes
print(json.dumps(said))
dist.destroy_process_group()
"""


def run_ranks(directory: Path, daemon: Daemon, **wish: Any) -> list[dict[str, Any]]:
    """What both ranks report."""
    wish = {"relay": daemon.ready["grpc"], "store": str(directory / "store"), "kill": 0, "factory": True, **wish}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), json.dumps(wish)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        found = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in found]


def check(daemon: Daemon, version: int) -> None:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(65, 33), torch.nn.Linear(33, 17), torch.nn.Linear(17, 5).bfloat16())
    found, expected = read(daemon, version), net.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_shards_of_two_ranks_arrive_whole_in_files_of_both(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a")
    both = run_ranks(tmp_path, daemon, writers="all")
    assert [one.get("version") for one in both] == [1, 1], both
    assert [one["stage"] for one in both] == ["all", "all"]
    assert [one["passes"] for one in both] == [[6], [6]]
    check(daemon, 1)
    assert len(list(relays.pools.glob("*/snapshots/**/*.safetensors"))) == 2


@pytest.mark.parametrize(("factory", "writers"), [(True, "first"), (False, "all")], ids=["factory", "iterator"])
def test_when_the_master_dies_all_ranks_begin_again_or_raise_the_same(
    relays: Relays, tmp_path: Path, factory: bool, writers: str
) -> None:
    first, second = relays.start("a"), relays.start("b")
    with Publisher(first.ready["grpc"], "policy", run="before") as publisher:
        publisher.publish({"w": torch.ones(1)}, step=0, wait=2)
        master, other = (first, second) if publisher.status().master == "a" else (second, first)
    both = run_ranks(
        tmp_path,
        other,
        kill=master.process.pid,
        factory=factory,
        writers=writers,
        options={"allow_change": True},
    )
    assert master.process.wait(30) == -signal.SIGKILL
    assert both[0]["passes"] == both[1]["passes"], "in step"
    assert set(both[0]["passes"]) == {6}, "what was begun is drained"
    if factory:
        assert len(both[0]["passes"]) >= 2
        assert both[0]["version"] == both[1]["version"]
        check(other, both[0]["version"])
    else:
        assert len(both[0]["passes"]) == 1
        assert both[0]["error"] == both[1]["error"]
        assert both[0]["message"] == both[1]["message"]


def test_what_one_rank_finds_wrong_every_rank_raises(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a")
    both = run_ranks(tmp_path, daemon, writers="first", factory=False, options={"file_bytes_max": -1})
    assert both[0]["error"] == both[1]["error"] == "InvalidRequest"
    assert both[0]["message"] == both[1]["message"]
    assert [one["passes"] for one in both] == [[6], [6]]
