"""Frames of the data port. Fixed headers, so that the byte loop parses nothing.

A connection opens with a greeting (magic, length, JSON) and its answer (WELCOME or REFUSED with JSON). Then:
- purpose "fetch": the peer sends requests (chunk number, first byte wanted) and ALIVE; the holder answers each in
  order with a header and the bytes, and ALIVE while a chunk is not there yet; over nixl with READY instead of bytes,
  which the peer reads by itself and then reports with TAKEN;
- purpose "write": the publisher sends DATA headers with bytes, then DONE; the relay answers DONE when it has all;
- purpose "map" (unix socket only): the relay passes the descriptors of the files; the publisher sends PRESENT
  headers, then DONE; the relay answers DONE.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, TypeVar

import msgspec

from paramserver.config import show_bytes
from paramserver.core.records import DIGEST_BYTES, Epoch, Manifest, check_model_name, check_peer_name
from protos.decoding import decode_json
from protos.errors import BY_CODE, LaminarError, Unavailable

MAGIC = b"LMN1"
_OPENING = struct.Struct("!4sI")
REQUEST = struct.Struct("!BBII")  # kind, flags, chunk, from byte
HEADER = struct.Struct(f"!BIII{DIGEST_BYTES}s")  # kind, chunk, from byte, length, digest
FLAG_SUSPECT = 1
JSON_BYTES_MAX = 64 << 20
GREETING_S = 5.0
WELCOME_S = 60.0  # the holder itself refuses long before
GREETING_BYTES_MAX = 16 << 10  # names and a token: from strangers no more is taken in
FDS_PER_MESSAGE = 128  # the kernel takes at most 253
NO_DIGEST = bytes(DIGEST_BYTES)

CONGESTION_CONTROL = "cubic"
"""Some hosts default to bbr, whose pacing takes 1.2 x the processor time of cubic for the same bytes on a fast link.

It is chosen before a connection is made: the kernel goes on pacing a connection that began under bbr, whatever it is
given later, and one whose file pages it sends as they lie (`send_file`) then takes twice the time.
"""

_OUT_OF_ORDER_AT = 224  # tcp_info.tcpi_rcv_ooopack: Linux 5.4, include/uapi/linux/tcp.h

HEARTBEAT_S = 0.1
SILENCE_S = 0.5
LOOK_S_MAX = 2 * HEARTBEAT_S
"""Silence that one wait counts for at most: where it took longer, this host itself stood still."""


class Kind(IntEnum):
    ALIVE = 0
    GET = 1
    DATA = 2
    PRESENT = 3
    DONE = 4
    WELCOME = 5
    REFUSED = 6
    READY = 7
    TAKEN = 8
    CHALLENGE = 9


class Greeting(msgspec.Struct, frozen=True):
    """The first message of a connection: what it is for. `epoch` None: a reader that takes whatever is sealed."""

    purpose: Literal["fetch", "write", "map"]
    model: str
    version: int
    name: str
    epoch: Epoch | None = None
    token: str = ""
    late: bool = False  # a relay that joined after the version began; a holder serves few of these at a time
    transports: list[str] = []  # ways of moving bytes that the peer knows besides this connection
    to: str = (
        ""  # the relay that is meant: its address, checked where credentials prove the greeting; (map) its instance
    )

    def __post_init__(self) -> None:
        check_model_name(self.model)
        check_peer_name(self.name)


class Lent(msgspec.Struct, frozen=True):
    """The holder's files, to be read with NIXL: its metadata, and the address at which each begins (0: empty)."""

    metadata: bytes
    addresses: list[int]


class Welcome(msgspec.Struct, frozen=True):
    """The holder has the version. `missing`: ranges [first, end) of chunks not yet written here."""

    manifest: Manifest
    missing: list[tuple[int, int]]
    nixl: Lent | None = None  # chunks are not sent but READY to be read, until TAKEN
    instance: str = ""  # (map) of the relay that listens at this socket


class Refusal(msgspec.Struct, frozen=True):
    """An error, in the error vocabulary."""

    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: LaminarError) -> Refusal:
        return cls(error.code, error.message, error.hint)

    def error(self) -> LaminarError:
        kind = _BROKEN.get(self.code) or BY_CODE.get(self.code, LaminarError)
        return kind(self.message, hint=self.hint)


@dataclass(frozen=True, slots=True)
class Header:
    """One frame from the side that has bytes."""

    kind: Kind
    index: int = 0
    from_byte: int = 0
    length: int = 0
    digest: bytes = NO_DIGEST

    def pack(self) -> bytes:
        return HEADER.pack(self.kind, self.index, self.from_byte, self.length, self.digest)


