"""Relays with credentials that others reach through a person in the middle, who has taken their address over.

A relay listens on 127.0.0.1, and advertises another address of loopback, where an `InBetween` stands: nothing that the
registry says is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from paramserver.client import Lease, RelayClient, Ticket, publish
from paramserver.core.records import ChunkMap, digest
from paramserver.core.transfer import Want
from paramserver.data.frames import Greeting
from paramserver.data.secured import DataAccess
from paramserver.data.tcp import TcpLink
from paramserver.data.transport import Source
from protos.access.credentials import Credentials
from protos.access.fleet import Identity
from tests.support.fleet_credentials import authority_of, write_holder
from tests.support.in_between import InBetween
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import Arrays, source_of

LISTENS = "127.0.0.1"
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
CHUNK_BYTES = 256 << 10
SILENCE_S = 2.0
"""Of the test's own requester, as of the relays that `Relays` starts."""


@dataclass(frozen=True, eq=False)
class Intercepted:
    """A relay, and who stands at its data port's address. `grpc`: past everybody in between."""

    daemon: Daemon
    grpc: str
    between: InBetween

    @property
    def name(self) -> str:
        return str(self.daemon.ready["name"])


class InterceptedFleet:
    """Relays of one fleet, each behind its `InBetween`; `holders` has the directories of the other roles."""

    def __init__(self, relays: Relays, holders: Path, directory: Path) -> None:
        self._relays, self.holders = relays, holders
        self.directory = write_holder(
            directory / "relay",
            authority_of(holders),
            Identity("relay", "relay"),
            trusts=holders,
            hosts=(LISTENS, *ADDRESSES),
        )
        self._stack = contextlib.ExitStack()
        self._addresses = iter(ADDRESSES)

    def start(self, name: str, *flags: str) -> Intercepted:
        address = next(self._addresses)
        daemon = self._relays.start(name, "--credentials", str(self.directory), "--advertise", address, *flags)
        here = {what: _moved(daemon.ready[what]) for what in ("grpc", "data")}
        self._stack.enter_context(InBetween(daemon.ready["grpc"], here["grpc"]))
        between = self._stack.enter_context(InBetween(daemon.ready["data"], here["data"]))
        return Intercepted(daemon, here["grpc"], between)

    def close(self) -> None:
        self._stack.close()

    def client(self, relay: Intercepted, holder: str) -> RelayClient:
        return RelayClient(relay.grpc, timeout_s=60.0, credentials=Credentials(self.holders / holder))

    def access(self, holder: str = "relay", *, tls: bool = False) -> DataAccess:
        return DataAccess(Credentials(self.holders / holder), tls=tls)

    def fetch(self, relay: Intercepted, model: str, *, tls: bool = False, access: DataAccess | None = None) -> bytes:
        """Version 1 of the model, as this test's own requester gets it. Raises what a link does."""
        source = Source(relay.name, relay.between.address)
        greeting = Greeting("fetch", model, 1, "requester")
        link = TcpLink(source, greeting, silence_s=SILENCE_S, access=access or self.access(tls=tls))
        with contextlib.closing(link):
            chunks = ChunkMap.of(link.manifest)
            places = [bytearray(chunks.chunk(index).length) for index in range(chunks.num_chunks)]
            for index in range(chunks.num_chunks):
                link.request(Want(index, 0))
            for place in places:
                arrived = link.receive(lambda index: memoryview(places[index]), lambda *_: None)
                assert digest(memoryview(place)) == arrived.digest
        return b"".join(places)

    async def publish(self, relay: Intercepted, model: str, seed: int) -> Ticket:
        """Returns at *copied*."""
        async with self.client(relay, "trainer") as trainer:
            return await publish(trainer, model, source_of(weights(seed)), step=seed, run="r")

    async def lands(self, relay: Intercepted, model: str, version: int, seed: int) -> None:
        """Waits until the relay has the version; fails unless its bytes are those of the seed."""
        async with self.client(relay, "gateway") as reader:

            async def there() -> Lease | None:
                if version not in (await reader.status()).held.get(model, ()):
                    return None
                return await reader.acquire(model, version, holder="test")

            lease = await until(there, f"{relay.name} has version {version} of {model}")
            found = (lease.path / "model.safetensors").read_bytes()
            await reader.release(lease)
        assert hashlib.sha256(found).digest() == hashlib.sha256(contents(seed)).digest(), f"{model} at {relay.name}"


def weights(seed: int) -> Arrays:
    """Three chunks, the last one a short one."""
    chance = np.random.default_rng(seed)
    return {"w": chance.integers(0, 255, 2 * CHUNK_BYTES + 99_999).astype(np.uint8)}


def contents(seed: int) -> bytes:
    return save(weights(seed))


@contextlib.contextmanager
def intercepted(etcd: str, holders: Path, directory: Path) -> Iterator[InterceptedFleet]:
    """A fleet without relays yet."""
    relays = Relays(etcd, directory)
    fleet = InterceptedFleet(relays, holders, directory)
    try:
        yield fleet
    finally:
        relays.close()
        fleet.close()


def _moved(address: str) -> str:
    return f"{LISTENS}:{address.rpartition(':')[2]}"
