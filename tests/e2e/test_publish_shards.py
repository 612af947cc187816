"""Ranks publish the shards of one model without gathering it, and when one fails all raise the same."""

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
from safetensors.torch import save_file

from tests.e2e.test_publish_stream import read, same
from tests.e2e.test_push import snapshot
from tests.support.processes import Daemon
from tests.support.relays import Relays
from trainer_client import Publisher

pytestmark = pytest.mark.slow

RANK = """
import json, os, signal, sys, threading
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trainer_client import Publisher, TorchRanks, gathered, manifest_of
from trainer_client.streaming import sharded
from protos.errors import LaminarError

rank, wish = int(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{wish['store']}", rank=rank, world_size=2)
mesh, ranks = init_device_mesh("cpu", (2,)), TorchRanks()

def net():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(65, 33), torch.nn.Linear(33, 1), torch.nn.Linear(1, 2050).bfloat16()]
    layers += [torch.nn.Linear(2050, 701, bias=False)]
    model = fully_shard(torch.nn.Sequential(*layers))
    weights = dict(model.state_dict())
    weights["columns"] = distribute_tensor(torch.rand(6, 501), mesh, [Shard(1)])
    weights["plain"], weights["scalar"] = torch.arange(701), torch.tensor(2.5)
    weights["tied"] = weights["0.weight"]
    weights["row"] = weights["row.tied"] = distribute_tensor(torch.rand(1, 7), mesh, [Shard(0)])  # rank 1: none
    return weights

def anon_kb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

class Peak:
    def __enter__(self):
        self.start, self.peak, self.over = anon_kb(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(0.002):
            self.peak = max(self.peak, anon_kb() - self.start)
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

def report(publish):
    try:
        ticket = publish()
        return {"version": ticket.version, "run": ticket.run}
    except LaminarError as error:
        return {"error": type(error).__name__, "message": str(error)}

weights, found = net(), {}
on_old_run = "refuse" if rank else "continue"  # rank 0 decides
with Publisher(wish["relay"], run=f"job-{rank}", wait="sealed", on_old_run=on_old_run) as publisher:
    def shards(tensors=weights, **more):
        more = {"allow_change": True, **more}
        return report(lambda: publisher.publish_shards(tensors, step=1, ranks=ranks, **more))
    def whole(tensors=weights, **more):
        made = lambda: gathered(tensors)
        more = {"allow_change": True, **more}
        return report(lambda: publisher.publish_stream(manifest_of(tensors), made, step=1, ranks=ranks, **more))
    for case in wish["cases"]:
        if case == "same":
            extra = {"base": wish["base"], "files": wish["base"], "file_bytes_max": 2_000_000}
            found[case] = [whole(**extra), shards(**extra)]
        elif case == "tcp":
            with Publisher(wish["relay"], "by-tcp", wait="sealed", force_tcp=True) as other:
                found[case] = report(lambda: other.publish_shards(weights, step=1, ranks=ranks))
        elif case == "once":
            found[case] = [shards(once=True), whole(once=True)]
        elif case == "cast":
            found[case] = shards(dtype=torch.bfloat16, names=[("^0[.]", "first.")])
        elif case == "large":
            torch.manual_seed(5)
            part = torch.rand(3001 - rank, 4096)
            large = {"w": DTensor.from_local(part, mesh, [Shard(0)], shape=(6001, 4096), stride=(4096, 1))}
            with Peak() as peak:
                found[case] = shards(large)
            found[case]["peak"] = peak.peak
        elif case == "nan":
            bad = dict(weights)
            bad["0.weight"] = weights["0.weight"].clone()
            if rank == 1:
                bad["0.weight"].to_local().fill_(float("nan"))
            found[case] = shards(bad)
        elif case == "argument":
            found[case] = shards(wait="seald" if rank else "sealed")
        elif case == "differ":
            found[case] = shards({**weights, **({"more": torch.ones(1)} if rank else {})})
        elif case == "killed":
            write = sharded.Rounds.one
            def one(self, *args, **more):
                if rank == 0 and wish["kill"]:
                    os.kill(wish["kill"], signal.SIGKILL)
                    wish["kill"] = 0
                write(self, *args, **more)
            sharded.Rounds.one = one
            found[case] = shards()
        dist.barrier()
print(json.dumps(found))
dist.destroy_process_group()
"""


