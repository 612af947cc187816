"""A person in the middle of data connections, who knows the protocol: takes each direction apart into its messages,
and changes, drops, repeats, swaps, cuts and forges what an `Attack` says.

    with InBetween("127.0.0.2:7071", "127.0.0.1:7071") as between:  # stands at the first address, leads to the second
        attack = between.attack(flip("challenge"))
        ...
        assert attack.fired.is_set()

Invariants:
- an attack is for one connection: the next one that opens, or the next whose greeting has its `purpose`. Where that
  has no such message, it waits for the one after it;
- without an attack every byte passes, and in its order;
- what passed is kept, message by message, of connections that `keep` says so of.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

import msgspec

from paramserver.data.frames import HEADER, Kind

Side = Literal["requests", "answers"]
"""What the requester sends, and what the holder does."""

_TAG_BYTES, _PROOF_BYTES = 16, 32
_TLS_HEADER = struct.Struct("!BHH")
_TLS_TYPES = {20: "tls change", 21: "tls alert", 22: "tls hello", 23: "tls"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A message. `name`: hello, greeting, proof, challenge, refused, record, tls, ...; `number`: of those with that
    name in its direction, from 0."""

    side: Side
    name: str
    number: int
    data: bytes


class Wire:
    """One connection: from the requester to this place, and from here to the holder."""

    def __init__(self, requester: socket.socket, holder: socket.socket) -> None:
        self._to: dict[Side, socket.socket] = {"requests": holder, "answers": requester}
        self.passed: list[Piece] = []
        self.over = threading.Event()  # both directions have ended

    def send(self, side: Side, data: bytes) -> bool:
        """False where nobody is there any more."""
        try:
            self._to[side].sendall(data)
        except OSError:
            return False
        return True

    def take(self, side: Side, num: int) -> bytes:
        """The next bytes of that direction, which then nobody else gets."""
        sock = self._to["answers" if side == "requests" else "requests"]
        data = b""
        while len(data) < num and (more := sock.recv(num - len(data))):
            data += more
        return data

    def end(self, side: Side, *, reset: bool = False) -> None:
        """No more goes that way; `reset`: nor the other way, and at once."""
        sock = self._to[side]
        with contextlib.suppress(OSError):
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)
                sock.close()
            else:
                sock.shutdown(socket.SHUT_WR)

    def cut(self, *, reset: bool = False) -> None:
        for side in self._to:
            self.end(side, reset=reset)

    def sent(self, side: Side) -> bytes:
        """All that the end of that side has sent, as it was when it came here."""
        return b"".join(piece.data for piece in self.passed if piece.side == side)


Match = Callable[[Piece], bool]
Act = Callable[[Wire, Piece], bytes]
"""What goes on in place of the message."""


@dataclass(eq=False)
class Attack:
    """What is done to the first message that `match` is true of, and what to those after it: nothing, by default."""

    match: Match
    act: Act
    then: Act = lambda _, piece: piece.data
    purpose: str = ""  # of the greeting of the connection that is meant; "": the next one that opens
    target: str = ""  # it is led there
    fired: threading.Event = field(default_factory=threading.Event)

    def pass_on(self, wire: Wire, piece: Piece) -> bytes:
        if self.fired.is_set():
            return self.then(wire, piece)
        if not self.match(piece):
            return piece.data
        self.fired.set()
        return self.act(wire, piece)


