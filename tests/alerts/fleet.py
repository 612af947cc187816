"""The daemons that the alerts are provoked at: gateways with an engine or two each, four tiers of relays, a Redis.

All are well when `start` returns: what makes them ill is in `provocations`. A daemon has a part of its own, so that one
provocation does not hide another; its name is what the table of results shows.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from paramserver.client import Lease
from paramserver.credentials.fleet import Fleet as Credentials
from tests.alerts.prometheus import Prometheus
from tests.support import processes
from tests.support.etcd import start_etcd
from tests.support.middleman import Middleman
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.redis_servers import start_redis
from tests.support.relays import PATIENT
from tests.support.scripted_engine import ScriptedEngine, in_thread
from tests.support.text_engine import TextEngine
from tests.support.words import tokenizer
from trainer_client import Publisher

MODEL = "policy"
VERSION_BYTES = (6 << 20) - (64 << 10)
POOL_FOR_TWO = "12MiB"
"""Of a relay on which two versions leave no room for a third."""


@dataclass
class Fleet:
    directory: Path
    stack: ExitStack = field(default_factory=ExitStack)
    gateways: dict[str, Daemon] = field(default_factory=dict)
    relays: dict[str, Daemon] = field(default_factory=dict)
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    processes: dict[str, Daemon] = field(default_factory=dict)
    """Engines that can be killed, etcd, and the Redis."""
    mapped: list[mmap.mmap] = field(default_factory=list)
    ports: KeptPorts = field(default_factory=KeptPorts)
    pinned: list[Lease] = field(default_factory=list)
    """Versions at the full relay."""
    ended: threading.Event = field(default_factory=threading.Event)
    credentials: Credentials = field(init=False)
    _http: httpx.Client = field(init=False)
    """One for all calls: to make one takes as much processor time as a hundred calls."""
    _commands: dict[str, list[str]] = field(default_factory=dict)
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))
    _works: list[Future[None]] = field(default_factory=list)

    # -- starting

    def start(self) -> None:
        self._http = self.stack.enter_context(httpx.Client(limits=httpx.Limits(max_keepalive_connections=0)))
        self.stack.callback(self._threads.shutdown)  # once every daemon that they wait for has ended
        self.stack.callback(self.ended.set)
        self.stack.callback(self.ports.close)
        self.pools = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
        self.stack.callback(shutil.rmtree, self.pools)
        self.credentials = Credentials.init(self.directory / "credentials", [], days=365)
        self._start_relays()
        self._start_engines()
        self._start_gateways()

    def _start_relays(self) -> None:
        for tier in ("main", "doubt", "slow", "secured"):
            self._daemon(f"etcd-{tier}", start_etcd(self.directory, f"etcd-{tier}"))
        self.to_etcd = self.stack.enter_context(Middleman(self.etcd("doubt")))
        spill = f"--spill={self.directory / 'spill'}"
        self._relay("master", self.etcd("main"), "--pool-bytes=128MiB", spill)
        self._relay("full", self.etcd("main"), f"--pool-bytes={POOL_FOR_TWO}", "--no-publish-host", "--retain=1")
        self._relay("gone", self.etcd("main"), "--no-publish-host")
        self._relay("doubtful", self.to_etcd.address, "--lease-ttl-s=300")
        self._relay("limited", self.etcd("slow"), "--max-rate=256KiB")
        self._relay("fetching", self.etcd("slow"), "--no-publish-host")
        self._relay("secured", self.etcd("secured"), f"--credentials={self.credentials.directory / 'relay'}")

    def etcd(self, tier: str) -> str:
        return str(self.processes[f"etcd-{tier}"].ready["etcd"])

    def _relay(self, name: str, etcd: str, *flags: str) -> None:
        where = [f"--name={name}", f"--etcd={etcd}", f"--pool-dir={self.pools / name}", "--pool-bytes=64MiB"]
        ports = ["--port=0", f"--metrics-port={self.ports.of(f'relay {name}')}"]
        self._commands[f"relay-{name}"] = ["paramserver", "serve", *where, *ports, *PATIENT, *flags]
        self.start_relay(name)

    def start_relay(self, name: str) -> None:
        """Starts it, or starts it again: Prometheus knows it by its address."""
        self.relays[name] = self._start(f"relay-{name}")

    def _start_engines(self) -> None:
        for engine in (
            ScriptedEngine("well"),
            ScriptedEngine("loads"),
            ScriptedEngine("held"),
            TextEngine("text"),
        ):
            self.engines[engine.name] = engine
            self.stack.enter_context(in_thread(engine))
        for name, *flags in (
            ("cutting", "--cuts=0.5", "--kinds=eof"),
            ("lying", "--cuts=0", "--version-told=7"),
            ("mortal", "--cuts=0"),
            ("last", "--cuts=0", "--pause-s=0.2"),
        ):
            command = ["gateway", "faultkit", "--engines=1", "--port=0", *flags]
            self._daemon(name, processes.start(name, command, self.directory))

    def url(self, engine: str) -> str:
        """Of one in this process, or of one of its own."""
        return self.engines[engine].url if engine in self.engines else str(self.processes[engine].ready["e0"])

    def _start_gateways(self) -> None:
        self.start_redis()
        self._gateway("gone", "well")
        self._gateway("empty", "well")
        self._gateway("cuts", "cutting", "mortal")
        self._gateway("misled", "lying")
        self._gateway("held", "held", "--max-running=1", "--queue-timeout-s=900", "--stall-timeout-s=900")
        self._gateway("losing", "last", "--placement-timeout-s=1")
        self._gateway("loads", "loads", f"--relay={self.relays['master'].ready['grpc']}")
        self._gateway("tasks", "well", f"--data={self.directory / 'tasks'}")
        self._gateway("hoard", "well", f"--data={self.directory / 'hoard'}")
        self._gateway("text", "text", "--relay-text")
        store = [f"--experience-store={self.processes['redis'].ready['url']}", f"--data={self.directory / 'shared'}"]
        self._gateway("shared", "well", *store)

    def start_redis(self) -> None:
        """Starts it, or starts it again on its files."""
        self._daemon("redis", start_redis(self.directory / "redis", self.ports.of("redis")))

    def _gateway(self, name: str, *words: str) -> None:
        engines = [f"--engine={word}=vllm={self.url(word)}" for word in words if not word.startswith("--")]
        options = [word for word in words if word.startswith("--")]
        model = f"--tokenizer={tokenizer(self.directory / 'model')}"
        command = ["gateway", "serve", f"--model={MODEL}", model, f"--port={self.ports.of(f'gateway {name}')}"]
        self._commands[f"gateway-{name}"] = [*command, "--no-probe", "--poll-interval-s=0.3", *engines, *options]
        self.start_gateway(name)

    def start_gateway(self, name: str) -> None:
        """Starts it, or starts it again."""
        self.gateways[name] = self._start(f"gateway-{name}")

    def _start(self, name: str) -> Daemon:
        daemon = processes.start(name, self._commands[name], self.directory)
        self._end(daemon)
        return daemon

    def _daemon(self, name: str, daemon: Daemon) -> None:
        self.processes[name] = daemon
        self._end(daemon)

    def _end(self, daemon: Daemon) -> None:
        """Killed at the end: many are too ill by then to end in order."""
        self.stack.callback(daemon.kill)

    # -- while it runs

    def targets(self) -> dict[str, list[str]]:
        """For Prometheus, by job; one with credentials serves metrics by https alone."""
        gateways = [self.instance(f"gateway {name}") for name in self.gateways]
        relays = {name: self.instance(f"relay {name}") for name in self.relays}
        relays["secured"] = f"https://{relays['secured']}"
        return {"laminar-gateway": gateways, "laminar-relay": list(relays.values())}

    @property
    def reader(self) -> Path:
        """The credentials with which Prometheus reads metrics."""
        return self.credentials.directory / "reader"

    def instance(self, daemon: str) -> str:
        """The address at which Prometheus knows "gateway NAME" or "relay NAME"."""
        kind, _, name = daemon.partition(" ")
        if kind == "gateway":
            return str(self.gateways[name].ready["url"]).removeprefix("http://")
        return str(self.relays[name].ready["metrics"])

    def is_well(self, prometheus: Prometheus) -> bool:
        """All daemons are scraped, all engines serve, and the relays of the first tier have the first version."""
        up = prometheus.query("up == 1")
        serving = prometheus.query("laminar_gateway_engine_serving == 1")
        versions = prometheus.query("laminar_relay_newest_version == 1")
        loaded = prometheus.query('laminar_gateway_engine_version{engine="loads"} == 1')
        engines = len(self.gateways) + 1  # one of them has two
        return (len(up), len(serving), len(versions), len(loaded)) == (
            len(self.gateways) + len(self.relays),
            engines,
            3,
            1,
        )

    def publish(self, step: int) -> None:
        """A version of the first tier, sealed."""
        weights = {"w": np.full(VERSION_BYTES // 4, float(step), np.float32)}
        with Publisher(self.relays["master"].ready["grpc"], MODEL, timeout_s=60.0) as publisher:
            publisher.publish(weights, step=step, wait="sealed")

    def post(self, gateway: str, path: str, timeout_s: float = 60.0, **body: Any) -> httpx.Response:
        return self.call("POST", gateway, path, timeout_s, json=body)

    def call(self, method: str, gateway: str, path: str, timeout_s: float = 60.0, **options: Any) -> httpx.Response:
        url = f"{self.gateways[gateway].ready['url']}{path}"
        return self._http.request(method, url, timeout=timeout_s, **options)

    def complete(self, gateway: str, session: str, max_tokens: int = 4, timeout_s: float = 60.0) -> httpx.Response:
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": max_tokens, "session_id": session}
        return self.post(gateway, "/v1/completions", timeout_s, **body)

    def in_background(self, work: Callable[[], Any]) -> None:
        """Runs it once in a thread; `check` raises what it raised, but for the end of a connection: daemons are killed
        while it waits for them."""

        def run() -> None:
            with contextlib.suppress(httpx.TransportError):
                work()

        self._works.append(self._threads.submit(run))

    def keep_on(self, work: Callable[[int], Any], pause_s: float) -> None:
        """Calls it again and again in a thread, with 0, 1, ..., until the end."""

        def run() -> None:
            number = 0
            while not self.ended.wait(pause_s):
                work(number)
                number += 1

        self.in_background(run)

    def check(self) -> None:
        """Raises what a thread raised."""
        for work in self._works:
            if work.done():
                work.result()


@contextmanager
def started(directory: Path) -> Iterator[Fleet]:
    """Every process ends with it, also when a start fails."""
    fleet = Fleet(directory)
    with fleet.stack:
        fleet.start()
        yield fleet