def run_ranks(directory: Path, daemon: Daemon, **wish: Any) -> list[dict[str, Any]]:
    """What both ranks report of each case."""
    wish = {"relay": daemon.ready["grpc"], "store": str(directory / "store"), "kill": 0, **wish}
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


def net() -> dict[str, torch.Tensor]:
    """The weights of both ranks, whole."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(65, 33), torch.nn.Linear(33, 1), torch.nn.Linear(1, 2050).bfloat16()]
    found = torch.nn.Sequential(*layers, torch.nn.Linear(2050, 701, bias=False)).state_dict()
    found["columns"] = torch.rand(6, 501)
    found["row"] = torch.rand(1, 7)
    return {**found, "plain": torch.arange(701), "scalar": torch.tensor(2.5)}


def base(directory: Path) -> str:
    directory.mkdir()
    save_file({"frozen": torch.full((333, 77), 0.5), "plain": torch.zeros(1)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    return str(directory)


def test_shards_make_the_same_bytes_as_gathered_tensors_and_errors_reach_every_rank(
    relays: Relays, tmp_path: Path
) -> None:
    daemon = relays.start("a", "--chunk-bytes", "100000", "--retain", "5", pool_bytes="512MiB")
    with Publisher(daemon.ready["grpc"], run="old") as publisher:
        publisher.publish({"w": torch.ones(1)}, step=0, wait="sealed")
    cases = ["nan", "argument", "differ", "same", "tcp", "once", "cast", "large"]
    both = run_ranks(tmp_path, daemon, cases=cases, base=base(tmp_path / "base"))
    peaks = [one["large"].pop("peak") for one in both]
    assert both[0] == both[1]
    found = both[0]

    assert found["nan"]["error"] == "InvalidRequest"
    assert "tensor '0.weight' holds NaN" in found["nan"]["message"]
    assert found["argument"]["message"].startswith("wait='seald'")
    assert "different tensors" in found["differ"]["message"]

    whole, shards = (snapshot(daemon, one["version"], tmp_path) for one in found["same"])
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in shards.iterdir())
    assert len(names) > 3
    for name in names:
        assert (whole / name).read_bytes() == (shards / name).read_bytes(), name
    expected = net()
    same(read(daemon, found["same"][1]["version"]), {**expected, "frozen": torch.full((333, 77), 0.5)})
    same(read(daemon, found["tcp"]["version"], "by-tcp"), expected)

    assert found["once"] == [found["same"][1]] * 2, "its step is sealed"

    cast = {name: one.bfloat16() if one.is_floating_point() else one for name, one in expected.items()}
    same(read(daemon, found["cast"]["version"]), {name.replace("0.", "first."): one for name, one in cast.items()})

    large = read(daemon, found["large"]["version"])["w"]
    for rows in (large[:3001], large[3001:]):
        torch.manual_seed(5)
        assert torch.equal(rows, torch.rand(len(rows), 4096))
    assert max(peaks) < 0.4 * (large.nbytes >> 10), "no rank has the tensor whole"


def test_when_the_master_dies_in_the_middle_the_ranks_begin_again_together(relays: Relays, tmp_path: Path) -> None:
    first, second = relays.start("a"), relays.start("b")
    with Publisher(first.ready["grpc"], "policy", run="before") as publisher:
        publisher.publish({"w": torch.ones(1)}, step=0, wait=2)
        master, other = (first, second) if publisher.status().master == "a" else (second, first)
    both = run_ranks(tmp_path, other, cases=["killed"], kill=master.process.pid)
    assert master.process.wait(30) == -signal.SIGKILL
    assert both[0] == both[1]
    same(read(other, both[0]["killed"]["version"]), net())
