"""Engine ports: where others call the engines beside a relay with credentials.

An engine takes whoever reaches it, and has routes that load weights. So it listens on loopback, and its relay opens a
port of TLS in front of it: whoever proves a role that may call engines gets a connection to it, byte by byte
(`paramserver.data.splice`).

Invariants:
- connections that have not proven who they are take no room from those that have: there are `HANDSHAKES_MAX` of them,
  and the oldest makes way for the next one;
- a connection that fails costs nobody else anything, and a refusal at most one line in the log in ten seconds.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from paramserver.core.access import engine_refusal
from paramserver.data.splice import Splice
from protos.access.credentials import Credentials
from protos.access.tls import FleetTls, PeerRefused
from protos.errors import Conflict
from protos.failures import RareLines

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
"""Of one engine: a gateway has one for each turn there, and some that are idle."""
FILES_MAX = 1 << 20
"""To which the limit of open files is raised at most."""
HANDSHAKES_MAX = 64
"""Under way at one port: an honest one takes milliseconds."""

RefusedBy = Literal["handshake", "role", "connections", "engine"]
"""No certificate of the fleet in time; none that may call engines; too many connections; the engine takes none."""


@dataclass(frozen=True, slots=True)
class EnginePortStatistics:
    """`engine`: its name. `url`: of the port; `target`: of the engine. `open`: connections now. `refused`: since the
    start."""

    engine: str
    url: str
    target: str
    open: int
    handshakes: int
    accepted: int
    refused: Mapping[RefusedBy, int]


class EnginePort:
    """The port of one engine. Owner of its connections; on one event loop."""

    def __init__(
        self,
        engine: str,
        target: str,
        listener: socket.socket,
        reached_by: str,
        tls: FleetTls,
        *,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`target`: the engine's http address on this host. `reached_by`: the address or name that others use."""
        self._engine, self._target, self._tls = engine, target, tls
        self._connections_max = connections_max
        parts = urlsplit(target)
        assert parts.hostname is not None
        self._address = parts.hostname, parts.port or 80
        self.url = f"https://{reached_by}:{listener.getsockname()[1]}{parts.path}"
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._closing = False  # what is accepted in this round of the event loop opens after the others were ended
        self._handshakes: dict[Splice, None] = {}  # the oldest first
        self._open: set[Splice] = set()
        self._accepted = 0
        self._refused: Counter[RefusedBy] = Counter()
        self._refusals = {reason: RareLines(log, 1) for reason in get_args(RefusedBy)}

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Splice(self, self._tls.context()), sock=self._listener)
        log.info("engine %s is called at %s, on this host at %s", self._engine, self.url, self._target)

    async def close(self) -> None:
        """Ends every connection; sockets are closed when this returns."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for connection in [*self._handshakes, *self._open]:
            connection.abort()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next round
        self._listener.close()

    def statistics(self) -> EnginePortStatistics:
        return EnginePortStatistics(
            self._engine,
            self.url,
            self._target,
            len(self._open),
            len(self._handshakes),
            self._accepted,
            {reason: self._refused[reason] for reason in get_args(RefusedBy)},
        )

    # -- what a connection needs of it: `splice.Owner`

    def opened(self, connection: Splice) -> None:
        if self._closing:
            connection.abort()
            return
        if len(self._handshakes) >= HANDSHAKES_MAX:
            next(iter(self._handshakes)).refuse(TimeoutError("it made way for another one"))
        self._handshakes[connection] = None

    def proven(self, connection: Splice) -> bool:
        self._handshakes.pop(connection, None)
        if len(self._open) >= self._connections_max:
            self._refuse("connections", f"{self._connections_max} are open")
            return False
        self._open.add(connection)
        self._accepted += 1
        return True

    def refused(self, connection: Splice, error: Exception) -> None:
        self._handshakes.pop(connection, None)
        reason: RefusedBy = "role" if isinstance(error, PeerRefused) else "handshake"
        self._refuse(reason, f"from {connection.peer}: {error}")

    async def connect(self, engine: asyncio.Protocol) -> None:
        host, port = self._address
        await asyncio.get_running_loop().create_connection(lambda: engine, host, port)

    def away(self, error: Exception) -> None:
        self._refuse("engine", f"{self._target} does not accept it: {error or type(error).__name__}")

    def closed(self, connection: Splice) -> None:
        self._handshakes.pop(connection, None)
        self._open.discard(connection)

    def _refuse(self, reason: RefusedBy, what: str) -> None:
        self._refused[reason] += 1
        line = f"a connection to engine {self._engine} is refused ({reason}, {self._refused[reason]} so far): {what}"
        self._refusals[reason].say(logging.WARNING, line)


def listen(host: str, port: int) -> socket.socket:
    """Raises Conflict when the port is taken."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise Conflict(
            f"cannot listen on {host}:{port} for an engine: {error.strerror}", hint="give --engine another @PORT"
        ) from error


def connections_max(num_ports: int) -> int:
    """How many each of them may have: half of the files that this process may open are others', and a connection takes
    two."""
    return min(CONNECTIONS_MAX, open_files_max() // 4 // num_ports)


def open_files_max() -> int:
    """How many files this process may open, once its limit is raised as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return FILES_MAX
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return soft


def tls_of(credentials: Credentials) -> FleetTls:
    return FleetTls(credentials, serving=True, refusal=engine_refusal)
