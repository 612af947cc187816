"""A whole relay tier under virtual time, in one thread, with faults by seed: first safety, then healed, and liveness.

What runs is the tier's own code: relays with their core, lease, publishing and service, on real pools; trainers with
the SDK's publisher and tickets. Replaced are time, sockets and threads (`virtual`, `hops`), and etcd (`registry`).
What must hold at every moment is in `World._registry_said`, `World.asks`, `World.check` and in the actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from paramserver.client import publisher
from paramserver.client.ticket import Ticket
from paramserver.core import view as keys
from paramserver.core.chain import is_late
from paramserver.core.records import Announced, Ended, Epoch, Master, Sealed, digest
from paramserver.data import fetch as data_fetch
from paramserver.data.frames import Greeting
from paramserver.data.transport import Source
from paramserver.membership.registry import Changed, Event
from protos.errors import LaminarError
from protos.laminar.v1 import relay_pb2 as pb
from tests.sim.actors import VERSION_BYTES, SimReader, SimRelay, SimTrainer, call, write
from tests.sim.hops import Network, SimFetch
from tests.sim.keeper import SimKeeper
from tests.sim.registry import RegistryServer
from tests.sim.virtual import Clock, Process

FAULTS_S = 25.0
HEALED_S = 90.0
"""Bound of liveness: leases run out, lost versions are noted (10 s), publishers wait for a master (30 s), then one
version goes down the chain."""
CHECK_S = 0.5
KEEPER_EVERY = 5
"""Of so many worlds one has a gateway that pins versions for the fleet."""


class Broken(AssertionError):
    """Something that must never be."""


class World:
    """Everything there is, and what must be true of it."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.clock = Clock()
        self.net = Network(self.clock, self.rng)
        self.registry = RegistryServer(self.clock, self.rng, self._registry_said)
        self.sealed: dict[tuple[str, int], Sealed] = {}
        self.epochs: dict[tuple[str, int], Epoch] = {}
        self.ended: dict[tuple[str, int], Ended] = {}
        self._sealed_before: set[tuple[str, int]] = set()  # in a registry that was replaced, and not in the present one
        self._plans: dict[tuple[str, Epoch, int], tuple[str, ...]] = {}
        self._lost_tickets: list[Ticket] = []
        self._shown: dict[tuple[str, str], int] = {}
        self._tainted: set[tuple[str, str, int]] = set()
        self._dropped: set[tuple[str, str, int]] = set()
        self.num_lives = 0
        self.healing = False
        self.num_faults = 0
        self._replacing, self._old_store = False, ""
        self.broken: BaseException | None = None
        self.models = ["policy", "critic"][: self.rng.choice((1, 1, 2))]
        self.replaceable = self.rng.random() < 0.15
        self.relays: dict[str, SimRelay] = {}
        self._absent: set[str] = set()
        pool = VERSION_BYTES * len(self.models) * self.rng.choice((5, 6, 8))
        self._members = {
            name: (
                {"zone": self.rng.choice(("", "z")), "publish_host": name in "ab"},
                pool,
            )
            for name in "abcde"[: self.rng.randint(2, 5)]
        }
        for name in self._members:
            self.start_relay(name)
        self.operator = Process(self.clock, self.rng, "operator")
        self.trainers = {model: SimTrainer(self, model, self._life()) for model in self.models}
        self.readers = [
            SimReader(self, name, model) for name in self._members for model in self.models if self.rng.random() < 0.7
        ]

        # Not in every world, so that stories that failed before there were any stay what they were.
        self.keepers = [SimKeeper(self, model) for model in self.models] if seed % KEEPER_EVERY == 4 else []

    def _life(self) -> int:
        self.num_lives += 1
        return self.num_lives

    # ---- what actors ask

    def listening(self, address: str) -> SimRelay | None:
        found = self.relays.get(address.partition("#")[0])
        return found if found is not None and found.address == address and not found.process.dead else None

    def start_relay(self, name: str) -> None:
        self._absent.discard(name)
        for model in self.models:
            self._shown.pop((name, model), None)
        member, pool = self._members[name]
        self.relays[name] = SimRelay(self, name, self._life(), member, pool)

    def is_tainted(self, host: str, model: str, version: int) -> bool:
        """Whether that host's memory was made to lie."""
        return (host, model, version) in self._tainted

    def was_dropped(self, host: str, model: str, version: int) -> bool:
        return self.is_tainted(host, model, version) or (model, version) in self.ended

    # ---- what must hold

    def _registry_said(self, event: Event, by: str) -> None:
        if not isinstance(event, Changed) or "/versions/" not in event.entry.key:
            return
        _, _, _, model, _, number, what = event.entry.key.split("/")
        name = model, int(number)
        if what == "announced":
            self._saw_announced(name, msgspec.json.decode(event.entry.value, type=Announced))
        elif what == "sealed":
            self._saw_sealed(name, msgspec.json.decode(event.entry.value, type=Sealed), by)
        else:
            ended = msgspec.json.decode(event.entry.value, type=Ended)
            self.demand(ended.why == "lost" or name not in self.sealed, f"{name} was sealed, then called aborted")
            self.ended[name] = ended

    def _saw_announced(self, name: tuple[str, int], record: Announced) -> None:
        known = self.sealed.get(name)
        self.demand(known is None or self.epochs[name] == record.manifest.epoch, f"{name} is sealed, and given again")
        self.epochs[name] = record.manifest.epoch
        plan = record.plan
        known = self._plans.setdefault((name[0], plan.epoch, plan.number), plan.order)
        self.demand(known == plan.order, f"plan {plan.number} of {plan.epoch} is {known}, and {plan.order}")

    def _saw_sealed(self, name: tuple[str, int], record: Sealed, by: str) -> None:
        known = self.sealed.get(name)
        self._sealed_before.discard(name)
        if known is not None:  # brought along into another registry
            self.demand(known.root_digest == record.root_digest, f"{name} names two sealed versions")
            return
        held = self.registry.store.keys.get(keys.master_key(record.model))
        self.demand(held is not None, f"{by} sealed {name}, and nobody is master")
        master = msgspec.json.decode(held.value, type=Master)
        self.demand(master.name == by, f"{by} sealed {name}, and {master.name} is master")
        self.demand(
            self.epochs[name].revision == held.created, f"{name} was begun in another epoch than it was sealed in"
        )
        self.demand(name not in self.ended, f"{name} had ended, then it was sealed")
        self.sealed[name] = record

    def told_sealed(self, ticket: Ticket) -> None:
        record = self.sealed.get((ticket.model, ticket.version))
        same = record is not None and (record.run, record.step) == (ticket.run, ticket.step)
        self.demand(same, f"{ticket} was told that it is sealed: {record}")

    def told_lost(self, ticket: Ticket) -> None:
        self._lost_tickets.append(ticket)

    def asks(self, greeting: Greeting, source: Source) -> None:
        """No cycle can form: who is not complete is asked only by those behind it, and by late joiners.

        A request to the address of an earlier life reaches nobody, whatever the next life of that relay holds.
        """
        relay, asked = self.relays[greeting.name].parts, self.listening(source.address)
        if relay is None or asked is None or asked.parts is None:
            return
        snapshot = asked.parts.store.get(greeting.model, greeting.version)
        if snapshot is None or snapshot.complete or snapshot.manifest.epoch != greeting.epoch:
            return
        state = relay.models.of(greeting.model).get(greeting.version)
        plan = state.announced.plan if state is not None and state.announced is not None else None
        if plan is None or plan.epoch != greeting.epoch or is_late(greeting.name, plan):
            return
        before = plan.order[: plan.order.index(greeting.name)]
        self.demand(source.name in before, f"{greeting.name} asks {source.name}, which is behind it in {plan.order}")

    def check(self) -> None:
        for process in self.clock.processes:
            if process.crash is not None:
                raise process.crash
        for host in self.relays.values():
            if host.life.done() and not host.life.cancelled() and not host.process.dead and host.refused is None:
                raise host.life.exception() or Broken(f"{host.name} ended by itself")
        for actor in [*self.trainers.values(), *self.readers, *self.keepers]:
            if actor.life.done() and not actor.life.cancelled():
                raise actor.life.exception() or Broken(f"{actor.process.name} ended by itself")
        for name, host in self.relays.items():
            if host.parts is not None and not host.process.dead:
                self._check_memory(host)
                for model, versions in host.parts.models.items():
                    self._check_shown(name, model, {record.version: record for record in versions.shown()}, host)

    def _check_shown(self, host: str, model: str, shown: dict[int, Sealed], at: SimRelay) -> None:
        for version, record in shown.items():
            truth = self.sealed.get((model, version))
            self.demand(truth is not None, f"{host} shows {model} version {version}, which is not sealed")
            self.demand(truth.root_digest == record.root_digest, f"{host} shows another {model} version {version}")
            snapshot = at.parts.store.get(model, version)
            self.demand(snapshot is not None, f"{host} shows {model} version {version} and does not have it")
            self._check_bytes(host, model, version, snapshot)
        for pin in at.parts.pins.all():
            gone = pin.model == model and pin.version not in shown and pin.expires_at > self.clock.now
            self.demand(
                not gone or self.was_dropped(host, model, pin.version),
                f"{host} dropped {pin.version}, pinned by {pin.holder}",
            )
        newest, before = max(shown, default=0), self._shown.get((host, model), 0)
        self.demand(
            newest >= before or self.was_dropped(host, model, before), f"{host} went back from {before} to {newest}"
        )
        self._shown[host, model] = newest

    def _check_bytes(self, host: str, model: str, version: int, snapshot: Any) -> None:
        if self.is_tainted(host, model, version):
            return
        for index in range(snapshot.chunks.num_chunks):
            good = digest(snapshot.place(index)) == snapshot.digest_of(index)
            self.demand(good, f"{host} shows {model} version {version} with other bytes in chunk {index}")

    def _check_memory(self, host: SimRelay) -> None:
        on_disk = 0
        for folder in ("free", "filling", "snapshots"):
            for root, _, files in os.walk(host.pool_dir / folder):
                on_disk += sum(os.stat(f"{root}/{file}").st_size for file in files)
        self.demand(on_disk <= host.pool_bytes, f"{host.name} holds {on_disk} bytes in a pool of {host.pool_bytes}")
        pool = host.parts.store.pool.statistics()
        used = pool.used_bytes + pool.quarantined_bytes
        self.demand(used <= pool.pool_bytes, f"{host.name} uses {used} bytes of {pool.pool_bytes}")

    def demand(self, holds: bool, what: str) -> None:
        """Keeps what was broken even when a task swallows the exception."""
        if not holds:
            self.broken = self.broken or Broken(f"at {self.clock.now:.3f} s: {what}")
            raise self.broken

    # ---- faults

    def misfortune(self) -> None:
        """One fault now, another a while later."""
        if self.healing:
            return
        self.num_faults += 1
        kinds = (
            self._kill,
            self._stop,
            self._cut,
            self._isolate_from_registry,
            self._outage,
            self._kill_trainer,
            self._taint,
        )
        more = (self._slow, self._compact, self._expire, self._replace, self._drain)
        weights = (4, 4, 4, 3, 2, 3, 2, 2, 1, 2, 1 if self.replaceable else 0, 1)
        self.rng.choices((*kinds, *more), weights)[0]()
        self.clock.after(self.rng.expovariate(0.7), self.misfortune)

    def _any(self) -> SimRelay:
        return self.relays[self.rng.choice(sorted(self.relays))]

    def _kill(self, host: SimRelay | None = None) -> None:
        host = host or self._any()
        if host.name not in self._absent and not self._replacing:
            self._absent.add(host.name)
            host.kill()
            self.clock.after(self.rng.expovariate(0.5), lambda: self.start_relay(host.name))

    def _drain(self) -> None:
        """As before an upgrade: drained, then ended and started anew, whether or not it was needed still."""
        host = self._any()
        self.operator.create_task(self._drain_one(host.address))
        self.clock.after(self.rng.uniform(0.5, 5.0), lambda: self.listening(host.address) and self._kill(host))

    async def _drain_one(self, address: str) -> None:
        with contextlib.suppress(LaminarError):
            await call(self, self.operator, address, "Drain", pb.DrainRequest(), 5.0)

    def _stop(self) -> None:
        process = self._any().process
        if not process.dead and not process.stopped:
            process.stop_running()
            self.clock.after(self.rng.expovariate(0.4), lambda: process.dead or process.go_on())

    def _cut(self) -> None:
        names = [*self.relays, *(trainer.process.name for trainer in self.trainers.values())]
        host = self._any().name
        before = set(self.net.cut)
        way = self.rng.choice(((True, True), (True, False), (False, True)))
        some = [other for other in names if other != host and self.rng.random() < 0.7]
        self.net.isolate(host, some, inward=way[0], outward=way[1])
        new = self.net.cut - before
        self.clock.after(self.rng.expovariate(0.4), lambda: self.net.cut.difference_update(new))

    def _isolate_from_registry(self) -> None:
        name = self._any().name
        self.registry.unreachable_for.add(name)
        self.clock.after(self.rng.expovariate(0.3), lambda: self.registry.reach(name))

    def _outage(self) -> None:
        if self.registry.mode == "up":
            self.registry.fail(self.rng.choice(("down", "hung")))
            self.clock.after(self.rng.expovariate(0.4), self.registry.come_back)

    def _kill_trainer(self) -> None:
        model = self.rng.choice(self.models)
        if not self.trainers[model].process.dead:
            self.trainers[model].process.kill()
            self.clock.after(self.rng.expovariate(1.0), lambda: self._start_trainer(model))

    def _start_trainer(self, model: str) -> None:
        self.trainers[model] = SimTrainer(self, model, self._life())

    def _taint(self) -> None:
        """Memory that does not keep what was verified."""
        host = self._any()
        snapshots = host.parts.store.snapshots() if host.parts is not None and not host.process.dead else []
        if snapshots:
            snapshot = self.rng.choice(snapshots)
            index = self.rng.randrange(snapshot.chunks.num_chunks)
            if snapshot.digest_of(index) is not None:
                self._tainted.add((host.name, snapshot.manifest.model, snapshot.manifest.version))
                snapshot.place(index)[0] ^= 1

    def _slow(self) -> None:
        name = self._any().name
        self.net.slow.add(name)
        self.clock.after(self.rng.expovariate(0.1), lambda: self.net.slow.discard(name))

    def _compact(self) -> None:
        self.registry.compact()

    def _expire(self) -> None:
        leases = sorted(self.registry.store.leases)
        if leases:
            self.registry.store.end_lease(self.rng.choice(leases))
            self.registry.spread("")

    def _replace(self) -> None:
        """An empty registry in the old one's place; an operator has every relay adopt it after a while."""
        serving = all(host.parts is not None for host in self.relays.values())
        if self.registry.mode == "up" and not self._absent and serving and not self._replacing:
            self._replacing, self._old_store = True, self.registry.store.keys[keys.STORE].value.decode()
            self.registry.replace()
            self._sealed_before = set(self.sealed)
            self.clock.after(self.rng.uniform(0.5, 3.0), lambda: self.operator.create_task(self._adopt()))

    async def _adopt(self) -> None:
        """As the runbook says: every relay adopts before any is started anew."""
        for host in self.relays.values():
            while host.parts.lease.view.store_id == self._old_store:
                with contextlib.suppress(LaminarError):
                    await call(self, self.operator, host.address, "Adopt", pb.AdoptRequest(), 20.0)
                await asyncio.sleep(0.3)
        self._replacing = False

    # ---- the run

    def run(self, faults_s: float) -> None:
        self._until(3.0)  # a tier that has begun
        self.registry.faulty = self.net.faulty = True
        self.clock.after(0.0, self.misfortune)
        self._until(self.clock.now + faults_s)
        self.heal()

    def _until(self, when: float) -> None:
        while self.clock.now < when:
            self.clock.run(min(when, self.clock.now + CHECK_S))
            if self.broken is not None:
                raise self.broken
            self.check()
            self._restart_refused()

    def _restart_refused(self) -> None:
        """What could not start (its name in use, no registry) is started again, as by systemd; so is what drained."""
        for name, host in self.relays.items():
            drained = self.healing and host.parts is not None and host.parts.lease.member.draining
            if name not in self._absent and (host.refused is not None or (drained and not self._replacing)):
                self._absent.add(name)
                host.kill()
                self.clock.after(1.0, lambda name=name: self.start_relay(name))

    def heal(self) -> None:
        """No more faults: within `HEALED_S` every relay shows the newest version, one that was published since."""
        self.healing = True
        self.registry.faulty = self.net.faulty = False
        self.net.cut.clear()
        self.net.slow.clear()
        for name in list(self.registry.unreachable_for):
            self.registry.reach(name)
        if self.registry.mode != "up":
            self.registry.come_back()
        for process in self.clock.processes:
            if process.stopped:
                process.go_on()
        began = {model: self._newest(model) for model in self.models}
        deadline = self.clock.now + HEALED_S
        while not (
            all(self._healed(model, began[model]) for model in self.models)
            and all(keeper.satisfied() for keeper in self.keepers)
        ):
            if self.clock.now > deadline:
                kept = {keeper.model: keeper.version for keeper in self.keepers if not keeper.satisfied()}
                raise Broken(f"not healed: {[self._told(model) for model in self.models]}; copies missing of {kept}")
            self._until(self.clock.now + CHECK_S)
        self._check_lost()

    def _newest(self, model: str) -> int:
        return max((v for m, v in self.sealed if m == model and (m, v) not in self.ended), default=0)

    def _healed(self, model: str, began: int) -> bool:
        newest = {max(self.shown_at(host, model), default=0) for host in self.relays.values()}
        return len(newest) == 1 and newest.pop() > began + 1

    def shown_at(self, host: SimRelay, model: str) -> list[int]:
        if host.parts is None or host.process.dead:
            return []
        return [record.version for record in host.parts.models.of(model).shown()]

    def _told(self, model: str) -> str:
        shown = {name: self.shown_at(host, model) for name, host in self.relays.items()}
        return f"{model}: newest sealed {self._newest(model)}, shown {shown}"

    def _check_lost(self) -> None:
        for ticket in self._lost_tickets:
            name = ticket.model, ticket.version
            record = self.sealed.get(name)
            same = record is not None and (record.run, record.step) == (ticket.run, ticket.step)
            # A seal whose reply never came is gone with its registry, if no relay had seen it there.
            gone = name in self._sealed_before and not any(
                name[1] in self.shown_at(host, name[0]) for host in self.relays.values()
            )
            alive = same and name not in self.ended and not gone
            self.demand(not alive, f"{ticket} was told that it is lost, and it is sealed")

    def close(self) -> None:
        for process in list(self.clock.processes):
            process.stopped = False
            process.kill()
        for host in self.relays.values():
            if host.store is not None and host.name not in self._absent:
                abandon_quietly(host)


