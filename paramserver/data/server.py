"""The data port: answers "model, version, file, chunk, from this byte" and takes what publishers write.

Invariants:
- one thread per connection, at most CONNECTIONS_MAX of each kind, and not all of them for one host; a connection that
  has not yet requested what is here makes way for a new one; each touches a snapshot's memory only inside `reading()`;
- bytes leave only with a verified digest before them; a chunk not yet here is answered by ALIVE, then by the chunk;
- a peer that makes no progress for `STALL_S` loses its connection, so no thread waits for ever.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paramserver.core.records import Epoch, digest
from paramserver.data import frames
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken, TlsWanted, TransportFailed
from paramserver.data.nixl.lender import NixlLender
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.secured import DataAccess, check_greeting
from paramserver.memory.store import Snapshot
from protos.access.unix_socket import admits, peer_of
from protos.errors import Conflict, Corrupt, Forbidden, LaminarError, NotFound, OutOfCapacity, StaleEpoch
from protos.failures import FailureLog, RareLines

log = logging.getLogger(__name__)

STALL_S = 10.0
PUBLISHER_SILENCE_S = 60.0  # on this host: its end is noticed at once, and a call may block all its threads
OPEN_WAIT_S = 5.0  # a peer's watch may bring a version a moment before this relay has opened it
CONNECTIONS_MAX = 256
CONNECTIONS_PER_HOST_MAX = 192
LATE_JOINERS_MAX = 2  # at once per version: of many that join together the first ones then serve the others
ACCEPT_RETRY_S = 0.1
REFUSALS_LOGGED_MAX = (
    20  # in ten seconds: one that joins late is refused now and then, and a stranger as often as it asks
)
_PACED_BYTES = 64 << 10


class Provider(Protocol):
    """The relay, as far as the port needs it."""

    def find(self, model: str, version: int, timeout_s: float) -> Snapshot | None:
        """The snapshot to serve; None when it may still come; NotFound when it will not."""

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        """The snapshot that `token` permits to write. Raises Conflict."""

    def chunk_is_bad(self, snapshot: Snapshot, error: Corrupt) -> None:
        """This relay's own bytes turned out bad: it must stop counting as a holder."""


class Pacer:
    """Holds the bytes sent by the whole port to a rate; for tests and for hosts that share a link."""

    def __init__(self, rate_bytes_s: float | None) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._free_at = time.monotonic()
        self._mutex = threading.Lock()

    def pause(self, num_bytes: int) -> None:
        if self.rate_bytes_s is None:
            return
        with self._mutex:
            start = max(self._free_at, time.monotonic())
            self._free_at = free_at = start + num_bytes / self.rate_bytes_s
        time.sleep(max(0.0, free_at - time.monotonic()))


class Admission:
    """The connections of one listener. Called from the threads of the port."""

    def __init__(self, connections_max: int, per_host_max: int) -> None:
        self._connections_max, self._per_host_max = connections_max, per_host_max
        self._hosts: dict[socket.socket, str] = {}  # in the order in which they came
        self._strangers: set[socket.socket] = set()  # those that were not yet welcomed
        self._mutex = threading.Lock()

    def admit(self, sock: socket.socket) -> None:
        """OutOfCapacity when there are too many of this host, or of all, and no stranger among them that is ended."""
        host = _host_of(sock)
        with self._mutex:
            of_host = [other for other, at in self._hosts.items() if at == host]
            if len(of_host) >= self._per_host_max:
                self._end_one(of_host, f"more than {self._per_host_max} data connections from one host")
            elif len(self._hosts) >= self._connections_max:
                self._end_one(list(self._hosts), f"more than {self._connections_max} data connections")
            self._hosts[sock] = host
            self._strangers.add(sock)

    def _end_one(self, among: list[socket.socket], otherwise: str) -> None:
        stranger = next((sock for sock in among if sock in self._strangers), None)
        if stranger is None:
            raise OutOfCapacity(otherwise)
        self._forget(stranger)
        _shut(stranger)

    def welcome(self, sock: socket.socket) -> None:
        """Makes it no stranger: it requested something that is here, or had the right token."""
        with self._mutex:
            self._strangers.discard(sock)

    def left(self, sock: socket.socket) -> None:
        with self._mutex:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        self._hosts.pop(sock, None)
        self._strangers.discard(sock)

    def connected(self) -> list[socket.socket]:
        with self._mutex:
            return list(self._hosts)


