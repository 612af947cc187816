"""Data connections between those who have a fleet's credentials: how they open, and what protects them then.

Either every byte goes through a `SealedSocket` under keys that follow from the fleet key, or through TLS with the
certificates of both ends. In either case both ends prove first that they know the fleet key
(`paramserver.core.handshake`); protos/hop-protocol.md has the messages.

Invariants:
- whoever has credentials neither makes nor takes a connection without;
- a holder learns the model and version that are wanted from nobody who has not proven the key, and a requester sends
  them to nobody who has not;
- a refusal that comes before the proof is believed in two things alone: that TLS is wanted, which protects more, and
  that the holder is full, which makes the requester ask again. Any other ends one connection, as whoever stands in
  between can in any case.
"""

from __future__ import annotations

import errno
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paramserver.core.access import data_refusal
from paramserver.core.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    Opening,
    Protection,
    is_proof,
    key_id,
    key_in_common,
)
from paramserver.data import frames
from paramserver.data.frames import Greeting, Kind, LinkBroken
from protos.access.credentials import CREDENTIALS_VARIABLE, FLEET_KEYS_MAX, Credentials, Material
from protos.access.tls import new_context, peer_of
from protos.errors import Conflict, Forbidden, LaminarError, OutOfCapacity, Unauthenticated
from protos.foreign_text import one_line

MAGIC = b"LMA1"
HELLO_BYTES_MAX = 1 << 10
TLS_PIECE_BYTES_MAX = 256 << 10
_LENGTH = struct.Struct("!I")
_TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection; each of our own begins with a letter."""
_HINT = f"use credentials of its fleet ({CREDENTIALS_VARIABLE})"


Refuse = Callable[[socket.socket, LaminarError], None]
"""Says on a connection why it ends."""

Opened = tuple[socket.socket, float]
"""A connection, and the network's round trip: seconds that its making took, without what was said on it."""


class Hello(msgspec.Struct, frozen=True):
    """The requester's first message. `keys`: the ids of the fleet keys that it knows."""

    nonce: bytes
    keys: list[bytes]


class Challenge(msgspec.Struct, frozen=True):
    """The holder's answer: the key that it chose, and the proof that it knows it."""

    nonce: bytes
    key: bytes
    proof: bytes


class TlsSocket(ssl.SSLSocket):
    """An SSLSocket that is used like a plain one: with flags, and without an exception of its own for a timeout."""

    def send(self, data: Any, flags: int = 0) -> int:
        """A piece at a time: the timeout is that of one call, and a peer on a slow link takes each in time."""
        return super().send(memoryview(data).cast("B")[:TLS_PIECE_BYTES_MAX])

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        view, filled = view[:nbytes] if nbytes else view, 0
        while filled < len(view):  # a record of TLS has 16 KiB
            try:
                num = super().recv_into(view[filled:])
            except TimeoutError:
                if filled:
                    break
                raise BlockingIOError(errno.EAGAIN, "nothing came in time") from None
            filled += num
            if num == 0 or not flags & socket.MSG_WAITALL:
                break
        return filled

    def shutdown(self, how: int) -> None:
        """The base class first forgets that there was TLS: whoever sends meanwhile, in another thread, would do so in
        the clear."""
        socket.socket.shutdown(self, how)


class UnprovenRefusal(LinkBroken):
    """A refusal by whoever has not proven the fleet key: the relay, which knows another one, or anybody on the way."""


class UnprovenFull(UnprovenRefusal, OutOfCapacity):
    """A holder that is full says so before it listens: it is asked again soon, and has not failed. Whoever made that up
    has it asked more often than if he broke the connection."""


