"""The fleet of a soak: which programs run, at which addresses, over which links, on which disks.

Invariants:
- a port is chosen once, outside of those that the kernel gives to connections, and kept over restarts;
- each relay is on a host of its own, with its engines beside it, and the trainer beside the first: the same paths with
  other files (where the soak may mount), the same ports at a loopback address of its own (127.0.2.N);
- relays reach each other and etcd, and gateways the engines behind relays, through links that can be cut; each relay
  advertises 127.0.1.N, where its links listen;
- gateways have engines of their own and share one Redis; an engine is called at the port in front of it of the relay
  that it loads from, and by nobody past it; every HTTP port of a gateway asks for a key, and every port of a relay for
  credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.membership.local import find_etcd, free_port
from tests.soak import clocks, disks
from tests.soak.access import Access
from tests.soak.links import Link
from tests.soak.places import EngineDoor, Places
from tests.soak.processes import Program, Supervised
from tests.soak.work import MODEL
from tests.support.hosts import Mounts, own_mounts
from tests.support.redis_servers import BINARY as REDIS
from tests.support.redis_servers import DURABLE
from tests.support.tiny_model import tiny_model

NUM_RELAYS, NUM_GATEWAYS, ENGINES_EACH, NUM_RUNNERS = 3, 2, 2, 2
RELAYS, GATEWAYS = range(1, NUM_RELAYS + 1), range(1, NUM_GATEWAYS + 1)
ENGINES = range(1, NUM_GATEWAYS * ENGINES_EACH + 1)
MIB = 1 << 20
POOL_BYTES, SHM_BYTES = 32 * MIB, 48 * MIB
"""A version has 1.6 MB, so a pool holds 20; it is allocated at a relay's start."""
DISK_BYTES = 256 * MIB
CHUNK_BYTES = 64 << 10
"""A version is 26 chunks, so that a fault meets one in its middle."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much load: what two cores carry beside other work."""

    seed: int
    agents: int = 3
    pause_s: float = 2.0
    publish_s: float = 5.0