def _host_of(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:  # gone already
        return ""
    return str(name[0]) if isinstance(name, tuple) else "here"


def listen_tcp(host: str, port: int) -> socket.socket:
    """Raises Conflict when the port is taken."""
    try:
        listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise Conflict(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --data-port"
        ) from error
    frames.tune(listener)
    return listener


class DataServer:
    """Serves over TCP, and over a unix socket that passes descriptors to publishers on this host."""

    def __init__(
        self,
        provider: Provider,
        *,
        max_rate: float | None = None,
        nixl: NixlProcesses | None = None,
        access: DataAccess | None = None,
        address: str = "",
        instance: str = "",
    ) -> None:
        """`access`: which connections over TCP are taken, by those who mean the relay at `address`; None: all are.
        `instance`: the relay's, for publishers over the unix socket."""
        self._provider = provider
        self._access, self._address, self._instance = access, address, instance
        self._nixl = nixl  # None: this relay speaks tcp only
        self._pacer = Pacer(max_rate)
        self._listeners: list[socket.socket] = []
        self._by_tcp = Admission(CONNECTIONS_MAX, CONNECTIONS_PER_HOST_MAX)
        self._by_unix = Admission(CONNECTIONS_MAX, CONNECTIONS_MAX)  # strangers elsewhere keep no publisher here out
        self._threads: set[threading.Thread] = set()
        self._mutex = threading.Lock()
        self._closing = False
        self._failures = FailureLog(log)
        self._refusals = RareLines(log, REFUSALS_LOGGED_MAX)
        self.bytes_sent = 0

    def serve_tcp(self, listener: socket.socket) -> str:
        """Accepts on a socket of `listen_tcp`, and closes it in the end; returns its "host:port"."""
        self._accept_on(listener, self._by_tcp, self._serve_peer)
        host, port = listener.getsockname()[:2]
        return f"{host}:{port}"

    def serve_unix(self, path: Path, *, group: int | None = None) -> None:
        """Takes publishers of this user, and of `group`; root's, too, who reads the memory in any case."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(0o600 if group is None else 0o660)
        listener.listen(16)
        self._accept_on(listener, self._by_unix, lambda sock: self._serve_local(sock, group))

    def close(self) -> None:
        """Stops accepting, ends every connection, and waits for the threads."""
        with self._mutex:
            self._closing = True
            connections = [*self._listeners, *self._by_tcp.connected(), *self._by_unix.connected()]
            threads = list(self._threads)
        for sock in connections:
            _shut(sock)
        for thread in threads:
            thread.join(STALL_S)

    def _accept_on(self, listener: socket.socket, admission: Admission, serve: Callable[[socket.socket], None]) -> None:
        self._listeners.append(listener)
        self._start(lambda: self._accept_loop(listener, admission, serve), f"accept-{listener.family.name}")

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._mutex:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._mutex:  # `close` joins what is in the set, and nothing that has not begun can be joined
            thread.start()
            self._threads.add(thread)

    def _accept_loop(
        self, listener: socket.socket, admission: Admission, serve: Callable[[socket.socket], None]
    ) -> None:
        what = f"connections to the data port ({listener.family.name}) are not accepted"
        with listener:
            while not self._closing:
                try:
                    self._accept(listener, admission, serve)
                except (OSError, RuntimeError) as error:  # no descriptor, memory or thread to be had
                    if self._closing:
                        return
                    self._failures.failed(what, error)
                    time.sleep(ACCEPT_RETRY_S)
                else:
                    self._failures.recovered(what)

    def _accept(self, listener: socket.socket, admission: Admission, serve: Callable[[socket.socket], None]) -> None:
        sock, _ = listener.accept()
        try:
            self._start(lambda: self._connection(sock, admission, serve), "data-connection")
        except BaseException:
            sock.close()
            raise

    def _connection(self, sock: socket.socket, admission: Admission, serve: Callable[[socket.socket], None]) -> None:
        with sock:
            try:
                sock.settimeout(STALL_S)
                admission.admit(sock)
                if self._closing:  # this one may have come too late to be ended with the others
                    return
                serve(sock)
            except Exception as error:  # noqa: BLE001  (whatever a peer sends costs its own connection)
                self._end(sock, error)
            finally:
                admission.left(sock)

    def _end(self, sock: socket.socket, error: Exception) -> None:
        """Says why on the connection that ends with this error, where the other side can do something about it."""
        match error:
            case TransportFailed() | TlsWanted():
                self._refuse(sock, error)
            case LinkBroken():
                log.debug("data connection ended: %s", error)
            case LaminarError():
                self._refuse(sock, error)
            case _:
                self._failures.failed("a data connection was ended", error)
                self._refuse(sock, LaminarError(f"an unexpected error: {type(error).__name__}"))

    def _refuse(self, sock: socket.socket, error: LaminarError) -> None:
        self._refusals.say(logging.INFO, f"refused on the data port: {error}")
        try:
            frames.send_message(sock, Kind.REFUSED, frames.Refusal.of(error))
        except LinkBroken:
            log.debug("the peer left before the refusal")

    def _serve_peer(self, sock: socket.socket) -> None:
        if self._access is None:
            self._serve_greeted(sock, frames.receive_greeting(sock))
            return
        secured, greeting = self._access.accept(sock, self._refuse)
        self._by_tcp.welcome(sock)  # whoever has proven a key is no stranger
        with secured:
            try:
                check_greeting(secured, greeting, self._address)
                self._serve_greeted(secured, greeting)
            except Exception as error:  # noqa: BLE001  (as above, and the reason is protected, too)
                self._end(secured, error)

    def _serve_greeted(self, sock: socket.socket, greeting: Greeting) -> None:
        if greeting.purpose == "fetch":
            self._serve_fetch(sock, greeting)
        elif greeting.purpose == "write":
            self._serve_write(sock, greeting)
        else:
            raise Conflict("descriptors pass only over the unix socket", hint='greet with purpose "write"')

    # ---- a peer fetches

    def _serve_fetch(self, sock: socket.socket, greeting: Greeting) -> None:
        snapshot = self._find(sock, greeting)
        _check_epoch(snapshot, greeting.epoch)
        self._by_tcp.welcome(sock)
        with snapshot.linked(greeting.name if greeting.late else "", LATE_JOINERS_MAX):
            self._lend(sock, greeting, snapshot)
            frames.send_message(sock, Kind.WELCOME, frames.Welcome(snapshot.manifest, []))
            while True:
                self._serve_request(sock, snapshot)

    def _lend(self, sock: socket.socket, greeting: Greeting, snapshot: Snapshot) -> None:
        """Serves a peer that speaks nixl, if this relay does; that ends by an exception, as any fetch does."""
        if self._nixl is None or "nixl" not in greeting.transports:
            return
        try:
            process = self._nixl.take(lambda: frames.send_all(sock, Header(Kind.ALIVE).pack()))
        except (TransportFailed, OutOfCapacity) as error:
            log.warning("serving %s over tcp: %s", greeting.name, error)
            return

        def pause(num_bytes: int) -> None:
            self._pause_alive(sock, num_bytes)

        def await_chunk(index: int, from_byte: int, suspect: bool) -> bytes:
            return self._await_chunk(sock, snapshot, index, from_byte, suspect=suspect)

        NixlLender(sock, snapshot, self._nixl, process, await_chunk, pause).run()

    def _pause_alive(self, sock: socket.socket, num_bytes: int) -> None:
        """Waits until the rate permits bytes that the peer reads by itself, with signs of life."""
        self.bytes_sent += num_bytes
        alive_at = time.monotonic()
        for start in range(0, num_bytes if self._pacer.rate_bytes_s else 0, _PACED_BYTES):
            self._pacer.pause(min(_PACED_BYTES, num_bytes - start))
            if time.monotonic() - alive_at > frames.HEARTBEAT_S:
                frames.send_all(sock, Header(Kind.ALIVE).pack())
                alive_at = time.monotonic()

    def _serve_request(self, sock: socket.socket, snapshot: Snapshot) -> None:
        kind, flags, index, from_byte = frames.REQUEST.unpack(frames.receive_bytes(sock, frames.REQUEST.size))
        if kind == Kind.GET:
            with snapshot.reading(lambda: _shut(sock)):
                self._answer(sock, snapshot, index, from_byte, suspect=bool(flags & frames.FLAG_SUSPECT))
        elif kind != Kind.ALIVE:
            raise LinkBroken(f"the peer sent a request of unknown kind {kind}")

    def _find(self, sock: socket.socket, greeting: Greeting) -> Snapshot:
        deadline = time.monotonic() + OPEN_WAIT_S
        while time.monotonic() < deadline:
            snapshot = self._provider.find(greeting.model, greeting.version, frames.HEARTBEAT_S)
            if snapshot is not None:
                return snapshot
            frames.send_all(sock, Header(Kind.ALIVE).pack())
        raise NotFound(f"version {greeting.version} of {greeting.model} did not reach this relay in {OPEN_WAIT_S} s")

    def _answer(self, sock: socket.socket, snapshot: Snapshot, index: int, from_byte: int, *, suspect: bool) -> None:
        chunk_digest = self._await_chunk(sock, snapshot, index, from_byte, suspect=suspect)
        rest = snapshot.place(index)[from_byte:]
        fd, start, _ = snapshot.where(index)
        header = Header(Kind.DATA, index, from_byte, len(rest), chunk_digest)
        frames.send_all(sock, header.pack(), socket.MSG_MORE)
        self._send(sock, rest, fd, start + from_byte)

    def _await_chunk(
        self, sock: socket.socket, snapshot: Snapshot, index: int, from_byte: int, *, suspect: bool
    ) -> bytes:
        """The chunk's digest once it is here, ALIVE until then. Corrupt when a suspect one is bad here."""
        length = snapshot.chunks.chunk(index).length
        if from_byte >= length:
            raise LinkBroken(f"byte {from_byte} of a chunk of {length} requested")
        while (chunk_digest := snapshot.wait_chunk(index, frames.HEARTBEAT_S)) is None:
            frames.send_all(sock, Header(Kind.ALIVE).pack())
        if suspect:
            try:
                snapshot.recheck(index)
            except Corrupt as error:
                self._provider.chunk_is_bad(snapshot, error)
                raise
        return chunk_digest

    def _send(self, sock: socket.socket, rest: memoryview, fd: int, start: int) -> None:
        """The bytes `rest`, which lie in a file of the pool from `start` on.

        `send_file` hands the file's own pages to the kernel. The last of them may still wait to be sent when this
        returns and `reading()` ends. A version that retires just then gives its memory to the next one, whose bytes the
        peer then receives: their digest does not match, and the peer requests the chunk again.
        """
        self.bytes_sent += len(rest)
        copied = not frames.is_plain(sock) or frames.is_paced(sock)
        step = len(rest) if self._pacer.rate_bytes_s is None else _PACED_BYTES
        for at in range(0, len(rest), step):
            piece = rest[at : at + step]
            if copied:
                frames.send_all(sock, piece)
            else:
                frames.send_file(sock, fd, start + at, len(piece))
            self._pacer.pause(len(piece))

    # ---- a publisher writes

    def _serve_write(self, sock: socket.socket, greeting: Greeting) -> None:
        snapshot = self._provider.writable(greeting.model, greeting.version, greeting.token)
        self._by_tcp.welcome(sock)
        missing = frames.ranges(snapshot.missing())
        frames.send_message(sock, Kind.WELCOME, frames.Welcome(snapshot.manifest, missing))
        while (header := frames.receive_header(sock)).kind is not Kind.DONE:
            if header.kind is Kind.DATA:
                with snapshot.reading(lambda: _shut(sock)):
                    _take_chunk(sock, snapshot, header)
            elif header.kind is Kind.ALIVE:
                snapshot.check_open()  # while a slow tensor is read, its version may have been given up
            else:
                raise LinkBroken(f"unexpected {header.kind.name} from a publisher")
        frames.send_all(sock, Header(Kind.DONE).pack())

    def _serve_local(self, sock: socket.socket, group: int | None) -> None:
        _check_user(sock, group)
        greeting = frames.receive_greeting(sock)
        if greeting.purpose != "map":
            raise Conflict(f"purpose {greeting.purpose!r} on the unix socket", hint="use the data port")
        if greeting.to not in ("", self._instance):  # empty: of an earlier release
            raise NotFound("another relay is meant than the one at this socket", hint="use the data port")
        snapshot = self._provider.writable(greeting.model, greeting.version, greeting.token)
        self._by_unix.welcome(sock)
        frames.send_message(sock, Kind.WELCOME, frames.Welcome(snapshot.manifest, [], instance=self._instance))
        with snapshot.reading(lambda: _shut(sock)):
            snapshot.written_elsewhere = True  # before the first descriptor leaves, and while it cannot be given back
            fds = [file.fd for file in snapshot.files]
            for start in range(0, len(fds), frames.FDS_PER_MESSAGE):
                socket.send_fds(sock, [b"F"], fds[start : start + frames.FDS_PER_MESSAGE])
        sock.settimeout(PUBLISHER_SILENCE_S)
        while (header := frames.receive_header(sock)).kind is not Kind.DONE:
            if header.kind is Kind.PRESENT:
                snapshot.chunks.chunk(header.index)  # refuses a number out of range
                snapshot.present(header.index, header.digest)
            elif header.kind is Kind.ALIVE:
                snapshot.check_open()  # while a slow tensor is read, its version may have been given up
            else:
                raise LinkBroken(f"unexpected {header.kind.name} from a publisher")
        frames.send_all(sock, Header(Kind.DONE).pack())


def _take_chunk(sock: socket.socket, snapshot: Snapshot, header: Header) -> None:
    with snapshot.writing(header.index) as place:
        if header.length != len(place):
            raise LinkBroken(f"chunk {header.index} has {len(place)} bytes, {header.length} came")
        frames.receive_exactly(sock, place)
        if digest(place) != header.digest:
            raise Corrupt(f"chunk {header.index} of {snapshot} arrived with a wrong digest", hint="send it again")
        snapshot.present(header.index, header.digest)


def _check_user(sock: socket.socket, group: int | None) -> None:
    """Forbidden unless the process that connected runs as this user, root, or in `group`. Whatever the socket's mode:
    that stands a moment after it is there, and may be changed."""
    peer = peer_of(sock.fileno())
    if not admits(peer, group):
        raise Forbidden(f"user {peer.uid} may not publish through the memory of this relay", hint="--group")


def _check_epoch(snapshot: Snapshot, epoch: Epoch | None) -> None:
    held = snapshot.manifest.epoch
    if epoch is not None and epoch != held:
        raise StaleEpoch(f"{snapshot} was begun in epoch {held}, requested in {epoch}")


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("socket was already down")
