"""Two gloo ranks publish in step: FSDP2's shards arrive whole, and when the master dies nobody hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_publish_stream import read
from tests.support.etcd import start_etcd
from tests.support.processes import Daemon
from tests.support.relays import Relays
from trainer_client import Publisher

pytestmark = pytest.mark.slow

RANK = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trainer_client import Publisher, TorchRanks, gathered, manifest_of
from protos.errors import LaminarError

rank, store, scenes = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(65, 33), torch.nn.Linear(33, 17), torch.nn.Linear(17, 5).bfloat16())
fully_shard(net)

def raise_here(name, error=KeyError("no such expert")):
    if rank == 1 and name.startswith("1."):
        raise error
    return name

def converted(wrapped, *error):
    for name, tensor in wrapped:
        yield raise_here(name, *error), tensor

def whole():
    return ((name, torch.zeros(one.shape, dtype=one.dtype)) for name, one in net.state_dict().items())

FAULTS = {
    "convert": lambda: {"tensors": lambda: converted(gathered(net.state_dict()))},
    "plain": lambda: {"tensors": converted(whole())},
    "names": lambda: {"names": raise_here},
    "interrupt": lambda: {"tensors": lambda: converted(gathered(net.state_dict()), KeyboardInterrupt("by hand"))},
    "earlier": lambda: {},
    "argument": lambda: {"wait": -1} if rank == 1 else {},
}

def play_fault(scene):
    metas = manifest_of(net.state_dict())
    options = {"tensors": lambda: gathered(net.state_dict()), "wait": "sealed", **FAULTS[scene["fault"]]()}
    began = time.monotonic()
    with Publisher(scene["relay"], run="job") as publisher:
        try:
            if scene["fault"] == "earlier" and rank == 1:
                publisher.publish_async({"x": torch.full((4,), torch.nan)}, step=0, allow_change=True)
            publisher.publish_stream(metas, options.pop("tensors"), step=1, ranks=TorchRanks(), **options)
            found = {}
        except BaseException as error:
            found = {"error": type(error).__name__, "message": str(error), "cause": type(error.__cause__).__name__}
        took_s = time.monotonic() - began
        dist.barrier()  # the ranks are in step, and may go on
        found["newest"] = publisher.status().newest_sealed
    return found | {"took_s": took_s}

def play(scene):
    if "fault" in scene:
        return play_fault(scene)
    passes = []

    def tensors():
        passes.append(0)
        for number, item in enumerate(gathered(net.state_dict())):
            if scene["kill"] and rank == 0 and number == 3 and len(passes) == 1:
                os.kill(scene["kill"], signal.SIGKILL)
            passes[-1] += 1
            yield item

    said = {"rank": rank}
    on_old_run = "refuse" if rank else "continue"  # rank 0 decides
    with Publisher(scene["relay"], run="job", on_old_run=on_old_run) as publisher:
        try:
            ticket = publisher.publish_stream(
                manifest_of(net.state_dict()), tensors if scene["factory"] else tensors(), step=1,
                ranks=TorchRanks(), writers=scene["writers"], wait="sealed", **scene["options"],
            )
            said |= {"version": ticket.version, "run": ticket.run, "stage": ticket.stage()}
        except LaminarError as error:
            said |= {"error": type(error).__name__, "message": str(error)}
        dist.barrier()
    return said | {"passes": passes}

print(json.dumps({name: play(scene) for name, scene in scenes.items()}))
dist.destroy_process_group()
"""


FAULTS = ("convert", "plain", "names")
"""Where one rank raises an error that is none of ours."""


@dataclass(frozen=True)
class Scene:
    """One publish of both ranks: the relay that they publish to, another one that is killed meanwhile, and a wish."""

    pools: Path
    relay: Daemon
    victim: Daemon | None
    wish: dict[str, Any]


@dataclass(frozen=True)
class Played:
    """A scene, and what each rank reports of it."""

    scene: Scene
    both: list[dict[str, Any]]


