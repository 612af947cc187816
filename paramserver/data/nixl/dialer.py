"""A hop whose bytes NIXL moves: one-sided reads from the holder's pool into this one, by RDMA where the hosts have it.

Greeting, requests, digests and heartbeats stay on the TCP connection (see protos/hop-protocol.md, "Transport nixl").

Invariants:
- a link has one NIXL process at each end; a chunk is read only between the holder's READY and this side's TAKEN;
- a link that is given up with reads under way kills its process first. A holder that hangs may complete such a read
  when it wakes up: into the pool, over what another holder has sent since. The process takes its mapping along;
- a holder that does not speak nixl, or with which the library failed twice in a row, is used over tcp, with a warning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from paramserver.core.records import ChunkMap
from paramserver.core.transfer import Want
from paramserver.data import frames
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken, TransportFailed
from paramserver.data.nixl.process import Done, Read
from paramserver.data.nixl.processes import Files, NixlProcess, NixlProcesses
from paramserver.data.tcp import DialTcp, TcpLink
from paramserver.data.transport import Arrived, Begun, Link, Source, tell_nobody
from protos.errors import OutOfCapacity

log = logging.getLogger(__name__)

FAILURES_MAX = 2  # in a row with one holder, before it is used over tcp
TCP_INSTEAD_S = 60.0  # how long, before nixl is tried with it again
REFUSAL_S = 0.3  # a holder that ends or refuses fails the library first, and its refusal comes a moment later
STALL_S = 10.0  # the holder lives, but a read does not end


class NixlLink:
    """One stripe's connection to one holder.

    `hop` was welcomed with nixl; `report` gets the outcome of each read: None, or how the library failed.
    """

    transport = "nixl"

    def __init__(
        self,
        hop: TcpLink,
        processes: NixlProcesses,
        process: NixlProcess,
        report: Callable[[TransportFailed | None], None],
    ) -> None:
        assert hop.welcome.nixl is not None
        self.rtt_s = hop.rtt_s
        self._hop, self._processes, self._process, self._report = hop, processes, process, report
        self._chunks = ChunkMap.of(hop.manifest)
        self._lent = hop.welcome.nixl
        self._requested: deque[Want] = deque()
        self._due: deque[Want] = deque()  # requested, not yet READY
        self._reading: dict[int, float] = {}  # chunks under way, and since when
        self._ready: dict[int, tuple[Header, float]] = {}
        self._ended: set[int] = set()
        self._begun = False
        self._looked_at = self._alive_at = time.monotonic()
        self._silent_s = 0.0  # as `TcpLink` counts it

    def begin(self, files: Files) -> None:
        """Maps the place that chunks come to: `files`, descriptors and sizes in the manifest's order."""
        with self._library():
            self._process.map(files, self._hop.alive)
            self._process.peer(self._lent.metadata)
        self._begun = True

    def request(self, want: Want) -> None:
        self._hop.send_request(want)
        self._requested.append(want)
        self._due.append(want)

    def alive(self) -> None:
        self._hop.alive()
        self._alive_at = time.monotonic()

    def break_off(self) -> None:
        self._hop.break_off()

    def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
        want = self._requested[0]
        self._looked_at, self._silent_s = time.monotonic(), 0.0
        try:
            while want.index not in self._ended:
                self._wait(place)
        except TransportFailed as error:
            self._report(error)
            raise
        self._report(None)
        self._requested.popleft()
        self._ended.discard(want.index)
        header, began_at = self._ready.pop(want.index)
        self._hop.taken(want.index)
        received(want.index, want.from_byte + header.length)
        return Arrived(want.index, header.digest, header.length, began_at)

    def close(self) -> None:
        if self._begun and not self._reading:
            self._processes.give(self._process)
        else:
            self._processes.discard(self._process)
        self._hop.close()

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """Distinguishes a library that fails from a holder that is gone or refuses, which fails it too."""
        try:
            yield
        except TransportFailed:
            self._begun = False
            self._hop.raise_refusal(REFUSAL_S)
            raise

    def _wait(self, place: Callable[[int], memoryview]) -> None:
        """Until something happened or a heartbeat is due. LinkBroken when the holder is silent, or a read hangs."""
        ends: list[TcpLink | NixlProcess] = [self._hop, self._process]
        readable = frames.readable(ends, frames.HEARTBEAT_S)
        now = time.monotonic()
        self._silent_s = 0.0 if readable else self._silent_s + min(now - self._looked_at, frames.LOOK_S_MAX)
        self._looked_at = now
        if self._hop in readable:
            header = self._hop.header()
            if header.kind is Kind.READY:
                self._begin(header, place)
        if self._process in readable:
            with self._library():
                answer = self._process.receive()
            assert isinstance(answer, Done)
            del self._reading[answer.index]
            self._ended.add(answer.index)
        if self._silent_s > self._hop.silence_s:
            raise LinkBroken(f"{self._hop.source.name} was silent for {self._hop.silence_s} s")
        if self._reading and now - min(self._reading.values()) > STALL_S:
            raise TransportFailed(f"a read from {self._hop.source.name} did not end within {STALL_S} s")
        if now - self._alive_at > frames.HEARTBEAT_S:
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
            self._process.read(Read(want.index, chunk.file, at, self._lent.addresses[chunk.file] + at, header.length))


