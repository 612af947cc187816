"""What strangers try at one port. Each attempt raises Forbidden or Unauthenticated when it was refused, returns when it
was let in, and raises anything else when a fault met it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import aiohttp

from paramserver.client import RelayClient
from paramserver.data.frames import Greeting, LinkBroken
from paramserver.data.secured import DataAccess, UnprovenRefusal
from paramserver.data.tcp import TcpLink
from paramserver.data.transport import Source
from protos.access.credentials import Credentials
from protos.access.tls import new_context
from protos.errors import Forbidden, LaminarError, OutOfCapacity, Unauthenticated
from tests.soak.places import EngineDoor
from tests.soak.work import MODEL

TIMEOUT_S = 5.0
LOAD = b"POST /update_weights HTTP/1.1\r\nHost: engine\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""A route that loads weights; it names none, so that an engine which is asked after all changes nothing."""


# ---- at relays


async def status(address: str) -> None:
    """Without credentials, in the clear."""
    async with RelayClient(address, timeout_s=TIMEOUT_S) as relay:
        await relay.status()


async def pin(address: str, credentials: Credentials) -> None:
    async with RelayClient(address, timeout_s=TIMEOUT_S, credentials=credentials) as relay:
        await relay.acquire(MODEL, None, holder="stranger")


async def fetch(address: str, credentials: Credentials | None) -> None:
    """At the port for bytes. What is answered about the version, such as that it is not there, is not for strangers."""
    try:
        await asyncio.to_thread(_fetch, address, credentials)
    except UnprovenRefusal as error:
        raise Unauthenticated(error.message) from error
    except (Forbidden, Unauthenticated, LinkBroken, OutOfCapacity):
        raise
    except LaminarError:
        return


def _fetch(address: str, credentials: Credentials | None) -> None:
    access = DataAccess(credentials) if credentials is not None else None
    TcpLink(
        Source("relay", address), Greeting("fetch", MODEL, 1, "stranger"), silence_s=TIMEOUT_S, access=access
    ).close()


# ---- at engines, behind relays


def tls_of(credentials: Credentials) -> ssl.SSLContext:
    return new_context(credentials.material, serving=False)


def tls_without_certificate() -> ssl.SSLContext:
    """Of whoever does not mind who serves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def load(door: EngineDoor, tls: ssl.SSLContext | None) -> None:
    """`tls` None: in the clear. Whatever the engine answers, it was asked."""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            answer = await _asked(door, tls)
        except (ConnectionRefusedError, ssl.SSLCertVerificationError):
            raise  # no relay is there; or this end refused
        except (ssl.SSLError, ConnectionError) as error:
            raise Unauthenticated(f"the connection ends: {error}") from error
    if not answer.startswith(b"HTTP/"):
        raise Unauthenticated("the connection ends without an answer")  # but for an alert, where it is in the clear


async def _asked(door: EngineDoor, tls: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(
        door.address, door.port, ssl=tls, server_hostname=door.host if tls is not None else None
    )
    try:
        writer.write(LOAD)
        return await reader.read(1 << 10)
    finally:
        writer.transport.abort()


# ---- at gateways


async def sample(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
    async with http.post(f"{url}/experience/sample", json={"trajectories": 1}, headers=headers) as answer:
        if answer.status in (401, 403):
            raise Forbidden(await answer.text())
        answer.raise_for_status()
