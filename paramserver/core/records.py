"""The nouns that relays exchange and keep in the registry, and the roots that bind their bytes.

Invariants:
- chunks are numbered through all files of a version in order and never straddle files;
- the version root covers model, version, epoch, layout and every chunk digest, so equal roots mean equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import xxhash

from protos.errors import InvalidRequest

DIGEST_BYTES = 16
CHUNK_BYTES = 1 << 20
CHUNKS_MAX = 1 << 26  # of one version: whoever holds it keeps a digest for each, and their numbers fit into a frame's
RANKS_MAX = 1 << 16
NUMBER_MAX = 10**14  # of a version named by an operator: far below a message's 63 bits and a key's 16 digits
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
WORDS_MAX = 256  # characters of what somebody is called for people to read: a run, a publisher, the holder of a pin
_PEER_NAME = re.compile(r"[\x21-\x7e]{1,200}")
PARTIAL = ".partial"
"""Ends the names of files that are not yet whole; no file of a version ends so."""


class BadRecord(InvalidRequest, ValueError):
    """A record that nobody may act on. Decoders report it as a damaged message, since it is a ValueError."""


class Epoch(msgspec.Struct, frozen=True, order=True):
    """Fences a stale master: (store id, election revision). Comparable only within one store."""

    store_id: str
    revision: int

    def __str__(self) -> str:
        return f"{self.store_id}/{self.revision}"


class FileSpec(msgspec.Struct, frozen=True):
    """A file of a snapshot."""

    name: str
    size_bytes: int

    def __post_init__(self) -> None:
        """Names come from other hosts and become paths here: nothing but a plain name is one."""
        if not _FILE_NAME.fullmatch(self.name) or self.name.endswith(PARTIAL):
            raise BadRecord(
                f"{self.name[:200]!r} cannot name a file of a version", hint="letters, digits, '.', '_', '-'"
            )
        if self.size_bytes < 0:
            raise BadRecord(f"file {self.name} of {self.size_bytes} bytes", hint="no size below 0")


class Manifest(msgspec.Struct, frozen=True):
    """A version's identity and layout, which all relays share before its first byte moves."""

    model: str
    version: int
    run: str
    step: int
    epoch: Epoch
    files: tuple[FileSpec, ...]
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if not _MODEL_NAME.fullmatch(self.model):
            raise BadRecord(f"{self.model[:200]!r} cannot name a model")
        if self.version < 1 or self.chunk_bytes < 1:
            raise BadRecord(f"version {self.version} in chunks of {self.chunk_bytes} bytes", hint="count from 1")
        if len({file.name for file in self.files}) < len(self.files):
            raise BadRecord(f"version {self.version} of {self.model} has two files of one name")
        if sum(-(-file.size_bytes // self.chunk_bytes) for file in self.files) > CHUNKS_MAX:
            raise BadRecord(
                f"version {self.version} of {self.model} has more than {CHUNKS_MAX} chunks of {self.chunk_bytes} bytes",
                hint="use a larger --chunk-bytes",
            )

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count` trainer ranks that write one version together, each its own tensors into its own files."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise InvalidRequest(f"rank {self.index} of {self.count}", hint="count ranks from 0")
        if self.count > RANKS_MAX:
            raise InvalidRequest(f"{self.count} ranks of one trainer", hint=f"at most {RANKS_MAX} write one version")


SOLE = Rank()
"""A publisher that writes its versions alone."""


class Plan(msgspec.Struct, frozen=True):
    """The order in which relays pass chunks on; `number` grows with each change within an epoch.

    `reason`, for people: why this order followed the one before.
    """

    epoch: Epoch
    number: int
    order: tuple[str, ...]
    reason: str = ""


class Announced(msgspec.Struct, frozen=True, omit_defaults=True):
    """Written by the master when a version begins: from here on relays may request its chunks.

    `labels` are those that the version will be sealed with.
    """

    manifest: Manifest
    plan: Plan
    labels: dict[str, str] = {}


class Sealed(msgspec.Struct, frozen=True, omit_defaults=True):
    """The commit point of a version. `labels`: what its publisher said of it (`protos.version_labels`)."""

    model: str
    version: int
    step: int
    run: str
    root_digest: str
    size_bytes: int
    sealed_unix_s: float
    labels: dict[str, str] = {}

    @classmethod
    def of(cls, manifest: Manifest, root_digest: str, sealed_unix_s: float, labels: dict[str, str]) -> Sealed:
        return cls(
            manifest.model,
            manifest.version,
            manifest.step,
            manifest.run,
            root_digest,
            manifest.size_bytes,
            sealed_unix_s,
            labels,
        )


class Ended(msgspec.Struct, frozen=True):
    """A version that can never be had again, and why."""

    why: Literal["aborted", "lost"]
    reason: str


class Member(msgspec.Struct, frozen=True):
    """One live relay."""

    name: str
    instance: str
    grpc_address: str
    data_address: str
    publish_host: bool = True
    zone: str = ""
    rack: str = ""
    draining: bool = False  # leaves soon: serves what it has, takes no more
    transport: str = "tcp"  # what it moves bytes with where the other side does too


class FleetPin(msgspec.Struct, frozen=True):
    """A version is to be kept by `copies` relays; `relay` has the pin, and is one of them as long as it lives."""

    relay: str
    copies: int


class Holding(msgspec.Struct, frozen=True):
    """How a version came to a relay: from whom, how fast while bytes were there to come, over all stripes (0: not by a
    hop, or none came), how long the network's round trip took, and what moved the bytes."""

    upstream: str = ""
    rate_bytes_s: float = 0.0
    rtt_s: float = 0.0
    transport: str = ""


class RegisteredEngine(msgspec.Struct, frozen=True):
    """An engine beside a relay, for gateways to find. `relay` is where it gets its versions: "host:port" of gRPC."""

    name: str
    kind: str
    url: str
    relay: str


class Master(msgspec.Struct, frozen=True):
    """The relay that holds the election of a model."""

    name: str
    instance: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one file: `offset` within the file number `file`."""

    index: int
    file: int
    offset: int
    length: int


class ChunkMap:
    """Chunk numbers to places, without a list of all chunks."""

    def __init__(self, sizes: Sequence[int], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._sizes = tuple(sizes)
        self._firsts = [0]
        for size in sizes:
            self._firsts.append(self._firsts[-1] + -(-size // chunk_bytes))
        self.num_chunks = self._firsts[-1]

    @classmethod
    def of(cls, manifest: Manifest) -> ChunkMap:
        return cls([file.size_bytes for file in manifest.files], manifest.chunk_bytes)

    def range_of(self, file: int) -> range:
        """The numbers of the chunks of one file."""
        return range(self._firsts[file], self._firsts[file + 1])

    def chunk(self, index: int) -> Chunk:
        if not 0 <= index < self.num_chunks:
            raise InvalidRequest(f"chunk {index} of {self.num_chunks}", hint="count chunks from 0")
        low, high = 0, len(self._sizes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._firsts[middle] <= index else (low, middle)
        while self._firsts[low + 1] <= index:  # an empty file has no chunk of its own
            low += 1
        offset = (index - self._firsts[low]) * self.chunk_bytes
        return Chunk(index, low, offset, min(self.chunk_bytes, self._sizes[low] - offset))


def digest(data: bytes | memoryview) -> bytes:
    """The digest of a chunk."""
    return xxhash.xxh3_128_digest(data)


Digest = xxhash.xxh3_128
"""The same from parts in order: `update` with each, then `digest()`."""


def version_root(manifest: Manifest, digests: Sequence[bytes]) -> str:
    """The root over layout and file roots; a file root is the hash of its ordered chunk digests."""
    chunks = ChunkMap.of(manifest)
    assert len(digests) == chunks.num_chunks
    roots = [digest(b"".join(digests[i] for i in chunks.range_of(f))) for f in range(len(manifest.files))]
    identity = (
        manifest.model,
        manifest.version,
        manifest.epoch,
        manifest.chunk_bytes,
        [(file.name, file.size_bytes) for file in manifest.files],
    )
    return digest(msgspec.json.encode(identity) + b"".join(roots)).hex()


def part_root(digests: Iterable[bytes]) -> str:
    """The root that one rank commits: the hash of its own chunks' digests, in order."""
    return digest(b"".join(digests)).hex()


def check_model_name(model: str) -> str:
    if not _MODEL_NAME.fullmatch(model):
        raise InvalidRequest(
            f"{model[:200]!r} cannot name a model",
            hint="use 1 to 64 letters, digits, '.', '_' or '-', not starting with a sign",
        )
    return model


def check_words(what: str, words: str) -> None:
    """Names for people are kept, logged and shown to everybody: they are not empty, and few words."""
    if not 0 < len(words) <= WORDS_MAX:
        raise InvalidRequest(f"{what} is named in {len(words)} characters", hint=f"use 1 to {WORDS_MAX}")


def check_peer_name(name: str) -> str:
    """Checks the name in a greeting: a relay's, or "host:pid". It is logged, so it is one short line."""
    if not _PEER_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:200]!r} cannot name who greets", hint="up to 200 printable ASCII characters, no space"
        )
    return name
