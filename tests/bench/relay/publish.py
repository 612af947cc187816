"""Publishing and acquiring on one host: what the trainer waits for, and what an engine waits for.

Method. One relay, versions of the tensors of a real model (Qwen2.5-0.5B in bf16, 0.92 GiB), pool and publisher's
mappings warm (every file of the pool was written once before the first round). The stall is the whole of `publish`:
announce, copy, hash, commit. The memcpy copies the same bytes from the same arrays into a warm shared mapping, in huge
pages as a pool's memory is, with as many threads as publish copies with, in pieces so large that glibc takes non-
temporal stores for them, and alternates with it. `publish_cpu_vs_memcpy` is the same in processor time, which others on
the machine disturb less. What was measured before is reported beside it: versions of 1 GiB in 32 equal tensors
(`publish_equal_vs_memcpy`), and a memcpy into small pages (`publish_vs_memcpy_small`). Away: etcd killed (connections
are refused); hung: etcd stopped (connections stay silent). An engine is a process of its own, timed from before its
first call until it has read every byte; a warm read reads the same mapping again.

glibc copies with non-temporal stores, which do not read the target first, from a size on that it takes from what the
processor says of its last-level cache (240 MiB on a virtual machine that claims 320 MiB of it). The memcpy's halves
are larger than that, and a model's tensors are not: publish brings a copy of its own (`paramserver/data/stream.c`).
"""

from __future__ import annotations

import asyncio
import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from paramserver.client import RelayClient, TensorSource
from paramserver.data import publish as copying
from paramserver.memory.mapping import HUGE_BYTES, FileMapping
from paramserver.memory.pool import NUM_BLANKS
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
FRESH_BAR = 2.0
ETCD_ROUNDS = 5


def threads() -> int:
    """How many threads publish copies with on one host."""
    return copying.num_copy_threads()


class Memcpy:
    """A bare copy of the same bytes into warm shared memory, with as many threads; in huge pages, as a pool's is."""

    def __init__(self, source: Array, *, huge: bool = True) -> None:
        size = len(source)
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(size)
            self._map = FileMapping(file.fileno(), size)
            self._map.populate(0, size)
        if huge and (whole := size - size % HUGE_BYTES):
            with contextlib.suppress(OSError):  # where a pool has none either
                self._map.collapse(0, whole)
        self._source, self._target = source, np.frombuffer(self._map.view(), np.uint8)
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
        yield from asyncio.run(_stalls(relay, source))
        yield from _fresh(
            stage, relay, memcpy, "as relays make their pools", "publish_fresh_vs_memcpy", "acquire_to_read"
        )
    yield from asyncio.run(_without_etcd(source))
    with huge_tmpfs(NUM_BLANKS * (NUM_BYTES + HEAD_BYTES) + (64 << 20)) as huge:
        keys = ("publish_fresh_huge_vs_memcpy", "acquire_to_read_huge")
        if huge is None:
            print(f"no tmpfs with huge pages in this kernel: earlier figures stay as they are: {', '.join(keys)}")
            return
        with scene(pools=huge) as stage:
            yield from _fresh(stage, stage.relay("master", NUM_BYTES), memcpy, "on a tmpfs with huge=always", *keys)


def model_tensors(of: Array) -> list[TensorSource]:
    """The bytes as the tensors of Qwen2.5-0.5B, in the order of its layers; read in place."""
    found, at = [], 0
    for name, size in MODEL_BYTES.items():
        part = of[at : at + size]
        found.append(TensorSource(name, "U8", part.shape, lambda part=part: memoryview(part), True))  # type: ignore[misc]
        at += size
    return found


_LAYER = {
    "q.weight": 896 * 896,
    "q.bias": 896,
    "k.weight": 128 * 896,
    "k.bias": 128,
    "v.weight": 128 * 896,
    "v.bias": 128,
    "o.weight": 896 * 896,
    "gate.weight": 4864 * 896,
    "up.weight": 4864 * 896,
    "down.weight": 896 * 4864,
    "input_norm.weight": 896,
    "output_norm.weight": 896,
}
MODEL_BYTES = {
    "embed.weight": 2 * 151936 * 896,
    **{f"layers.{n}.{name}": 2 * count for n in range(24) for name, count in _LAYER.items()},
    "norm.weight": 2 * 896,
}


