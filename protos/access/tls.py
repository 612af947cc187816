"""TLS between those who have a fleet's credentials: TLS 1.3 alone, with the certificates of both ends.

Invariants:
- a handshake ends well only with a peer whose certificate a CA of the fleet has issued, and whose role `refusal` takes;
- a client takes a certificate for the host that it connects to alone;
- each connection has the certificates of its time: files that change count for the next one.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterable

from protos.access.credentials import Credentials, Material
from protos.access.fleet import Identity, identity_of
from protos.errors import InvalidRequest, Unauthenticated

Refusal = Callable[[Identity], str]
"""Why the holder of a certificate is not taken; "" if it is."""


class PeerRefused(ssl.SSLCertVerificationError):
    """The peer's certificate is of the fleet, and not of a role that is taken here."""

    def __init__(self, reason: str) -> None:
        super().__init__(1, reason)
        self.reason = reason  # as the ssl module's own errors have it


class FleetTls:
    """TLS of one end: `context()` is for the next connection, by the ssl module or by asyncio."""

    def __init__(self, credentials: Credentials, *, serving: bool, refusal: Refusal) -> None:
        self._credentials, self._serving, self._refusal = credentials, serving, refusal
        self._made: tuple[Material, ssl.SSLContext] | None = None

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """`sock` after a handshake, which its timeout bounds; closed if that fails. Raises ssl.SSLError (PeerRefused is
        one), or TimeoutError."""
        wrapped = self.context().wrap_socket(sock, server_side=self._serving)
        try:
            _check(wrapped, self._refusal)
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def context(self) -> ssl.SSLContext:
        """That of the credentials as they are now."""
        material = self._credentials.material
        if self._made is None or self._made[0] is not material:
            context = new_context(material, serving=self._serving)
            context.sslobject_class = _checked_by(self._refusal)
            self._made = material, context
        return self._made[1]


def relays_of(credentials: Credentials) -> FleetTls:
    """For clients of relays: no other role's certificate serves."""
    return FleetTls(
        credentials,
        serving=False,
        refusal=lambda peer: (
            "" if peer.role == "relay" else f"it has a certificate with the role {peer.role}, not relay"
        ),
    )


def _checked_by(refusal: Refusal) -> type[ssl.SSLObject]:
    """What asyncio makes of a context for each connection, with the check of roles as the handshake's last step."""

    class Checked(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            _check(self, refusal)

    return Checked


def _check(connection: ssl.SSLSocket | ssl.SSLObject, refusal: Refusal) -> None:
    """Raises PeerRefused."""
    try:
        reason = refusal(peer_of(connection))
    except Unauthenticated as error:
        raise PeerRefused(error.message) from error
    if reason:
        raise PeerRefused(reason)


def with_true_ends(context: ssl.SSLContext) -> ssl.SSLContext:
    """A connection that is cut, by whomever, does not look like one that the peer has ended. Python 3.11.2, which is
    Debian's, asks OpenSSL to take the one for the other; later ones do not."""
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)  # OpenSSL has it since 3.0
    return context


def new_context(material: Material, *, serving: bool) -> ssl.SSLContext:
    """TLS 1.3 alone: both ends are this program."""
    context = with_true_ends(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if serving:
        context.num_tickets = 0  # they would come as bytes that nobody waits for
    context.load_verify_locations(cadata=material.ca.decode("ascii"))
    fd = os.memfd_create("laminar-certificate", os.MFD_CLOEXEC)  # the library reads files alone
    try:
        os.write(fd, material.certificate + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def peer_of(connection: ssl.SSLSocket | ssl.SSLObject) -> Identity:
    """Whose certificate the other end of a TLS connection has. Unauthenticated where it names no role of a fleet."""
    names: Iterable[tuple[str, str]] = (connection.getpeercert() or {}).get("subjectAltName", ())  # type: ignore[assignment]
    try:
        return identity_of(value for kind, value in names if kind == "URI")
    except InvalidRequest as error:
        raise Unauthenticated(error.message, hint=error.hint) from error