def run_ranks(directory: Path, scenes: dict[str, Scene]) -> dict[str, Played]:
    """One pair of ranks plays all scenes, one after the other: most of its time goes to its start."""
    wishes = {
        name: {
            "relay": scene.relay.ready["grpc"],
            "kill": scene.victim.process.pid if scene.victim else 0,
            "options": {},
            **scene.wish,
        }
        for name, scene in scenes.items()
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(directory / "store"), json.dumps(wishes)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        found = [rank.communicate(timeout=480)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    told = [json.loads(text.splitlines()[-1]) for text in found]
    return {name: Played(scene, [one[name] for one in told]) for name, scene in scenes.items()}


def check(daemon: Daemon, version: int) -> None:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(65, 33), torch.nn.Linear(33, 17), torch.nn.Linear(17, 5).bfloat16())
    found, expected = read(daemon, version), net.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def tier_whose_master_dies(directory: Path, stack: ExitStack, **wish: Any) -> Scene:
    """Two relays on an etcd of their own; the one that is master is killed while the ranks publish to the other."""
    directory.mkdir()
    etcd = start_etcd(directory)
    stack.callback(etcd.stop)
    relays = stack.enter_context(closing(Relays(etcd.ready["etcd"], directory)))
    first, second = relays.start("a"), relays.start("b")
    with Publisher(first.ready["grpc"], "policy", run="before") as publisher:
        publisher.publish({"w": torch.ones(1)}, step=0, wait=2)
        master, other = (first, second) if publisher.status().master == "a" else (second, first)
    return Scene(relays.pools, other, master, {"options": {"allow_change": True}, **wish})


@pytest.fixture(scope="module")
def played(shared_etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    directory = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        relays = stack.enter_context(closing(Relays(shared_etcd, directory)))
        alone = relays.start("a")
        scenes = {
            "wrong": Scene(
                relays.pools, alone, None, {"writers": "first", "factory": False, "options": {"file_bytes_max": -1}}
            ),
            "whole": Scene(relays.pools, alone, None, {"writers": "all", "factory": True}),
            "factory": tier_whose_master_dies(directory / "factory", stack, writers="first", factory=True),
            "iterator": tier_whose_master_dies(directory / "iterator", stack, writers="all", factory=False),
        }
        scenes |= {
            name: Scene(relays.pools, alone, None, {"fault": name})
            for name in (*FAULTS, "interrupt", "earlier", "argument")
        }
        yield run_ranks(directory, scenes)


def test_shards_of_two_ranks_arrive_whole_in_files_of_both(played: dict[str, Played]) -> None:
    whole = played["whole"]
    assert [one.get("version") for one in whole.both] == [1, 1], whole.both
    assert {one["stage"] for one in whole.both} <= {"sealed", "all"}  # its only relay becomes a holder after the seal
    assert [one["passes"] for one in whole.both] == [[6], [6]]
    check(whole.scene.relay, 1)
    assert len(list(whole.scene.pools.glob("*/snapshots/**/*.safetensors"))) == 2


@pytest.mark.parametrize("factory", [True, False], ids=["factory", "iterator"])
def test_when_the_master_dies_all_ranks_begin_again_or_raise_the_same(played: dict[str, Played], factory: bool) -> None:
    found = played["factory" if factory else "iterator"]
    both, master = found.both, found.scene.victim
    assert master is not None
    assert master.process.wait(30) == -signal.SIGKILL
    assert both[0]["passes"] == both[1]["passes"], "in step"
    assert set(both[0]["passes"]) == {6}, "what was begun is drained"
    if factory:
        assert len(both[0]["passes"]) >= 2
        assert both[0]["version"] == both[1]["version"]
        check(found.scene.relay, both[0]["version"])
    else:
        assert len(both[0]["passes"]) == 1
        assert both[0]["error"] == both[1]["error"]
        assert "on_old_run" not in both[0]["message"]
        assert both[0]["message"] == both[1]["message"]


def test_what_one_rank_finds_wrong_every_rank_raises(played: dict[str, Played]) -> None:
    both = played["wrong"].both
    assert both[0]["error"] == both[1]["error"] == "InvalidRequest"
    assert both[0]["message"] == both[1]["message"]
    assert [one["passes"] for one in both] == [[6], [6]]
    of_one = played["argument"].both
    assert [one["error"] for one in of_one] == ["InvalidRequest"] * 2, "an argument of one rank alone, too"
    assert all(one["message"].startswith("wait=-1 (pass") for one in of_one), of_one


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_one_rank_raises_every_rank_raises_and_may_go_on(played: dict[str, Played], fault: str) -> None:
    """The other one is in a collective, or waits for it."""
    first, second = played[fault].both
    assert (first["error"], second["error"]) == ("LaminarError", "LaminarError"), played[fault].both
    assert first["message"] == second["message"] == "rank 1 raised KeyError: 'no such expert'"
    assert (first["cause"], second["cause"]) == ("NoneType", "KeyError")
    assert (first["newest"], second["newest"]) == (1, 1), "the first rank, which wrote all of it, has not committed"


def test_a_rank_that_is_interrupted_or_whose_publish_before_failed_leaves_no_other_behind(
    played: dict[str, Played],
) -> None:
    first, second = played["interrupt"].both
    assert (first["error"], first["message"]) == ("LaminarError", "rank 1 raised KeyboardInterrupt: by hand")
    assert (second["error"], second["message"]) == ("KeyboardInterrupt", "by hand")
    first, second = played["earlier"].both
    assert first["error"] == second["error"] == "InvalidRequest", played["earlier"].both
    assert "'x' holds NaN" in first["message"], first
    assert first["message"] == second["message"]
    assert [one["newest"] for one in (*played["interrupt"].both, first, second)] == [1] * 4
