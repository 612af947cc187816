"""A store with its data port, as one relay has them, without the rest of a relay.

`python -m tests.support.hops` serves a version of random bytes from a process of its own, so that it can be killed.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from pathlib import Path

from paramserver.core.records import Epoch, FileSpec, Manifest, digest
from paramserver.data.frames import Greeting
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.secured import DataAccess
from paramserver.data.server import DataServer, listen_tcp
from paramserver.data.transport import Source
from paramserver.memory.pool import Pool
from paramserver.memory.store import Snapshot, Store
from protos.access.credentials import Credentials
from protos.errors import Conflict, Corrupt, NotFound

EPOCH = Epoch("store", 1)
CHUNK = 4096
CONTENT = bytes(range(256)) * 100 + b"tail"
FETCH = Greeting("fetch", "policy", 1, "test", EPOCH)


POOL_BYTES = 32 << 20


def manifest(*sizes: int, chunk_bytes: int = CHUNK) -> Manifest:
    files = tuple(FileSpec(f"f{i}", size) for i, size in enumerate(sizes))
    return Manifest("policy", 1, "run", 0, EPOCH, files, chunk_bytes)


class Host:
    """A store with its data port, as one relay has them."""

    def __init__(
        self,
        directory: Path,
        *sizes: int,
        content: bytes = CONTENT,
        chunk_bytes: int = CHUNK,
        nixl: NixlProcesses | None = None,
        max_rate: float | None = None,
        access: DataAccess | None = None,
    ) -> None:
        self.all = content
        self.store = Store(Pool(directory, POOL_BYTES))
        self.snapshot: Snapshot = self.store.open(manifest(*(sizes or (len(content),)), chunk_bytes=chunk_bytes))
        self.withdrawn: list[str] = []
        listener = listen_tcp("127.0.0.1", 0)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.server = DataServer(self, nixl=nixl, max_rate=max_rate, access=access, address=address, instance="here")
        self.source = Source(directory.name, self.server.serve_tcp(listener))
        self.socket = directory / "publish.sock"
        self.server.serve_unix(self.socket)

    def find(self, model: str, version: int, timeout_s: float) -> Snapshot | None:
        if model != "policy":
            raise NotFound(f"no {model} here")
        return self.store.wait(model, version, timeout_s)

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        if token != "token":
            raise Conflict("a wrong token")
        return self.snapshot

    def chunk_is_bad(self, snapshot: Snapshot, error: Corrupt) -> None:
        self.withdrawn.append(str(error))

    def fill(self, upto: int | None = None) -> None:
        for index in self.snapshot.missing()[:upto]:
            chunk = self.snapshot.chunks.chunk(index)
            place = self.snapshot.place(index)
            place[:] = self.all[chunk.offset : chunk.offset + chunk.length]
            self.snapshot.present(index, digest(place))

    def content(self) -> bytes:
        return bytes(self.snapshot.files[0].view()[: len(self.all)])

    def descriptors(self) -> list[tuple[int, int]]:
        return [(file.fd, file.size_bytes) for file in self.snapshot.files]

    def close(self) -> None:
        self.server.close()
        self.store.close()


def random_content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def main() -> None:
    """Serves until SIGTERM: `DIRECTORY OPTIONS`, with OPTIONS as JSON."""
    directory, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    nixl = NixlProcesses(idle_max=1) if wanted["nixl"] else None
    access = DataAccess(Credentials(Path(wanted["credentials"])), tls=wanted["tls"]) if wanted["credentials"] else None
    host = Host(
        directory,
        access=access,
        content=random_content(wanted["seed"], wanted["size"]),
        chunk_bytes=wanted["chunk_bytes"],
        nixl=nixl,
        max_rate=wanted["max_rate"],
    )
    host.fill()
    print(host.source.address, flush=True)
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    end.wait()
    host.close()
    if nixl is not None:
        nixl.close()


if __name__ == "__main__":
    main()
