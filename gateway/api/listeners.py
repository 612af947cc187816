"""Where a gateway listens: the port of its clients, and the listener of those who operate it.

Invariants:
- with API keys, or with `--admin-listen`, a route of the operation `operate` is answered by the admin listener alone;
- a unix socket takes requests of the gateway's user, of root, and of `--admin-group`, and no API key: whoever may
  connect may read the key file as well. A port takes keys, wherever the gateway has some.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.api.errors import Handler
from gateway.api.http_server import BACKLOG, Admission, Runner
from gateway.operate.admin_place import AdminPlace
from protos.access.unix_socket import SCHEME, check_peer, listen_on, peer_of, remove
from protos.process import cannot_listen

CLOSE_TIMEOUT_S = 0.1  # for handlers, after draining: by default aiohttp would wait for them again


@dataclass(frozen=True, slots=True)
class Listener:
    """Of one application, while it is served. `url`: `http://HOST:PORT`, or `unix:PATH`."""

    url: str
    runner: web.AppRunner
    path: Path | None = None

    async def stop(self) -> None:
        """Takes no more connections; those that are there go on."""
        for site in list(self.runner.sites):
            await site.stop()

    async def close(self) -> None:
        await self.runner.cleanup()
        if self.path is not None:
            remove(self.path)


async def listen(app: web.Application, host: str, port: int, admission: Admission) -> Listener:
    """Serves `app` at a port. Raises Conflict."""
    runner = await _runner(app, admission)
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, error) from error
    shown = f"[{host}]" if ":" in host else host
    return Listener(f"http://{shown}:{runner.addresses[0][1]}", runner)


async def listen_for_admins(app: web.Application, place: AdminPlace, admission: Admission) -> Listener:
    """Serves `app` where the admin listener is to be. Raises Conflict and InvalidRequest."""
    if place.path is None:
        return await listen(app, place.host, place.port, admission)
    sock = listen_on(place.path, place.group)
    runner = await _runner(app, admission)
    await web.SockSite(runner, sock, backlog=BACKLOG).start()
    return Listener(f"{SCHEME}{place.path}", runner, place.path)


async def _runner(app: web.Application, admission: Admission) -> web.AppRunner:
    runner = Runner(app, admission, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    return runner


def peers_of(place: AdminPlace) -> Middleware:
    """Of a unix socket: lets requests of those pass who may use it."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        connected = None if request.transport is None else request.transport.get_extra_info("socket")
        if connected is None:
            raise ConnectionResetError("the client is gone")
        check_peer(peer_of(connected.fileno()), place.group)
        return await handler(request)

    return checked
