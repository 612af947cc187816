"""The page of the hop protocol, held against real bytes: a client written from the page alone, without our code."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path

import xxhash

from paramserver.core.records import ChunkMap, Epoch, FileSpec, Manifest, digest, version_root
from paramserver.data.server import DataServer, listen_tcp
from paramserver.memory.pool import Pool
from paramserver.memory.store import Snapshot, Store

CONTENT = bytes(range(256)) * 50
SMALL = b"index"
EPOCH = Epoch("store", 7)


class Holder:
    def __init__(self, store: Store) -> None:
        self.store = store

    def find(self, model: str, version: int, timeout_s: float) -> Snapshot | None:
        return self.store.wait(model, version, timeout_s)

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        raise AssertionError

    def chunk_is_bad(self, snapshot: Snapshot, error: Exception) -> None:
        raise AssertionError


def exactly(sock: socket.socket, num: int) -> bytes:
    got = b""
    while len(got) < num:
        piece = sock.recv(num - len(got))
        assert piece, "the holder closed the connection"
        got += piece
    return got


def frame(sock: socket.socket) -> tuple[int, int, int, bytes, bytes]:
    """Kind, chunk, first byte, digest and what follows; ALIVE is passed over."""
    while True:
        kind, chunk, first, length, chunk_digest = struct.unpack("!BIII16s", exactly(sock, 29))
        if kind != 0:
            return kind, chunk, first, chunk_digest, exactly(sock, length)


def test_a_client_made_from_the_page_fetches_a_version(tmp_path: Path) -> None:
    store = Store(Pool(tmp_path / "pool", 1 << 20))
    manifest = Manifest("policy", 3, "run", 9, EPOCH, (FileSpec("a", len(CONTENT)), FileSpec("b", len(SMALL))), 4096)
    snapshot = store.open(manifest)
    for index in snapshot.missing():
        chunk = snapshot.chunks.chunk(index)
        snapshot.place(index)[:] = (CONTENT, SMALL)[chunk.file][chunk.offset : chunk.offset + chunk.length]
        snapshot.present(index, digest(snapshot.place(index)))
    server = DataServer(Holder(store))
    host, _, port = server.serve_tcp(listen_tcp("127.0.0.1", 0)).rpartition(":")
    greeting = json.dumps({"purpose": "fetch", "model": "policy", "version": 3, "name": "page", "extra": 1}).encode()
    with socket.create_connection((host, int(port)), 5.0) as sock:
        sock.sendall(b"LMN1" + struct.pack("!I", len(greeting)) + greeting)
        kind, _, _, _, body = frame(sock)
        welcome = json.loads(body)
        assert (kind, welcome["missing"]) == (5, [])
        assert [file["size_bytes"] for file in welcome["manifest"]["files"]] == [len(CONTENT), len(SMALL)]
        numbers = range(ChunkMap.of(manifest).num_chunks)
        for number in numbers:
            sock.sendall(struct.pack("!BBII", 1, 0, number, 0))
        answers = [frame(sock) for _ in numbers]
        sock.sendall(struct.pack("!BBII", 1, 0, 1, 4000))
        assert frame(sock)[1:3] == (1, 4000), "from a byte in the middle"
    server.close()
    assert [(kind, chunk, first) for kind, chunk, first, _, _ in answers] == [(2, n, 0) for n in numbers]
    assert all(xxhash.xxh3_128_digest(data) == chunk_digest for *_, chunk_digest, data in answers)
    assert b"".join(data for *_, data in answers) == CONTENT + SMALL
    assert root_of(welcome["manifest"], [chunk_digest for *_, chunk_digest, _ in answers]) == snapshot.root()
    store.close()


def root_of(manifest: dict[str, object], digests: list[bytes]) -> str:
    """The version root as the page defines it."""
    files: list[dict[str, object]] = manifest["files"]  # type: ignore[assignment]
    roots, at = b"", 0
    for file in files:
        count = -(-int(str(file["size_bytes"])) // int(str(manifest["chunk_bytes"])))
        roots += xxhash.xxh3_128_digest(b"".join(digests[at : at + count]))
        at += count
    names = [[file["name"], file["size_bytes"]] for file in files]
    identity = [manifest["model"], manifest["version"], manifest["epoch"], manifest["chunk_bytes"], names]
    return xxhash.xxh3_128_hexdigest(json.dumps(identity, separators=(",", ":")).encode() + roots)


def test_the_root_covers_the_epoch() -> None:
    one = Manifest("policy", 3, "run", 9, EPOCH, (FileSpec("a", 1),), 4096)
    other = Manifest("policy", 3, "run", 9, Epoch("store", 8), (FileSpec("a", 1),), 4096)
    assert version_root(one, [digest(b"x")]) != version_root(other, [digest(b"x")])