def abandon_quietly(host: SimRelay) -> None:
    from tests.sim.actors import abandon

    with contextlib.suppress(OSError):
        abandon(host.store.pool)


class _Failures(logging.Handler):
    """Work in the background that failed: the daemons log it and go on, a simulation must not."""

    def __init__(self, world_of: dict[str, Any]) -> None:
        super().__init__(logging.ERROR)
        self._world_of = world_of

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self._world_of["failed"](record.exc_info[1])


@contextlib.contextmanager
def virtual(world_of: dict[str, Any]) -> Iterator[None]:
    """Puts virtual time, seeded secrets and simulated bytes in the place of the real ones."""
    clock = SimpleNamespace(monotonic=lambda: world_of["now"](), time=lambda: 1e9 + world_of["now"]())
    seeded = SimpleNamespace(
        token_hex=lambda num: world_of["rng"].randbytes(num).hex(), compare_digest=secrets.compare_digest
    )
    undo: list[tuple[Any, str, Any]] = []

    def put(where: Any, name: str, value: Any) -> None:
        undo.append((where, name, getattr(where, name)))
        setattr(where, name, value)

    for name, module in list(sys.modules.items()):
        if name.startswith("paramserver."):
            if getattr(module, "time", None) is time:
                put(module, "time", clock)
            if getattr(module, "secrets", None) is secrets:
                put(module, "secrets", seeded)
    put(data_fetch, "Fetch", SimFetch)
    put(publisher, "_write", write)
    failures = _Failures(world_of)
    logging.getLogger("paramserver").addHandler(failures)
    try:
        yield
    finally:
        logging.getLogger("paramserver").removeHandler(failures)
        for where, name, value in reversed(undo):
            setattr(where, name, value)


def live(seed: int, faults_s: float = FAULTS_S) -> World:
    """One world from its birth to its end; raises what was broken."""
    directory = Path(tempfile.mkdtemp(prefix="laminar-sim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    hooks: dict[str, Any] = {"now": lambda: 0.0, "rng": random.Random(seed)}
    try:
        with virtual(hooks):
            world = World.__new__(World)
            hooks["failed"] = lambda error: setattr(world, "broken", world.broken or error)
            hooks["now"] = lambda: world.clock.now if hasattr(world, "clock") else 0.0
            world.__init__(seed, directory)
            try:
                world.run(faults_s)
            finally:
                world.close()
        return world
    finally:
        shutil.rmtree(directory, ignore_errors=True)
