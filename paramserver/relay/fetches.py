"""Fetches of versions to this relay, and the sources of their bytes.

Invariants:
- a version has one fetch at a time, which blocks threads of its own; it is under way until those have ended;
- the task that runs a fetch also applies its outcome: after waiting for that task, both are done;
- the chain is a preference: sources are looked up again as they change, and this host's disk is one of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paramserver.config import RelayConfig
from paramserver.core.chain import Place, is_late, sources
from paramserver.core.records import Announced, Holding
from paramserver.data import fetch as data_fetch
from paramserver.data import tcp
from paramserver.data.frames import Greeting
from paramserver.data.nixl.dialer import NixlDialer
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.secured import DataAccess
from paramserver.data.spill import SCHEME, Spill
from paramserver.data.transport import Begun, Link, Source, ignore_link
from paramserver.memory.store import Snapshot
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.models import ModelTable
from protos.errors import LaminarError
from protos.failures import FailureLog
from protos.telemetry.logs import about

log = logging.getLogger(__name__)

FETCHES_MAX = 256
"""Versions fetched at once, each with a thread that waits for its stripes. More of them wait for one that ends."""
FAILED_RETRY_S = 1.0  # before a version is fetched again whose fetch failed with an unexpected error
IDLE_S = 2.0  # a fetch without a byte for this long makes way for a newer sealed version


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version is here whole: the root digest of its bytes as they are here, how they came, and in what time."""

    root_digest: str
    holding: Holding
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Running:
    fetch: data_fetch.Fetch
    snapshot: Snapshot
    task: asyncio.Task[None]


class Fetches:
    """The fetches under way on this relay; owned by its event loop, while their bytes come in threads."""

    def __init__(
        self,
        config: RelayConfig,
        lease: MemberLease,
        models: ModelTable,
        *,
        spill: Spill | None,
        nixl: NixlProcesses | None,
        bind_host: str,
        access: DataAccess | None,
    ) -> None:
        """`bind_host`: the address that connections to other relays come from; "": any. `access`: with which they are
        opened."""
        self._config, self._view, self._models = config, lease.view, models
        self._spill = spill
        self._nixl = NixlDialer(nixl, self._dial_tcp) if nixl is not None else None
        self._bind_host, self._access = bind_host, access
        self._running: dict[tuple[str, int], _Running] = {}
        self._failures = FailureLog(log)
        # Not the event loop's own threads: a few fetches without a byte would keep everything else from running there.
        self._threads = ThreadPoolExecutor(FETCHES_MAX, "fetch")

    async def run(self, announced: Announced, snapshot: Snapshot) -> Fetched | None:
        """Brings the snapshot's bytes here; None when they could not be had, or the fetch was cancelled."""
        manifest = announced.manifest
        greeting = Greeting(
            "fetch",
            manifest.model,
            manifest.version,
            self._config.name,
            manifest.epoch,
            late=is_late(self._config.name, announced.plan),
        )
        fetch = data_fetch.Fetch(
            snapshot,
            greeting,
            lambda: self._sources(announced),
            lambda source, greeting, begun: self._dial(source, greeting, begun, snapshot),
            num_stripes=self._config.stripes,
        )
        task = asyncio.current_task()
        assert task is not None
        self._running[manifest.model, manifest.version] = _Running(fetch, snapshot, task)
        what = f"{snapshot} does not come and is tried again"
        started = time.monotonic()
        try:
            if not await asyncio.get_running_loop().run_in_executor(self._threads, fetch.run):
                return None
            root = await asyncio.to_thread(snapshot.root)
            self._failures.recovered(what)
            holding = Holding(fetch.upstream, fetch.rate_bytes_s, fetch.rtt_s, fetch.transport)
            return Fetched(root, holding, time.monotonic() - started)
        except LaminarError as error:
            extra = about(model=manifest.model, version=manifest.version)
            log.warning("%s did not come: %s", snapshot, error, extra=extra)
        except Exception as error:  # noqa: BLE001  (the version is tried again; it must not be under way for ever)
            self._failures.failed(what, error)
            await asyncio.sleep(FAILED_RETRY_S)
        finally:
            del self._running[manifest.model, manifest.version]
        return None

    def cancel(self, model: str, version: int) -> asyncio.Task[None] | None:
        """The task that called `run`, and that ends soon; None when no such fetch is under way."""
        running = self._running.get((model, version))
        if running is None:
            return None
        running.fetch.cancel()
        return running.task

    def cancel_all(self) -> None:
        for running in self._running.values():
            running.fetch.cancel()

    def close(self) -> None:
        """Gives the threads back, once every fetch has ended."""
        self._threads.shutdown(wait=False)

    def idle(self, model: str) -> list[int]:
        """Versions that have been getting no bytes for `IDLE_S`."""
        return [version for (of, version), at in self._running.items() if of == model and at.fetch.idle_s > IDLE_S]

    def transfers(self) -> list[tuple[str, int, str, str, int, int]]:
        """(model, version, upstream, transport, bytes done, bytes total) of each fetch under way."""
        return [
            (*key, at.fetch.upstream, at.fetch.transport, at.fetch.bytes_done, at.snapshot.manifest.size_bytes)
            for key, at in sorted(self._running.items(), key=lambda item: item[0])
        ]

    def bypassed(self) -> set[str]:
        """Sources that a fetch bypasses now: the registry calls them alive, and this relay cannot reach them."""
        return {name for running in self._running.values() for name in running.fetch.bypassed()}

    def _sources(self, announced: Announced) -> list[list[Source]]:
        """The sources of a version, in tiers. Called from fetch threads: reads only, each of them atomic."""
        manifest = announced.manifest
        holders = set(self._models.holders(manifest.model, manifest.version))
        members = dict(self._view.members)
        # Not `view.places()`: a draining relay takes no more, but serves what it has.
        places = {name: Place(member.zone, member.rack) for name, member in members.items()}
        tiers = sources(self._config.name, announced.plan, holders, places)
        peers = [[Source(name, members[name].data_address) for name in tier] for tier in tiers]
        disk = self._spill.source(manifest) if self._spill is not None else None
        if disk is None:
            return peers
        return [*peers, [disk]] if holders else [[disk], *peers]

    def _dial(self, source: Source, greeting: Greeting, begun: Begun, snapshot: Snapshot) -> Link:
        if self._spill is not None and source.address.startswith(SCHEME):
            return self._spill.open(greeting)
        if self._nixl is not None:
            return self._nixl.dial(source, greeting, [(file.fd, file.size_bytes) for file in snapshot.files], begun)
        return self._dial_tcp(source, greeting, begun)

    def _dial_tcp(self, source: Source, greeting: Greeting, begun: Begun = ignore_link) -> tcp.TcpLink:
        return tcp.TcpLink(
            source,
            greeting,
            silence_s=self._config.silence_s,
            bind_host=self._bind_host,
            access=self._access,
            begun=begun,
        )