class NixlDialer:
    """Opens links over nixl, or over tcp where that cannot be."""

    def __init__(self, processes: NixlProcesses, tcp: DialTcp) -> None:
        self._processes = processes
        self._tcp = tcp
        self._failures: dict[str, int] = {}
        self._tcp_until: dict[str, float] = {}
        self._warned: set[str] = set()  # holders (bounded by the relays there are) that do not speak nixl
        self._mutex = threading.Lock()

    def dial(self, source: Source, greeting: Greeting, files: Files, begun: Begun = tell_nobody) -> Link:
        """`files`: descriptors and sizes of the place the version comes to, in the manifest's order."""
        process = self._take_process(source)
        if process is None:
            return self._tcp(source, greeting, begun)
        try:
            return self._link(source, greeting, files, process, begun)
        except TransportFailed as error:
            self._report(source, error)
            raise

    def _link(self, source: Source, greeting: Greeting, files: Files, process: NixlProcess, begun: Begun) -> Link:
        try:
            hop = self._tcp(source, msgspec.structs.replace(greeting, transports=["nixl"]), begun)
        except BaseException:
            self._processes.give(process)
            raise
        if hop.welcome.nixl is None:
            self._processes.give(process)
            self._warn_once(source)
            return hop
        link = NixlLink(hop, self._processes, process, lambda error: self._report(source, error))
        try:
            link.begin(files)
        except BaseException:
            link.close()
            raise
        return link

    def _take_process(self, source: Source) -> NixlProcess | None:
        with self._mutex:
            if self._tcp_until.get(source.name, 0.0) > time.monotonic():
                return None
        try:
            return self._processes.take()
        except (TransportFailed, OutOfCapacity) as error:
            log.warning("fetching from %s over tcp: %s", source.name, error)
            return None

    def _warn_once(self, source: Source) -> None:
        with self._mutex:
            new = source.name not in self._warned
            self._warned.add(source.name)
        if new:
            log.warning("%s does not speak nixl: its bytes come over tcp", source.name)

    def _report(self, source: Source, error: TransportFailed | None) -> None:
        with self._mutex:
            if error is None:
                self._failures.pop(source.name, None)
                return
            count = self._failures[source.name] = self._failures.get(source.name, 0) + 1
            if count < FAILURES_MAX:
                return
            self._tcp_until[source.name] = time.monotonic() + TCP_INSTEAD_S
            self._failures[source.name] = 0
        log.warning("fetching from %s over tcp for %g s: %s", source.name, TCP_INSTEAD_S, error)