@dataclass
class Fleet:
    directory: Path
    options: Options
    can_mount: bool
    links: dict[str, Link] = field(default_factory=dict)
    processes: dict[str, Supervised] = field(default_factory=dict)
    disks: dict[str, Path] = field(default_factory=dict)
    shm: dict[str, Path] = field(default_factory=dict)
    clocks: dict[str, Path] = field(default_factory=dict)
    hosts: dict[str, Mounts] = field(default_factory=dict)
    """By relay, where the soak may mount."""
    findings: list[tuple[str, str]] = field(default_factory=list)
    _ports: dict[str, int] = field(default_factory=dict)
    access: Access = field(init=False)
    _mounted: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.access = Access(self.directory)

    # ---- what faults may aim at

    @property
    def parts(self) -> dict[str, Sequence[str]]:
        """Names by kind of part, as `chaos` has them."""
        kinds: dict[str, list[str]] = {}
        for process in self.processes.values():
            kinds.setdefault(process.program.kind, []).append(process.name)
        full = {"disk": list(self.disks), "shm": list(self.shm)} if self.can_mount else {}
        return {**kinds, "link": list(self.links), **full, "clock": list(self.clocks)}

    # ---- addresses

    def _port(self, name: str) -> int:
        if name not in self._ports:
            while (port := free_port()) in self._ports.values():
                continue
            self._ports[name] = port
        return self._ports[name]

    def _link(self, name: str, target: str, *, listen: tuple[str, int] | None = None, at: str = "127.0.0.1") -> str:
        """The address through which `target` (a port's name, on `at`) is reached; the link of that name is made."""
        link = Link(name, listen or ("127.0.0.1", self._port(f"link {name}")), (at, self._port(target)))
        self.links[name] = link
        return f"{link.listen[0]}:{link.listen[1]}"

    def relay_address(self, number: int) -> str:
        """Through its link."""
        host, port = self.links[f"relay-{number} grpc"].listen
        return f"{host}:{port}"

    def relay_address_direct(self, number: int) -> str:
        """For the judge and for strangers, whose calls no fault may cut."""
        return f"{_own(number)}:{self._port('relay grpc')}"

    def path_on(self, relay: str, path: Path) -> Path:
        """A path of a relay's host, as the judge reaches it."""
        return self.hosts[relay].path(path) if relay in self.hosts else path

    @property
    def places(self) -> Places:
        """Where strangers try."""
        return Places(
            relays={f"relay-{n}": self.relay_address_direct(n) for n in RELAYS},
            data={f"relay-{n}": f"{_own(n)}:{self._port('relay data')}" for n in RELAYS},
            engines={f"engine-{n}": self._door(n) for n in ENGINES},
            gateways={f"gateway-{n}": f"http://127.0.0.1:{self._port(f'gateway-{n}')}" for n in GATEWAYS},
        )

    def _door(self, engine: int) -> EngineDoor:
        relay = _relay_of(engine)
        return EngineDoor(self._port(f"engine-{engine} tls"), _host(relay), _own(relay))

    def gateway_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.links[f'gateway-{n}'].listen[1]}" for n in GATEWAYS]

    @property
    def until(self) -> Path:
        """Runners begin no further session once this file is there."""
        return self.directory / "no-further-session"

    def journal(self, name: str) -> Path:
        return self.directory / f"{name}.journal"

    # ---- life

    async def start(self) -> None:
        """Stores first, then relays, engines, gateways, and whoever works with them."""
        self.directory.mkdir(parents=True, exist_ok=True)
        relays = {f"relay-{number}": (_host(number), _own(number)) for number in RELAYS}
        gateways = [f"gateway-{number}" for number in GATEWAYS]
        await self.access.make(relays, gateways)
        self._lay_out()
        for link in self.links.values():
            await link.start()
        for kinds in (("etcd", "redis"), ("relay", "engine"), ("gateway",), ("trainer", "runner")):
            starting = [one for one in self.processes.values() if one.program.kind in kinds]
            for one in starting:
                one.start()
            await asyncio.gather(*(one.ready() for one in starting))
            if kinds[0] == "etcd":
                await asyncio.gather(*(_listens(self._port(name)) for name in ("etcd", "redis")))

    async def close(self) -> None:
        """Who works first, then gateways, engines, relays, stores."""
        for kinds in (("runner", "trainer"), ("gateway",), ("engine", "relay"), ("etcd", "redis")):
            await asyncio.gather(*(one.close() for one in self.processes.values() if one.program.kind in kinds))
        for link in self.links.values():
            await link.close()
        for directory in self.disks.values() if self.can_mount else ():
            disks.unmount(directory)
        self._mounted.close()

    # ---- the plan

    def _lay_out(self) -> None:
        self._etcd()
        self._redis()
        for number in RELAYS:
            self._relay(number)
        for number in GATEWAYS:
            self._gateway(number)
        for number in range(1, NUM_RUNNERS + 1):
            self._runner(number)
        self._trainer()

    def _add(
        self, name: str, kind: str, *argv: str, beside: str = "", ready: bool = True, ends: bool = False, **env: str
    ) -> None:
        """`beside`: the relay on whose host it runs."""
        on = self.hosts[beside].prefix if beside in self.hosts else ()
        if argv[0] == sys.executable and not clocks.missing():
            self.clocks[name] = self.directory / f"{name}.clock"
            env |= clocks.environment(self.directory, self.clocks[name])
        program = Program(name, kind, (*on, *argv), ready, ends, env)
        self.processes[name] = Supervised(program, self.directory, lambda who, what: self.findings.append((who, what)))

    def _disk(self, of: dict[str, Path], name: str, num_bytes: int) -> Path:
        of[name] = directory = self.directory / "disks" / name
        if self.can_mount:
            disks.mount(directory, num_bytes)
        else:
            directory.mkdir(parents=True)
        return directory

    def _etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{self._port(name)}" for name in ("etcd", "etcd peer"))
        self._add(
            "etcd",
            "etcd",
            str(find_etcd()),
            f"--data-dir={self.directory / 'etcd'}",
            "--name=soak",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=soak={peer}",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=5m",  # else its history grows for longer than a short soak lasts
            "--log-level=error",
            ready=False,
        )

    def _redis(self) -> None:
        assert REDIS is not None, "there is no redis-server"
        data = self._disk(self.disks, "redis", DISK_BYTES)
        lines = {"port": self._port("redis"), "bind": "127.0.0.1", "dir": data, "save": '""', **DURABLE}
        path = self.directory / "redis.conf"
        path.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        self._add("redis", "redis", REDIS, str(path), ready=False)

    def _relay(self, number: int) -> None:
        name = f"relay-{number}"
        own = _host(number)
        for of in ("grpc", "data"):
            port = f"relay {of}"
            self._link(f"{name} {of}", port, listen=(own, self._port(port)), at=_own(number))
        memory = self._memory(name)
        engines = [f"engine-{engine}" for engine in ENGINES if _relay_of(engine) == number]
        self._add(
            name,
            "relay",
            *(sys.executable, "-m", "paramserver", "serve", f"--name={name}"),
            *(f"--host={_own(number)}", f"--advertise={own}"),
            f"--etcd={self._link(f'{name} to etcd', 'etcd')}",
            *(f"--port={self._port('relay grpc')}", f"--data-port={self._port('relay data')}"),
            *(f"--pool-dir={memory / 'pool'}", f"--pool-bytes={POOL_BYTES}", f"--chunk-bytes={CHUNK_BYTES}"),
            f"--credentials={self.access.of(name)}",
            *(f"--engine=vllm=http://127.0.0.1:{self._port(one)}@{self._port(f'{one} tls')}" for one in engines),
            "--retain=3",
            beside=name,
        )

    def _memory(self, relay: str) -> Path:
        """Where a relay has its pool: on each host at the same path."""
        if not self.can_mount:
            return self._disk(self.shm, relay, SHM_BYTES)
        directory = self.directory / "disks" / "shm"
        directory.mkdir(parents=True, exist_ok=True)
        mounts = self._mounted.enter_context(own_mounts(directory, how=f"size={SHM_BYTES},mode=700"))
        self.hosts[relay], self.shm[relay] = mounts, mounts.path(directory)
        return directory

    def _engine(self, number: int) -> None:
        self._add(
            f"engine-{number}",
            "engine",
            *(sys.executable, "-m", "gateway", "engine", f"--model={tiny_model()}", "--dtype=float32"),
            *(f"--served-model-name={MODEL}", "--weight-version=0", "--max-model-len=2048", "--kv-cache-tokens=8192"),
            f"--port={self._port(f'engine-{number}')}",
            beside=f"relay-{_relay_of(number)}",
        )

    def _gateway(self, number: int) -> None:
        name = f"gateway-{number}"
        engines = []
        for at in range(ENGINES_EACH):
            engine = (number - 1) * ENGINES_EACH + at + 1
            self._engine(engine)
            relay, port = _relay_of(engine), f"engine-{engine} tls"
            listen = (_host(relay), self._port(port))
            address = self._link(f"{name} to engine-{engine}", port, listen=listen, at=_own(relay))
            engines.append(f"--engine=engine-{engine}=vllm=https://{address}@{self.relay_address(relay)}")
        self._link(name, name)
        redis = self._link(f"{name} to redis", "redis")
        self._add(
            name,
            "gateway",
            *(sys.executable, "-m", "gateway", "serve", f"--model={MODEL}", f"--tokenizer={tiny_model()}"),
            *(f"--port={self._port(name)}", f"--data={self._disk(self.disks, name, DISK_BYTES)}", *engines),
            *(f"--experience-store=redis://{redis}/0", f"--api-keys={self.access.key_file}"),
            "--staleness-max=1000000",  # what is dropped as too stale would look like a loss
            "--stall-timeout-s=20",
            LAMINAR_CREDENTIALS=str(self.access.of(name)),
        )

    def _runner(self, number: int) -> None:
        name = f"runner-{number}"
        self._add(
            name,
            "runner",
            *(sys.executable, "-m", "tests.soak.runner", *(f"--gateway={url}" for url in self.gateway_urls())),
            *(f"--journal={self.journal(name)}", f"--until={self.until}", f"--pause-s={self.options.pause_s}"),
            *(f"--seed={self.options.seed}", f"--number={number}", f"--agents={self.options.agents}"),
            ready=False,
            ends=True,
            LAMINAR_API_KEY=self.access.keys["runner"],
        )

    def _trainer(self) -> None:
        self._add(
            "trainer",
            "trainer",
            *(sys.executable, "-m", "tests.soak.trainer", f"--relay={self.relay_address(1)}"),
            *(f"--gateway={url}" for url in self.gateway_urls()),
            *(f"--journal={self.journal('trainer')}", f"--publish-s={self.options.publish_s}"),
            beside="relay-1",
            ready=False,
            LAMINAR_API_KEY=self.access.keys["trainer"],
            LAMINAR_CREDENTIALS=str(self.access.of("trainer")),
        )


def _relay_of(engine: int) -> int:
    """The number of the relay that an engine loads from, and whose port is in front of it."""
    return (engine - 1) % NUM_RELAYS + 1


def _host(relay: int) -> str:
    """The address that a relay advertises, which its certificate is for."""
    return f"127.0.1.{relay}"


def _own(relay: int) -> str:
    """The address at which a relay listens."""
    return f"127.0.2.{relay}"


async def _listens(port: int, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            await asyncio.sleep(0.05)