class LinkBroken(Unavailable):
    """The connection ended or fell silent; what it carried can be requested elsewhere."""

    code = "link_broken"


class Partly(BlockingIOError):
    """A part of a record came, none of which may be handed out yet: that is progress, and the call is to be made
    again."""


class TransportFailed(LinkBroken):
    """The transport besides this connection failed, here or at the other end."""

    code = "transport_failed"


class TlsWanted(LinkBroken):
    """The holder takes no connection without TLS."""

    code = "tls_wanted"


_BROKEN: dict[str, type[LaminarError]] = {kind.code: kind for kind in (TransportFailed, TlsWanted)}
_Message = TypeVar("_Message", bound=msgspec.Struct)


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


_End = TypeVar("_End", bound=HasDescriptor)


def send_all(sock: socket.socket, data: bytes | memoryview, flags: int = 0) -> None:
    """Like `sendall`, but the socket's timeout bounds each piece of progress, not the whole."""
    view = memoryview(data)
    try:
        while view:
            view = view[sock.send(view, flags) :]
    except OSError as error:
        raise LinkBroken(f"sending failed: {error}") from error


def send_file(sock: socket.socket, fd: int, offset: int, num_bytes: int) -> None:
    """Sends a range of a file like `send_all`, from its own pages: the only copy is the one that the receiver makes.

    So until the other side's kernel has them, what is written into that range meanwhile is what is sent.
    """
    try:
        while num_bytes:
            try:
                sent = os.sendfile(sock.fileno(), fd, offset, num_bytes)
            except BlockingIOError:
                _wait_writable(sock)
                continue
            if sent == 0:
                raise LinkBroken(f"the file ends at byte {offset}, {num_bytes} too soon")
            offset, num_bytes = offset + sent, num_bytes - sent
    except OSError as error:
        raise LinkBroken(f"sending failed: {error}") from error


def _wait_writable(sock: socket.socket) -> None:
    timeout_s = sock.gettimeout()
    waiting = select.poll()
    waiting.register(sock, select.POLLOUT)
    if not waiting.poll(None if timeout_s is None else timeout_s * 1000):
        raise TimeoutError("timed out")


def readable(ends: Sequence[_End], timeout_s: float | None) -> list[_End]:
    """Those from which something can be received, their ends and errors included; none after `timeout_s`.

    Unlike `select.select` it takes descriptors of any number: with credentials a relay may have thousands.
    """
    waiting = select.poll()
    by_descriptor = {end.fileno(): end for end in ends}
    for descriptor in by_descriptor:
        waiting.register(descriptor, select.POLLIN)
    found = waiting.poll(None if timeout_s is None else timeout_s * 1000)
    return [by_descriptor[descriptor] for descriptor, _ in found]


def receive_exactly(sock: socket.socket, into: memoryview, by: float | None = None) -> None:
    """Fills `into`; the socket's timeout bounds each piece of progress, the monotonic clock's `by` the whole."""
    filled, usual_s = 0, sock.gettimeout() if by is not None else None
    try:
        while filled < len(into):
            if by is not None:
                left_s = max(0.001, by - time.monotonic())
                sock.settimeout(left_s if usual_s is None else min(left_s, usual_s))
            try:
                num = sock.recv_into(into[filled:])
            except Partly:
                num = None
            if num == 0:
                raise LinkBroken("the peer closed the connection")
            filled += num or 0
            if by is not None and filled < len(into) and time.monotonic() > by:
                raise TimeoutError(f"timed out after {filled} of {len(into)} bytes")
        if by is not None:
            sock.settimeout(usual_s)
    except OSError as error:
        raise LinkBroken(f"receiving failed: {error}") from error


def receive_bytes(sock: socket.socket, num: int, by: float | None = None) -> bytes:
    buffer = bytearray(num)
    receive_exactly(sock, memoryview(buffer), by)
    return bytes(buffer)


def receive_header(sock: socket.socket, by: float | None = None) -> Header:
    kind, index, from_byte, length, digest = HEADER.unpack(receive_bytes(sock, HEADER.size, by))
    return Header(_kind(kind), index, from_byte, length, digest)


def _kind(value: int) -> Kind:
    try:
        return Kind(value)
    except ValueError as error:
        raise LinkBroken(f"the peer sent a frame of unknown kind {value}") from error


def send_greeting(sock: socket.socket, greeting: Greeting) -> None:
    body = msgspec.json.encode(greeting)
    send_all(sock, _OPENING.pack(MAGIC, len(body)) + body)