class DataAccess:
    """How a process with credentials opens and takes data connections. `tls`: it wants TLS of every connection."""

    def __init__(self, credentials: Credentials, *, tls: bool = False) -> None:
        self._credentials, self.tls = credentials, tls
        self._contexts: dict[bool, tuple[Material, ssl.SSLContext]] = {}  # by whether it is the serving side's

    # ---- the requester

    def open(self, address: str, timeout_s: float, greeting: Greeting, *, bind_host: str = "") -> Opened:
        """A protected connection to the holder at `address`, which has got the greeting. Raises LinkBroken, or what
        the holder refused with once it had proven itself."""
        if not self.tls:
            try:
                return self._open("mac", address, timeout_s, greeting, bind_host)
            except frames.TlsWanted:
                pass
        return self._open("tls", address, timeout_s, greeting, bind_host)

    def _open(
        self, protection: Protection, address: str, timeout_s: float, greeting: Greeting, bind_host: str
    ) -> Opened:
        sock, rtt_s = _connect(address, timeout_s, bind_host)
        try:
            if protection == "tls":
                sock = self._wrap_tls(sock, address)
            return self._greet(sock, protection, address, greeting), rtt_s
        except BaseException:
            sock.close()
            raise

    def _wrap_tls(self, sock: socket.socket, address: str) -> socket.socket:
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            wrapped = self._context(serving=False).wrap_socket(sock, server_hostname=host)
        except OSError as error:
            raise LinkBroken(f"no TLS with {address}: {_reason(error)}") from error
        try:
            if (role := peer_of(wrapped).role) != "relay":
                raise LinkBroken(f"{address} has a certificate with the role {role}, not relay")
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _greet(self, sock: socket.socket, protection: Protection, address: str, greeting: Greeting) -> socket.socket:
        keys, nonce = self._credentials.material.fleet_keys, secrets.token_bytes(NONCE_BYTES)
        hello = msgspec.json.encode(Hello(nonce, [key_id(key) for key in keys]))
        by = time.monotonic() + frames.GREETING_S  # whoever is in between may let each byte of an answer come alone
        frames.send_all(sock, MAGIC + _LENGTH.pack(len(hello)) + hello)
        header = frames.receive_header(sock, by)
        if header.kind is Kind.REFUSED:
            refusal = frames.receive_refusal(sock, header, HELLO_BYTES_MAX, by)
            raise refusal if protection == "tls" else _unproven(address, refusal)
        if header.kind is not Kind.CHALLENGE:
            raise LinkBroken(f"expected a challenge, got {header.kind.name}")
        challenge = frames.receive_json(sock, header.length, Challenge, HELLO_BYTES_MAX, by)
        opening, key = Opening(protection, nonce, challenge.nonce), key_in_common(keys, [challenge.key])
        if key is None or not is_proof(challenge.proof, opening.holder_proof(key)):
            raise LinkBroken(f"{address} does not prove that it knows the fleet key")
        body = msgspec.json.encode(msgspec.structs.replace(greeting, to=address))
        frames.send_all(sock, _LENGTH.pack(len(body)) + body + opening.requester_proof(key, body))
        if protection == "tls":
            return sock
        return _sealed(sock, sends=opening.key_to_holder(key, body), receives=opening.key_to_requester(key, body))

    # ---- the holder

    def accept(self, sock: socket.socket, refuse: Refuse) -> tuple[socket.socket, Greeting]:
        """A protected connection over `sock`, which stays open and is used no more, and the greeting of whoever has
        proven the key. Raises what to refuse with in the clear, where nothing else is agreed on; within TLS `refuse`
        does so, and LinkBroken is raised."""
        usual_s, by = sock.gettimeout(), time.monotonic() + frames.GREETING_S
        own = sock.dup()  # whoever ends the connection does so by `sock`
        try:
            own.settimeout(frames.GREETING_S)
            protection: Protection = "tls" if frames.peek(own) == _TLS_HANDSHAKE else "mac"
            if protection == "tls":
                own = self._accept_tls(own, by)
            secured, greeting = self._receive_greeting(own, protection, by)
        except LaminarError as error:
            if isinstance(own, TlsSocket) and not isinstance(error, LinkBroken):
                refuse(own, error)
                error = LinkBroken(error.message)
            own.close()
            raise error
        except BaseException:
            own.close()
            raise
        secured.settimeout(usual_s)
        return secured, greeting

    def _accept_tls(self, sock: socket.socket, by: float) -> socket.socket:
        sock.settimeout(max(0.001, by - time.monotonic()))  # of the handshake as a whole
        try:
            return self._context(serving=True).wrap_socket(sock, server_side=True)
        except OSError as error:
            raise LinkBroken(f"no TLS with a peer: {_reason(error)}") from error

    def _receive_greeting(
        self, sock: socket.socket, protection: Protection, by: float
    ) -> tuple[socket.socket, Greeting]:
        keys, nonce = self._credentials.material.fleet_keys, secrets.token_bytes(NONCE_BYTES)
        hello = self._receive_hello(sock, protection, by)
        key = key_in_common(keys, hello.keys)
        if key is None:
            raise Unauthenticated("this relay and the peer have no fleet key in common", hint=_HINT)
        opening = Opening(protection, hello.nonce, nonce)
        frames.send_message(sock, Kind.CHALLENGE, Challenge(nonce, key_id(key), opening.holder_proof(key)))
        (length,) = _LENGTH.unpack(frames.receive_bytes(sock, _LENGTH.size, by))
        if length > frames.GREETING_BYTES_MAX:
            raise LinkBroken(f"a greeting of {length} bytes announced")
        body = frames.receive_bytes(sock, length, by)
        if not is_proof(frames.receive_bytes(sock, PROOF_BYTES, by), opening.requester_proof(key, body)):
            raise Unauthenticated("the peer does not prove that it knows the fleet key", hint=_HINT)
        greeting = frames.decode(body, Greeting)
        if protection == "tls":
            return sock, greeting
        sends, receives = opening.key_to_requester(key, body), opening.key_to_holder(key, body)
        return _sealed(sock, sends=sends, receives=receives), greeting

    def _receive_hello(self, sock: socket.socket, protection: Protection, by: float) -> Hello:
        magic, (length,) = frames.receive_bytes(sock, 4, by), _LENGTH.unpack(frames.receive_bytes(sock, 4, by))
        if magic == frames.MAGIC:
            raise Unauthenticated("this relay asks for credentials at its data port", hint=_HINT)
        if magic != MAGIC:
            raise LinkBroken("the peer does not speak the data protocol")
        if self.tls and protection != "tls":
            raise frames.TlsWanted("this relay wants TLS at its data port", hint="--data-tls")
        hello = frames.receive_json(sock, length, Hello, HELLO_BYTES_MAX, by)
        if len(hello.nonce) != NONCE_BYTES or len(hello.keys) > FLEET_KEYS_MAX:
            raise LinkBroken("a malformed message: a nonce of another length, or too many keys")
        return hello

    # ---- TLS

    def _context(self, *, serving: bool) -> ssl.SSLContext:
        """That of the credentials as they are now."""
        material, known = self._credentials.material, self._contexts.get(serving)
        if known is None or known[0] is not material:
            context = new_context(material, serving=serving)
            context.sslsocket_class = TlsSocket
            known = self._contexts[serving] = (material, context)
        return known[1]


