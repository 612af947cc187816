"""Publishing and acquiring on one host: what the trainer waits for, and what an engine waits for.

Method. One relay, versions of 1 GiB in 32 tensors, pool and publisher's mappings warm (every file of the pool was
written once before the first round). The stall is the whole of `publish`: announce, copy, hash, commit. The memcpy
copies the same bytes from the same arrays into a warm shared mapping, with as many threads as publish copies with,
and alternates with it. Away: etcd killed (connections are refused); hung: etcd stopped (connections stay silent).
An engine is a process of its own, timed from before its first call until it has read every byte; a warm read reads
the same mapping again.

glibc copies with non-temporal stores, which do not read the target first, from a size on that it takes from what the
processor says of its last-level cache (240 MiB on a virtual machine that claims 320 MiB of it). The memcpy's halves
are larger than that; publish's blocks, hashed and then copied out of the cache, are not. So the same rounds run once
more in a process in which GLIBC_TUNABLES puts that size at a block's.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import psutil

from paramserver.client import RelayClient
from paramserver.data import publish as copying
from paramserver.pool import NUM_BLANKS
from protos.errors import VersionLost
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.relay.contenders import ROOT
from tests.bench.relay.scene import (
    HEAD_BYTES,
    WAIT_S,
    Array,
    Scene,
    content,
    huge_tmpfs,
    scene,
    tensors,
    timed_publish,
)
from tests.support.processes import Daemon, start

NUM_BYTES = 1 << 30
WARM_UP = NUM_BLANKS + 1
ACQUIRES = 200
FRESH_ROUNDS = 5
ETCD_ROUNDS = 5
NON_TEMPORAL = f"glibc.cpu.x86_non_temporal_threshold={copying.BLOCK_BYTES // 2}"


def threads() -> int:
    """How many threads publish copies with on one host."""
    return copying.num_copy_threads()


class Memcpy:
    """A bare copy of the same bytes into warm shared memory, with as many threads."""

    def __init__(self, source: Array) -> None:
        self._file = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115  (lives as long as the mapping)
        self._file.truncate(len(source))
        self._map = mmap.mmap(self._file.fileno(), len(source))
        self._source, self._target = source, np.frombuffer(self._map, np.uint8)
        self._pool = ThreadPoolExecutor(threads())
        self()

    def __call__(self) -> float:
        """Seconds."""
        count = threads()
        cuts = [len(self._source) * n // count for n in range(count + 1)]
        started = time.perf_counter()
        list(self._pool.map(self._copy, cuts[:-1], cuts[1:]))
        return time.perf_counter() - started

    def _copy(self, start: int, end: int) -> None:
        np.copyto(self._target[start:end], self._source[start:end])


def run() -> Iterator[Figure]:
    source = content(NUM_BYTES)
    memcpy = Memcpy(source)
    with scene() as stage:
        relay = stage.relay("master", NUM_BYTES)
        yield from asyncio.run(_stalls(relay, source, memcpy))
        yield _tuned(relay)
        yield from _fresh(stage, relay, memcpy, "without huge pages", "publish_fresh_vs_memcpy", "acquire_to_read")
    yield from asyncio.run(_without_etcd(source))
    with huge_tmpfs(NUM_BLANKS * (NUM_BYTES + HEAD_BYTES) + (64 << 20)) as huge:
        keys = ("publish_fresh_huge_vs_memcpy", "acquire_to_read_huge")
        if huge is None:
            print(f"no tmpfs with huge pages in this kernel: earlier figures stay as they are: {', '.join(keys)}")
            return
        with scene(pools=huge) as stage:
            yield from _fresh(stage, stage.relay("master", NUM_BYTES), memcpy, "with huge pages", *keys)


@dataclass
class Rounds:
    """Seconds of each round."""

    publish_s: list[float] = field(default_factory=list)
    seal_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [stall / bare for stall, bare in zip(self.publish_s, self.memcpy_s, strict=True)]

    @property
    def details(self) -> dict[str, object]:
        return {"bytes": NUM_BYTES, "publish_s": self.publish_s, "memcpy_s": self.memcpy_s}


async def _rounds(client: RelayClient, source: Array, memcpy: Callable[[], float]) -> Rounds:
    sources, rounds = tensors(source), Rounds()
    for step in range(WARM_UP + 2 * ROUNDS):
        ticket, stall = await timed_publish(client, "policy", sources, step)
        copied = time.perf_counter()
        await ticket.wait_sealed(WAIT_S)
        sealed = time.perf_counter() - copied
        bare = memcpy()
        if step >= WARM_UP:
            rounds.publish_s.append(round(stall, 4))
            rounds.seal_s.append(sealed)
            rounds.memcpy_s.append(round(bare, 4))
    return rounds


async def _stalls(daemon: Daemon, source: Array, memcpy: Callable[[], float]) -> list[Figure]:
    p99s: list[float] = []
    async with RelayClient(daemon.ready["grpc"]) as client:
        rounds = await _rounds(client, source, memcpy)
        for _ in range(ROUNDS):
            took = sorted([await _acquire(client) for _ in range(ACQUIRES)])
            p99s.append(took[int(0.99 * ACQUIRES)] * 1000)
    return [
        median(
            "publish_vs_memcpy",
            f"stall until copied, hashes included, over a memcpy of the same bytes with {threads()} thread(s)",
            rounds.ratios,
            bar=1.25,
            details=rounds.details,
        ),
        median("seal_ms", "from copied to sealed", [1000 * seconds for seconds in rounds.seal_s], bar=50, unit="ms"),
        median("acquire_ms", f"acquire of 1 GiB on its host, p99 of {ACQUIRES}", p99s, bar=5, unit="ms"),
    ]


def _tuned(daemon: Daemon) -> Figure:
    """The same stall in a process that may use non-temporal stores for blocks."""
    command = [sys.executable, "-m", "tests.bench.relay.publish", daemon.ready["grpc"]]
    told = subprocess.run(
        command,
        env={**os.environ, "GLIBC_TUNABLES": NON_TEMPORAL},
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    rounds = Rounds(**json.loads(told.stdout))
    what = f"the same in a process with GLIBC_TUNABLES={NON_TEMPORAL}, both sides"
    return median("publish_tuned_vs_memcpy", what, rounds.ratios, better="reported", details=rounds.details)


async def _rounds_elsewhere(address: str) -> None:
    source = content(NUM_BYTES)
    async with RelayClient(address) as client:
        print(json.dumps(asdict(await _rounds(client, source, Memcpy(source)))))


async def _acquire(client: RelayClient) -> float:
    started = time.perf_counter()
    lease = await client.acquire("policy", holder="engine")
    took = time.perf_counter() - started
    await client.release(lease)
    return took


# ---- processes that have just started


def _fresh(
    stage: Scene, relay: Daemon, memcpy: Callable[[], float], how: str, publish_key: str, read_key: str
) -> Iterator[Figure]:
    address = relay.ready["grpc"]
    stalls, over = [], []
    for _ in range(FRESH_ROUNDS):
        stall = _in_process(_publisher, address)["stall_s"]
        stalls.append(stall)
        over.append(stall / memcpy())
    yield median(
        publish_key,
        f"first publish of a process that has just started, over a memcpy, {how}",
        over,
        better="reported",
        details={"publish_s": [round(s, 4) for s in stalls]},
    )
    reads = [_in_process(_reader, address) for _ in range(FRESH_ROUNDS + 1)][1:]
    huge = "_huge" in read_key
    yield median(
        read_key,
        f"a fresh process acquires, maps and reads 1 GiB, over a warm read, {how}",
        [read["fresh_s"] / read["warm_s"] for read in reads],
        bar=1.5 if huge else None,
        better="less" if huge else "reported",
        details={"reads": reads},
    )


def _in_process(work: Callable[[str], dict[str, float]], address: str) -> dict[str, float]:
    code = f"import json; from tests.bench.relay import publish as p; print(json.dumps(p.{work.__name__}({address!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _publisher(address: str) -> dict[str, float]:
    sources = tensors(content(NUM_BYTES))

    async def work() -> float:
        async with RelayClient(address) as client:
            await client.status()  # connected; the mapping is not yet made
            ticket, stall = await timed_publish(client, "policy", sources, 0, run=f"fresh-{os.getpid()}")
            await ticket.wait_sealed(WAIT_S)
            return stall

    return {"stall_s": asyncio.run(work())}


def _reader(address: str) -> dict[str, float]:
    async def work() -> dict[str, float]:
        started = time.perf_counter()
        async with RelayClient(address) as client:
            lease = await client.acquire("policy", holder="engine")
            [path] = lease.path.iterdir()
            words = _words(path)
            total = int(words.sum())
            fresh = time.perf_counter() - started
            warm = []
            for _ in range(3):
                started = time.perf_counter()
                assert int(words.sum()) == total
                warm.append(time.perf_counter() - started)
            await client.release(lease)
            return {"fresh_s": fresh, "warm_s": statistics.median(warm)}

    return asyncio.run(work())


def _words(path: Path) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    size = path.stat().st_size // 8
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, np.uint64, size)


# ---- without the registry


async def _without_etcd(source: Array) -> list[Figure]:
    sources = tensors(source)
    found: dict[str, list[float]] = {"normal": [], "away": [], "hung": []}
    lost = dict.fromkeys(found, 0)
    with scene() as stage:
        data = stage.directory / "etcd-data"
        port = int(stage.etcd.ready["etcd"].rpartition(":")[2])
        stage.etcd.stop()
        registry = _start_etcd(stage, data, port)
        relay = stage.relay("master", NUM_BYTES, "--lease-ttl-s", "5")  # the default
        async with RelayClient(relay.ready["grpc"]) as client:
            for step in range(WARM_UP):
                ticket, _ = await timed_publish(client, "policy", sources, step)
                await ticket.wait_sealed(WAIT_S)
            for turn in range(ETCD_ROUNDS):
                for n, state in enumerate(found):
                    _leave(registry, state)
                    ticket, stall = await timed_publish(client, "policy", sources, WARM_UP + 3 * turn + n)
                    found[state].append(stall)
                    registry = _come_back(stage, registry, state, data, port)
                    try:
                        await ticket.wait_sealed(WAIT_S)
                    except VersionLost:  # the stall outlasted the relay's lease: the version had to be given up
                        lost[state] += 1
        stage.etcd = registry
        registry.kill()
    rounds = {state: [round(s, 4) for s in stalls] for state, stalls in found.items()}
    return [
        median(
            f"etcd_{state}_publish_stall",
            f"stall of publish while etcd is {state}, over normal",
            [stall / normal for stall, normal in zip(found[state], found["normal"], strict=True)],
            bar=1.1,
            details={"stalls_s": rounds, "versions_lost": lost[state]},
        )
        for state in ("away", "hung")
    ]


def _start_etcd(stage: Scene, data: Path, port: int) -> Daemon:
    command = ["paramserver", "etcd", "--log-level", "warning", "--port", str(port), "--data-dir", str(data)]
    return start("etcd-again", command, stage.directory)


def _leave(registry: Daemon, state: str) -> None:
    if state == "away":
        below = _below(registry)  # tied to it: they end when it does
        registry.kill()
        psutil.wait_procs(below, timeout=5)
    elif state == "hung":
        for process in _below(registry):
            process.send_signal(signal.SIGSTOP)


def _come_back(stage: Scene, registry: Daemon, state: str, data: Path, port: int) -> Daemon:
    if state == "away":
        return _start_etcd(stage, data, port)
    for process in _below(registry):
        process.send_signal(signal.SIGCONT)
    return registry


def _below(registry: Daemon) -> list[psutil.Process]:
    return psutil.Process(registry.process.pid).children(recursive=True)


if __name__ == "__main__":
    asyncio.run(_rounds_elsewhere(sys.argv[1]))