def receive_greeting(sock: socket.socket) -> Greeting:
    """Within GREETING_S, however many bytes come at a time: a stranger must not hold a thread."""
    usual_s, by = sock.gettimeout(), time.monotonic() + GREETING_S
    magic, length = _OPENING.unpack(receive_bytes(sock, _OPENING.size, by))
    if magic != MAGIC:
        raise LinkBroken("the peer does not speak the data protocol")
    greeting = receive_json(sock, length, Greeting, GREETING_BYTES_MAX, by)
    sock.settimeout(usual_s)
    return greeting


def send_message(sock: socket.socket, kind: Kind, message: msgspec.Struct) -> None:
    body = msgspec.json.encode(message)
    send_all(sock, Header(kind, length=len(body)).pack() + body)


def receive_welcome(sock: socket.socket, *, silence_s: float) -> Welcome:
    """Waits through ALIVE frames. Raises the error of a refusal, or LinkBroken."""
    by = time.monotonic() + WELCOME_S
    sock.settimeout(silence_s)
    while time.monotonic() < by:
        header = receive_header(sock, by)
        if header.kind is Kind.WELCOME:
            return receive_json(sock, header.length, Welcome, by=by)
        if header.kind is Kind.REFUSED:
            raise receive_refusal(sock, header, by=by)
        if header.kind is not Kind.ALIVE:
            raise LinkBroken(f"expected a welcome, got {header.kind.name}")
    raise LinkBroken(f"no welcome within {WELCOME_S} s")


def receive_refusal(
    sock: socket.socket, header: Header, bytes_max: int = JSON_BYTES_MAX, by: float | None = None
) -> LaminarError:
    return receive_json(sock, header.length, Refusal, bytes_max, by).error()


def receive_json(
    sock: socket.socket,
    length: int,
    kind: type[_Message],
    bytes_max: int = JSON_BYTES_MAX,
    by: float | None = None,
) -> _Message:
    """A message of `length` bytes, of at most `bytes_max`, before `by` on the monotonic clock."""
    if length > bytes_max:
        raise LinkBroken(f"a message of {show_bytes(length)} announced")
    return decode(receive_bytes(sock, length, by), kind)


def decode(raw: bytes, kind: type[_Message]) -> _Message:
    try:
        return decode_json(raw, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # nested too deep, it is the last of these
        raise LinkBroken(f"a malformed message: {error}") from error


def ranges(indices: list[int]) -> list[tuple[int, int]]:
    """Ascending chunk numbers as [first, end) ranges."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def connect(address: str, timeout_s: float, *, bind_host: str = "") -> socket.socket:
    """A tuned TCP connection to "host:port", from `bind_host` where given. Raises LinkBroken."""
    host, _, port = address.rpartition(":")
    try:
        return _connected(host, int(port), timeout_s, bind_host)
    except (OSError, ValueError) as error:
        raise LinkBroken(f"cannot connect to {address}: {error}") from error


def _connected(host: str, port: int, timeout_s: float, bind_host: str) -> socket.socket:
    """Like `socket.create_connection`, which has no place to tune a socket before it connects."""
    failed = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            tune(sock)
            sock.settimeout(timeout_s)
            if bind_host:
                sock.bind((bind_host, 0))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failed = error
        else:
            return sock
    raise failed


def tune(sock: socket.socket) -> None:
    """No delay of small frames; CONGESTION_CONTROL where the host lets us, else its default.

    For a socket that is not connected yet, or one that listens: what it accepts inherits both.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EPERM):
            raise


def wait_in_kernel(sock: socket.socket, timeout_s: float) -> None:
    """Like `settimeout`, but the calls themselves wait, so that one which needs all its bytes is one call.

    A call in which nothing came or went raises BlockingIOError.
    """
    if isinstance(sock, ssl.SSLSocket):  # it waits by itself, and does not let the kernel's limit out
        sock.settimeout(timeout_s)
        return
    sock.settimeout(None)
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def is_plain(sock: socket.socket) -> bool:
    """Whether what is sent on its descriptor goes out as it is: neither sealed nor by TLS."""
    return type(sock) is socket.socket


def peek(sock: socket.socket) -> bytes:
    """The first byte that comes, which stays there to be received; empty at the end."""
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except OSError as error:
        raise LinkBroken(f"receiving failed: {error}") from error


def is_paced(sock: socket.socket) -> bool:
    """Under bbr, where that is the host's default and we may not choose: copies cost less than pages then."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"


def out_of_order(sock: socket.socket) -> int:
    """Segments that came behind a lost one, since the connection began: bytes that the kernel keeps until the lost
    one is sent again. 0 where the kernel does not report it. What the other side repeats for want of answers is not in
    it.
    """
    if not hasattr(socket, "TCP_INFO"):
        return 0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OUT_OF_ORDER_AT + 4)
    return int.from_bytes(info[_OUT_OF_ORDER_AT:], sys.byteorder)
