"""A hop whose bytes NIXL moves: one-sided reads from the holder's pool into this one, by RDMA where the hosts have it.

Greeting, requests, digests and heartbeats stay on the TCP connection (see protos/hop-protocol.md, "Transport nixl").

Invariants:
- a link has one mover at each end; a chunk is read only between the holder's READY and this side's TAKEN;
- a link that is given up with reads under way kills its mover first: what was asked of a holder that hangs would else
  be written into the pool when it wakes up, over what another holder has sent since;
- a holder that does not speak it, or a library that failed twice in a row with it, is asked over tcp, and it is said.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from paramserver.core.records import ChunkMap
from paramserver.core.transfer import Want
from paramserver.data import frames
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken, TransportFailed
from paramserver.data.nixl_process import Done, Read
from paramserver.data.nixl_processes import Files, NixlProcess, NixlProcesses
from paramserver.data.tcp import TcpLink
from paramserver.data.transport import Arrived, Link, Source
from protos.errors import OutOfCapacity

log = logging.getLogger(__name__)

FAILURES_MAX = 2  # in a row with one holder, before it is asked over tcp
TCP_INSTEAD_S = 60.0  # how long, before nixl is tried with it again
LAST_WORD_S = 0.3  # a holder that ends or refuses fails the library first, and says so a moment later
STALL_S = 10.0  # the holder lives, but a read does not end


class NixlLink:
    """One stripe's connection to one holder. `hop` was welcomed with nixl; `went` is told how the library does."""

    transport = "nixl"

    def __init__(
        self, hop: TcpLink, movers: NixlProcesses, mover: NixlProcess, went: Callable[[TransportFailed | None], None]
    ) -> None:
        assert hop.welcome.nixl is not None
        self.rtt_s = hop.rtt_s
        self._hop, self._movers, self._mover, self._went = hop, movers, mover, went
        self._chunks = ChunkMap.of(hop.manifest)
        self._lent = hop.welcome.nixl
        self._asked: deque[Want] = deque()
        self._due: deque[Want] = deque()  # asked, not yet READY
        self._reading: dict[int, float] = {}  # chunks under way, and since when
        self._ready: dict[int, tuple[Header, float]] = {}
        self._ended: set[int] = set()
        self._begun = False
        self._looked_at = self._said_at = time.monotonic()
        self._silent_s = 0.0  # as `TcpLink` counts it

    def begin(self, files: Files) -> None:
        """Maps the place that chunks come to: `files`, descriptors and sizes in the manifest's order."""
        with self._library():
            self._mover.map(files, self._hop.alive)
            self._mover.peer(self._lent.metadata)
        self._begun = True

    def ask(self, want: Want) -> None:
        self._hop.request(want)
        self._asked.append(want)
        self._due.append(want)

    def alive(self) -> None:
        self._hop.alive()
        self._said_at = time.monotonic()

    def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
        want = self._asked[0]
        self._looked_at, self._silent_s = time.monotonic(), 0.0
        try:
            while want.index not in self._ended:
                self._wait(place)
        except TransportFailed as error:
            self._went(error)
            raise
        self._went(None)
        self._asked.popleft()
        self._ended.discard(want.index)
        header, began_at = self._ready.pop(want.index)
        self._hop.taken(want.index)
        received(want.index, want.from_byte + header.length)
        return Arrived(want.index, header.digest, header.length, began_at)

    def close(self) -> None:
        if self._begun and not self._reading:
            self._movers.give(self._mover)
        else:
            self._movers.discard(self._mover)
        self._hop.close()

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """Tells a library that fails from a holder that is gone or refuses, which fails it too."""
        try:
            yield
        except TransportFailed:
            self._begun = False
            self._hop.last_word(LAST_WORD_S)
            raise

    def _wait(self, place: Callable[[int], memoryview]) -> None:
        """Until something happened or a heartbeat is due. LinkBroken when the holder is silent, or a read hangs."""
        ends: list[TcpLink | NixlProcess] = [self._hop, self._mover]
        readable, _, _ = select.select(ends, [], [], frames.HEARTBEAT_S)
        now = time.monotonic()
        self._silent_s = 0.0 if readable else self._silent_s + min(now - self._looked_at, frames.LOOK_S_MAX)
        self._looked_at = now
        if self._hop in readable:
            header = self._hop.header()
            if header.kind is Kind.READY:
                self._begin(header, place)
        if self._mover in readable:
            with self._library():
                answer = self._mover.hear()
            assert isinstance(answer, Done)
            del self._reading[answer.index]
            self._ended.add(answer.index)
        if self._silent_s > self._hop.silence_s:
            raise LinkBroken(f"{self._hop.source.name} was silent for {self._hop.silence_s} s")
        if self._reading and now - min(self._reading.values()) > STALL_S:
            raise TransportFailed(f"a read from {self._hop.source.name} did not end within {STALL_S} s")
        if now - self._said_at > frames.HEARTBEAT_S:
            self.alive()

    def _begin(self, header: Header, place: Callable[[int], memoryview]) -> None:
        want = self._due.popleft() if self._due else None
        if want is None or (header.index, header.from_byte, header.from_byte + header.length) != (
            want.index,
            want.from_byte,
            len(place(want.index)),
        ):
            raise LinkBroken(f"{header} answers {want}")
        chunk, now = self._chunks.chunk(want.index), time.monotonic()
        at = chunk.offset + want.from_byte
        self._reading[want.index] = now
        self._ready[want.index] = (header, now)
        with self._library():
            self._mover.read(Read(want.index, chunk.file, at, self._lent.addresses[chunk.file] + at, header.length))


