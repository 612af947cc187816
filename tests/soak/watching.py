"""The eyes of a soak: they read journals, snapshots of relays, and processes, and hand all of it to the judge."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict, deque

from paramserver.client import Lease, RelayClient
from protos.access.credentials import Credentials
from protos.errors import LaminarError, NotFound
from tests.soak import disks
from tests.soak.answers import Answers
from tests.soak.fleet import NUM_RELAYS, Fleet
from tests.soak.growth import Growth, Sample, sample
from tests.soak.journal import Follower
from tests.soak.judge import Judge, Span
from tests.soak.liveness import Liveness
from tests.soak.strangers import Strangers
from tests.soak.work import MODEL

JUDGE_S, READ_S, SAMPLE_S = 1.0, 4.0, 5.0
TRACEBACK = b"Traceback (most recent call last)"
"""What a daemon logs of an error that it has no answer for."""
AWAY = (LaminarError, OSError)
"""What reading a snapshot may meet while relays are killed: it is read again a moment later."""


class Watchers:
    def __init__(self, fleet: Fleet, judge: Judge, began_s: float) -> None:
        self._fleet, self._judge, self._began_s = fleet, judge, began_s
        self._answers = Answers()
        self._journals = {
            name: Follower(fleet.journal(name))
            for name, process in fleet.processes.items()
            if process.program.kind in ("runner", "trainer")
        }
        daemons = [p.name for p in fleet.processes.values() if p.program.kind in ("relay", "gateway", "engine")]
        self._logs = {name: Follower(fleet.directory / f"{name}.log") for name in daemons}
        self._spans: deque[Span] = deque()
        self._waiting: defaultdict[int, list[Span]] = defaultdict(list)  # by a version whose step is not known yet
        self.growth = Growth()
        self._liveness = Liveness()

    @property
    def unjudged(self) -> int:
        """Spans of tokens that are not compared yet."""
        return len(self._spans) + sum(map(len, self._waiting.values()))

    # ---- journals

    async def follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(JUDGE_S)

    async def look(self) -> None:
        """Takes what came into the journals, and compares every answer with its version's weights."""
        for name, follower in self._journals.items():
            for entry in follower.entries():
                if name == "trainer":
                    self._judge.trainer(entry)
                else:
                    self._spans += self._judge.runner(entry)
        for name, log in self._logs.items():
            for line in log.lines():
                if line.startswith(TRACEBACK):
                    self._judge.find("unexpected error", f"a traceback in the log of {name}")
        for version in [version for version in self._waiting if version in self._judge.steps]:
            self._spans += self._waiting.pop(version)
        while self._spans:
            span = self._spans.popleft()
            step = self._judge.steps.get(span.version)
            if step is None:
                self._waiting[span.version].append(span)
                continue
            stray = await asyncio.to_thread(self._answers.stray, span, step)
            if stray is not None:
                where = f"{span.session}: token {len(span.before) + stray} is not what version {span.version} says"
                self._judge.find("wrong tokens", f"{where} (step {step}, {len(span.found)} tokens)")

    def close(self) -> None:
        for version, spans in sorted(self._waiting.items()):
            sessions = sorted({span.session for span in spans})
            self._judge.find("wrong versions", f"version {version} was never published: {sessions}", len(spans))
        if not self._judge.counts["snapshots read"]:
            self._judge.find("stood still", "no snapshot of a relay was ever read")

    # ---- weights

    async def read_relay(self, number: int) -> None:
        """Reads the newest version of a relay as an engine does, bit by bit, for ever."""
        name, last = f"relay-{number}", 0
        address = self._fleet.relay_address_direct(number)
        credentials = Credentials(self._fleet.access.of("engine-host"))
        async with RelayClient(address, timeout_s=5.0, credentials=credentials) as relay:
            while True:
                try:
                    lease = await relay.acquire(MODEL, None, holder="soak")
                except AWAY:
                    await asyncio.sleep(READ_S / 4)
                    continue
                if lease.version != last:
                    await self._read(name, relay, lease)
                    last = lease.version
                else:
                    await self._release(relay, lease)
                await asyncio.sleep(READ_S)

    async def _read(self, name: str, relay: RelayClient, lease: Lease) -> None:
        try:
            differing = await asyncio.to_thread(
                self._answers.differing, self._fleet.path_on(name, lease.path), lease.step
            )
        except AWAY:  # the relay was killed, and its next life tidied up
            return
        if not await self._release(relay, lease):
            return  # the pin did not hold to the end: what was read does not count
        self._judge.shown(name, lease.version, lease.step)
        self._judge.counts["snapshots read"] += 1
        if differing:
            self._judge.find("wrong weights", f"{name} has version {lease.version} with other bits in {differing[:5]}")

    async def _release(self, relay: RelayClient, lease: Lease) -> bool:
        try:
            await relay.release(lease)
        except (*AWAY, NotFound):
            return False
        return True

    def readers(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.read_relay(number)) for number in range(1, NUM_RELAYS + 1)]

    def strangers(self) -> asyncio.Task[None]:
        return asyncio.create_task(Strangers(self._fleet.access, self._fleet.places, self._judge).run())

    # ---- processes

    def _look_for_stalls(self, now_s: float) -> None:
        """While there is load."""
        if self._fleet.until.exists():
            return
        counts = {name: self._judge.counts[name] for name in ("versions", "turns", "snapshots read")}
        serving = {name: process.serves for name, process in self._fleet.processes.items()}
        for what in self._liveness.look(counts, serving, now_s):
            self._judge.find("stood still", what)

    async def measure(self) -> None:
        for number in itertools.count(1):
            now_s = time.monotonic() - self._began_s
            for name, process in self._fleet.processes.items():
                if process.pid is not None:
                    found = sample(process.pid, now_s, process.life_s)
                    self.growth.add(process.program.kind, name, process.pid, found)
            for name, directory in self._fleet.shm.items() if self._fleet.can_mount else ():
                used_mb = disks.used_bytes(directory) / (1 << 20)
                self.growth.add("pool", name, 0, Sample(now_s, now_s, 0.0, 0.0, used_mb))
            self.growth.forget_before(now_s / 2)
            self._look_for_stalls(now_s)
            await asyncio.sleep(max(0.0, self._began_s + number * SAMPLE_S - time.monotonic()))