class InBetween:
    """Stands at `address`, where those who mean the relay at `target` connect ("host:port" each)."""

    def __init__(self, address: str, target: str) -> None:
        self.address, self.target = address, target
        self._listener = socket.create_server(_split(address))
        self._attacks: deque[Attack] = deque()
        self._mutex = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._wires: list[Wire] = []
        self.kept: list[Wire] | None = None  # connections whose messages are kept, where that is a list
        self.num_connections = 0
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for wire in list(self._wires):
            wire.cut(reset=True)
        for thread in self._threads:
            thread.join(60.0)

    def attack(self, attack: Attack, *, purpose: str = "") -> Attack:
        attack.purpose = purpose
        with self._mutex:
            self._attacks.append(attack)
        return attack

    @property
    def num_attacks(self) -> int:
        """Those that no connection has met yet."""
        with self._mutex:
            return len(self._attacks)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Wire]]:
        self.kept = kept = []
        yield kept
        self.kept = None

    def _take(self, purpose: str) -> Attack | None:
        with self._mutex:
            found = next((attack for attack in self._attacks if attack.purpose == purpose), None)
            if found is not None:
                self._attacks.remove(found)
            return found

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                requester, _ = self._listener.accept()
                self.num_connections += 1
                self._start(lambda requester=requester: self._serve(requester))  # type: ignore[misc]

    def _serve(self, requester: socket.socket) -> None:
        attack = self._take("")
        target = _split((attack and attack.target) or self.target)
        with requester, contextlib.suppress(OSError), socket.create_connection(target, 10.0) as holder:
            holder.settimeout(None)
            wire = Wire(requester, holder)
            self._wires.append(wire)
            if self.kept is not None:
                self.kept.append(wire)
            attacks = [attack] if attack else []
            back = self._start(lambda: self._pump(wire, "answers", holder, attacks))
            self._pump(wire, "requests", requester, attacks)
            back.join()
            with self._mutex:
                self._attacks.extendleft(attack for attack in attacks if not attack.fired.is_set())
            self._wires.remove(wire)
            wire.over.set()

    def _pump(self, wire: Wire, side: Side, source: socket.socket, attacks: list[Attack]) -> None:
        numbers: dict[str, int] = {}
        try:
            for name, data in _messages(side, source):
                piece = Piece(side, name, numbers.setdefault(name, 0), data)
                numbers[name] += 1
                if self.kept is not None:
                    wire.passed.append(piece)
                if name == "greeting" and not attacks and (found := self._take(_purpose(data))):
                    attacks.append(found)
                wire.send(side, attacks[0].pass_on(wire, piece) if attacks else data)
        except OSError:  # it was reset, or an attack has closed it
            wire.cut(reset=True)
        wire.end(side)


class _Short(Exception):
    """The end came within a message; the argument has what of it came."""


def _messages(side: Side, sock: socket.socket) -> Iterator[tuple[str, bytes]]:
    """All messages of a direction with their names, until the end."""

    def read(num: int) -> bytes:
        data = b""
        while len(data) < num:
            if not (more := sock.recv(num - len(data))):
                raise _Short(data)
            data += more
        return data

    def longer(head: bytes, length: int) -> bytes:
        try:
            return head + read(length)
        except _Short as short:
            raise _Short(head + short.args[0]) from None

    def sized(head: bytes, besides: int = 0) -> bytes:
        return longer(head, int.from_bytes(head[-4:], "big") + besides)

    def opening(first: bytes) -> Iterator[tuple[str, bytes]]:
        if side == "answers":
            yield frame(first)
            return
        yield "hello", sized(longer(first, 7))
        yield "greeting", sized(read(4))
        yield "proof", read(_PROOF_BYTES)

    def frame(first: bytes) -> tuple[str, bytes]:
        head = longer(first, HEADER.size - 1)
        name = {Kind.CHALLENGE: "challenge", Kind.REFUSED: "refused"}.get(Kind(head[0]), "frame")
        return name, longer(head, HEADER.unpack(head)[3])

    def tls(first: bytes) -> tuple[str, bytes]:
        head = longer(first, _TLS_HEADER.size - 1)
        return _TLS_TYPES.get(head[0], "tls other"), longer(head, _TLS_HEADER.unpack(head)[2])

    try:
        first = read(1)
        if first[0] in _TLS_TYPES:
            while True:
                yield tls(first)
                first = read(1)
        yield from opening(first)
        while first := read(1):
            yield frame(first) if first[0] == Kind.REFUSED else ("record", sized(longer(first, 3), _TAG_BYTES))
    except _Short as short:
        if short.args[0]:
            yield "rest", short.args[0]


def _purpose(greeting: bytes) -> str:
    return str(msgspec.json.decode(greeting[4:])["purpose"])


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
