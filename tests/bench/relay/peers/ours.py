"""This project's hop: the relay's own store, data port and fetch, in two processes. Verifies every chunk's digest.

Run with the project's environment as `python -m tests.bench.relay.peers.ours`. What is left out of a relay is only
what decides when a transfer begins: registry, plan and gRPC.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paramserver.core.chunk_size import HopCost, choose_chunk_bytes
from paramserver.core.records import Epoch, FileSpec, Manifest, digest
from paramserver.data import tcp
from paramserver.data.fetch import Fetch
from paramserver.data.frames import Greeting
from paramserver.data.nixl.dialer import NixlDialer
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.secured import DataAccess
from paramserver.data.server import DataServer, listen_tcp
from paramserver.data.transport import Source
from paramserver.memory.pool import Pool
from paramserver.memory.store import Snapshot, Store
from protos.access.credentials import Credentials
from protos.errors import Conflict, Corrupt
from tests.bench.relay.peers.common import Other, arguments, end_with_stdin, mapped, rounds, say
from tests.support.nixl import environment, installed

NUM_BLANKS = 4  # the pool's warm files; each holds one version


class Holder:
    """The provider of one complete version."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def find(self, model: str, version: int, timeout_s: float) -> Snapshot:
        return self._snapshot

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        raise Conflict("sealed")

    def chunk_is_bad(self, snapshot: Snapshot, error: Corrupt) -> None:
        raise AssertionError(str(error))


def manifest(size: int, version: int, chunk_bytes: int) -> Manifest:
    return Manifest("policy", version, "bench", version, Epoch("bench", 1), (FileSpec("w", size),), chunk_bytes)


def store_of(size: int) -> Store:
    pool = Pool(Path(tempfile.mkdtemp(prefix="laminar-bench-", dir="/dev/shm")), size)
    file = pool.take([size])[0]  # one warm file of the right size, as a running relay has it
    file.touch()
    pool.give_back([file])
    return Store(pool)


def processes_of(settings: dict[str, Any]) -> NixlProcesses | None:
    """Warm ones for as many links as there are stripes, with `transport` "nixl"."""
    if settings.get("transport") != "nixl":
        return None
    os.environ.update(environment())
    sys.path.insert(0, str(installed()))
    processes = NixlProcesses(idle_max=settings.get("stripes", 2))
    processes.warm(settings.get("stripes", 2))
    return processes


def access_of(settings: dict[str, Any]) -> DataAccess | None:
    """With "credentials", a directory, the hop is sealed; with "tls", too, it is over TLS."""
    if not settings.get("credentials"):
        return None
    return DataAccess(Credentials(Path(settings["credentials"])), tls=settings["tls"])


def main() -> None:
    args = arguments()
    size, chunk_bytes = args.source.stat().st_size, args.settings.get("chunk_bytes", 0)
    chunk_bytes = chunk_bytes or choose_chunk_bytes(size, 2, HopCost())  # as two relays would
    store, processes = store_of(size), processes_of(args.settings)
    try:
        if args.role == "sender":
            snapshot = store.open(manifest(size, 1, chunk_bytes))
            content = memoryview(mapped(args.source))
            snapshot.files[0].view()[:] = content
            for index in range(snapshot.chunks.num_chunks):
                snapshot.present(index, digest(snapshot.place(index)))
            listener = listen_tcp(args.settings.get("listen", "127.0.0.1"), 0)
            address = ":".join(map(str, listener.getsockname()[:2]))
            server = DataServer(Holder(snapshot), nixl=processes, access=access_of(args.settings), address=address)
            say({"address": server.serve_tcp(listener)})
            end_with_stdin(exit_now=False)
            return
        source = Source("sender", Other(args).said["address"])
        content = memoryview(mapped(args.source))
        access = access_of(args.settings)
        dialer = NixlDialer(processes, tcp.dialer()) if processes is not None else None

        def transfer() -> float:
            snapshot = store.open(manifest(size, 1, chunk_bytes))
            place = [(file.fd, file.size_bytes) for file in snapshot.files]
            fetch = Fetch(
                snapshot,
                Greeting("fetch", "policy", 1, "receiver"),
                lambda: [[source]],
                (lambda source, greeting, begun: dialer.dial(source, greeting, place, begun))
                if dialer
                else tcp.dialer(access=access),
                num_stripes=args.settings.get("stripes", 2),
            )
            started = time.perf_counter()
            assert fetch.run()
            assert fetch.transport == args.settings.get("transport", "tcp")
            took = time.perf_counter() - started
            if not transfer_checked:
                assert snapshot.files[0].view() == content
                transfer_checked.append(True)
            store.remove(snapshot, "next round")
            return took

        transfer_checked: list[bool] = []
        rounds(transfer)
    finally:
        directory = store.pool.directory
        store.pool.close()
        (directory / ".lock").unlink()
        os.rmdir(directory)
        os._exit(0)


if __name__ == "__main__":
    main()