def open_connection(
    address: str, timeout_s: float, greeting: Greeting, access: DataAccess | None, *, bind_host: str = ""
) -> Opened:
    """A connection to a data port, which has got the greeting: protected, where there is `access`."""
    if access is not None:
        return access.open(address, timeout_s, greeting, bind_host=bind_host)
    sock, rtt_s = _connect(address, timeout_s, bind_host)
    try:
        frames.send_greeting(sock, greeting)
    except BaseException:
        sock.close()
        raise
    return sock, rtt_s


def _connect(address: str, timeout_s: float, bind_host: str) -> Opened:
    connecting_at = time.monotonic()
    sock = frames.connect(address, timeout_s, bind_host=bind_host)
    return sock, time.monotonic() - connecting_at


def _sealed(sock: socket.socket, *, sends: bytes, receives: bytes) -> socket.socket:
    from paramserver.data.sealed import KEY_BYTES, SealedSocket  # it imports `cryptography`

    return SealedSocket(sock, sends=sends[:KEY_BYTES], receives=receives[:KEY_BYTES])


def check_greeting(sock: socket.socket, greeting: Greeting, address: str) -> None:
    """Raises unless a greeting that was proven is meant for the relay at `address`, and its sender may do what it says:
    by the certificate of its connection, where that has one."""
    if greeting.to != address:
        raise Conflict(f"a greeting for the relay at {greeting.to!r} came to {address}")
    if isinstance(sock, TlsSocket) and (reason := data_refusal(greeting.purpose, peer_of(sock))):
        raise Forbidden(reason)


def _unproven(address: str, refusal: LaminarError) -> LaminarError:
    """What to raise for a refusal that anybody on the way may have sent: it ends one connection, as he could in any
    case. The demand for TLS is followed, since nobody can fake its other end."""
    if isinstance(refusal, frames.TlsWanted):
        return refusal
    kind = UnprovenFull if isinstance(refusal, OutOfCapacity) else UnprovenRefusal
    return kind(
        f"{address}, which has not proven that it knows the fleet key, refuses: {one_line(refusal.message)}",
        hint=one_line(refusal.hint),
    )


def _reason(error: OSError) -> str:
    return str((error.reason if isinstance(error, ssl.SSLError) else None) or error)