@dataclass
class Rounds:
    """Seconds of each round, from the call of `publish` on; `cpu` of this process, which publishes and copies."""

    copied_s: list[float] = field(default_factory=list)
    copied_cpu_s: list[float] = field(default_factory=list)
    sealed_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)
    memcpy_cpu_s: list[float] = field(default_factory=list)
    small_memcpy_s: list[float] = field(default_factory=list)

    def over_memcpy(self, took: list[float]) -> list[float]:
        return [one / bare for one, bare in zip(took, self.memcpy_s, strict=True)]

    def between(self, first: list[float], then: list[float]) -> list[float]:
        """Milliseconds."""
        return [1000 * (end - start) for start, end in zip(first, then, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        return [one / bare for one, bare in zip(self.copied_cpu_s, self.memcpy_cpu_s, strict=True)]

    def details(self, num_bytes: int) -> dict[str, object]:
        return {"bytes": num_bytes, **{name: [round(s, 4) for s in took] for name, took in vars(self).items()}}


async def _rounds(client: RelayClient, model: str, sources: list[TensorSource], of: Array) -> Rounds:
    rounds, memcpy, small_memcpy = Rounds(), Memcpy(of), Memcpy(of, huge=False)
    for step in range(WARM_UP + 2 * ROUNDS):
        cpu, started = time.process_time(), time.perf_counter()
        ticket, copied = await timed_publish(client, model, sources, step, run=model)
        copied_cpu = time.process_time() - cpu
        await ticket.wait_sealed(WAIT_S)
        sealed, cpu = time.perf_counter() - started, time.process_time()
        bare = memcpy()
        took = (copied, copied_cpu, sealed, bare, time.process_time() - cpu, small_memcpy())
        if step >= WARM_UP:
            for seconds, one in zip(vars(rounds).values(), took, strict=True):
                seconds.append(one)
    return rounds


async def _stalls(daemon: Daemon, source: Array) -> list[Figure]:
    p99s: list[float] = []
    num_bytes = sum(MODEL_BYTES.values())
    async with RelayClient(daemon.ready["grpc"]) as client:
        real = await _rounds(client, "policy", model_tensors(source), source[:num_bytes])
        for _ in range(ROUNDS):
            took = sorted([await _acquire(client) for _ in range(ACQUIRES)])
            p99s.append(took[int(0.99 * ACQUIRES)] * 1000)
        equal = await _rounds(client, "policy", tensors(source), source)
    return [
        median(
            "publish_vs_memcpy",
            f"stall until copied, a real model's tensors, hashes included, over a memcpy, {threads()} thread(s)",
            real.over_memcpy(real.copied_s),
            bar=1.15,
            details=real.details(num_bytes),
        ),
        median(
            "publish_vs_memcpy_small",
            "as it was measured before: over a memcpy into small pages",
            [one / bare for one, bare in zip(real.copied_s, real.small_memcpy_s, strict=True)],
            better="reported",
        ),
        median(
            "publish_cpu_vs_memcpy",
            "the same in processor time of the publisher",
            real.cpu_ratios,
            better="reported",
        ),
        median(
            "publish_sealed_vs_memcpy",
            "from the call of publish until an engine may acquire it, over a memcpy",
            real.over_memcpy(real.sealed_s),
            better="reported",
        ),
        median(
            "publish_equal_vs_memcpy",
            "as it was measured before: 1 GiB in 32 equal tensors, hashes included, over a memcpy",
            equal.over_memcpy(equal.copied_s),
            bar=1.25,
            details=equal.details(NUM_BYTES),
        ),
        median("seal_ms", "from copied to sealed", equal.between(equal.copied_s, equal.sealed_s), bar=50, unit="ms"),
        median("acquire_ms", f"acquire of 1 GiB on its host, p99 of {ACQUIRES}", p99s, bar=5, unit="ms"),
    ]


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
        bar=FRESH_BAR,
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