class NixlDialer:
    """Opens links over nixl, or over tcp where that cannot be."""

    def __init__(self, movers: NixlProcesses, tcp: Callable[[Source, Greeting], TcpLink]) -> None:
        self._movers = movers
        self._tcp = tcp
        self._failures: dict[str, int] = {}
        self._tcp_until: dict[str, float] = {}
        self._said: set[str] = set()  # holders (bounded by the relays there are) that were told of as not speaking it
        self._mutex = threading.Lock()

    def dial(self, source: Source, greeting: Greeting, files: Files) -> Link:
        """`files`: descriptors and sizes of the place the version comes to, in the manifest's order."""
        mover = self._mover(source)
        if mover is None:
            return self._tcp(source, greeting)
        try:
            return self._link(source, greeting, files, mover)
        except TransportFailed as error:
            self._went(source, error)
            raise

    def _link(self, source: Source, greeting: Greeting, files: Files, mover: NixlProcess) -> Link:
        try:
            hop = self._tcp(source, msgspec.structs.replace(greeting, transports=["nixl"]))
        except BaseException:
            self._movers.give(mover)
            raise
        if hop.welcome.nixl is None:
            self._movers.give(mover)
            self._say_once(source)
            return hop
        link = NixlLink(hop, self._movers, mover, lambda error: self._went(source, error))
        try:
            link.begin(files)
        except BaseException:
            link.close()
            raise
        return link

    def _mover(self, source: Source) -> NixlProcess | None:
        with self._mutex:
            if self._tcp_until.get(source.name, 0.0) > time.monotonic():
                return None
        try:
            return self._movers.take()
        except (TransportFailed, OutOfCapacity) as error:
            log.warning("asking %s over tcp: %s", source.name, error)
            return None

    def _say_once(self, source: Source) -> None:
        with self._mutex:
            new = source.name not in self._said
            self._said.add(source.name)
        if new:
            log.warning("%s does not speak nixl: its bytes come over tcp", source.name)

    def _went(self, source: Source, error: TransportFailed | None) -> None:
        with self._mutex:
            if error is None:
                self._failures.pop(source.name, None)
                return
            count = self._failures[source.name] = self._failures.get(source.name, 0) + 1
            if count < FAILURES_MAX:
                return
            self._tcp_until[source.name] = time.monotonic() + TCP_INSTEAD_S
            self._failures[source.name] = 0
        log.warning("asking %s over tcp for %g s: %s", source.name, TCP_INSTEAD_S, error)
