"""prime-rl's filesystem mode on a Laminar fleet: a server in the place of its inference servers' admin routes.

prime-rl's trainer saves each step's weights into `broadcasts/step_N` of a folder that is shared, and marks it by an
empty file `STABLE`. Its orchestrator then calls every address of `client.admin_base_url`: `/pause`, `/update_weights`
with the directory, `/resume`. Here `/update_weights` publishes the directory as a version with step N, and the rest
answers as prime-rl wants it: nothing pauses.

    python -m trainer_client.integrations.prime_rl --relay trainer-0:7070 --gateway http://gateway:8080 --port 8090

Invariants:
- 200 means that the version is sealed and, with a gateway, that an engine serves it or a newer one;
- a directory is published once, however often prime-rl sends the same request again; one that was saved again (its
  marker is younger) is published again;
- one publish at a time. One whose client went away goes on, and the repeated request gets its outcome;
- what cannot be published is refused with a status that prime-rl does not retry, and what may work later with 503.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import msgspec
from aiohttp import web

from paramserver.client import RelayClient, Ticket, plain_files, publish, read_checkpoint
from protos.access.bearer import bearer
from protos.access.listening import INSECURE, check_listening, warn_insecure
from protos.decoding import decode_json
from protos.errors import InvalidRequest, LaminarError, OutOfCapacity, Unavailable, VersionLost, WrongServer
from protos.options import LOG_LEVEL, PORT, HostPort
from protos.process import setup_logging, write_ready_file
from trainer_client.gateway_http import WRONG_SERVER, Presence, our_transport, patiently, request, root_of

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STABLE = "STABLE"
STEP = re.compile(r"step_(\d+)")
ADAPTER = "adapter_model.safetensors"
POLL_S = 0.5
CALL_TIMEOUT_S = 10.0
FILESYSTEM_ONLY = "set prime-rl's weight broadcast to its filesystem type, without LoRA"


@dataclass(frozen=True, slots=True)
class Published:
    """The newest directory that became a version: the time of its marker, in ns, and the version's ticket."""

    directory: Path
    marked_at_ns: int
    ticket: Ticket


class Broadcasts:
    """Publishes prime-rl's directories, one at a time, under one run."""

    def __init__(self, relay: RelayClient, model: str, *, seal_timeout_s: float) -> None:
        self._relay, self.model = relay, model
        self._run = f"prime-rl-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        self._seal_timeout_s = seal_timeout_s
        self._lock = asyncio.Lock()
        self._newest: Published | None = None

    async def publish(self, directory: Path) -> int:
        """The version that `directory` became, sealed. Raises InvalidRequest, Unavailable and others of `publish`."""
        async with self._lock:
            step, marked_at_ns = _complete(directory)
            newest = self._newest
            if newest is None or (newest.directory, newest.marked_at_ns) != (directory, marked_at_ns):
                newest = self._newest = Published(directory, marked_at_ns, await self._copied(directory, step))
            try:
                await newest.ticket.wait_sealed(self._seal_timeout_s)
            except VersionLost:
                self._newest = None  # the repeated request publishes it again
                raise
            return newest.ticket.version

    async def _copied(self, directory: Path, step: int) -> Ticket:
        checkpoint = await asyncio.to_thread(read_checkpoint, directory)
        ticket = await publish(
            self._relay,
            self.model,
            checkpoint.tensors,
            step=step,
            run=self._run,
            metadata=checkpoint.metadata,
            refuse_change=True,
            files=plain_files(directory),
        )
        log.info("%s is version %d of %s", directory, ticket.version, self.model)
        return ticket


def _complete(directory: Path) -> tuple[int, int]:
    """The step of a directory that is marked as complete, and when it was marked, in ns.

    The marker stands in the directory, or beside it: a checkpoint's weights lie in `checkpoints/step_N/weight`.
    """
    for place in (directory, directory.parent):
        found = STEP.fullmatch(place.name)
        if found is None:
            continue
        try:
            marked_at_ns = (place / STABLE).stat().st_mtime_ns
        except OSError:  # not there, or not yet
            continue
        if (directory / ADAPTER).exists():
            raise InvalidRequest(f"{directory} holds an adapter, not a model", hint=FILESYSTEM_ONLY)
        return int(found[1]), marked_at_ns
    raise Unavailable(
        f"{directory} is not marked by a file {STABLE}, or is no step_N", hint="a shared folder may show it later"
    )


class _Engine(msgspec.Struct):
    name: str
    state: str
    version: int


class _Status(msgspec.Struct):
    engines: list[_Engine]


class Fleet:
    """The gateway, for when its engines serve a version."""

    def __init__(self, http: httpx.AsyncClient, gateway: str, *, serve_timeout_s: float) -> None:
        self._http, self._gateway, self._timeout_s = http, root_of(gateway), serve_timeout_s
        self._presence = Presence(f"the gateway at {self._gateway}")

    async def until_served(self, version: int) -> None:
        """Until one engine serves `version` or a newer one: then new sessions begin there. Else Unavailable."""
        deadline = time.monotonic() + self._timeout_s
        why = ""
        while time.monotonic() < deadline:
            engines = await patiently(self._presence, self._engines)
            if any(engine.state == "serving" and engine.version >= version for engine in engines):
                return
            why = ", ".join(f"{engine.name} is {engine.state} with {engine.version}" for engine in engines)
            await asyncio.sleep(POLL_S)
        raise Unavailable(
            f"version {version} is sealed, and after {self._timeout_s:g} s no engine serves it: {why or 'no engines'}",
            hint="the same request waits again",
        )

    async def _engines(self) -> list[_Engine]:
        page = await request(self._http, self._gateway, "/status", timeout_s=CALL_TIMEOUT_S)
        try:
            return decode_json(page, _Status).engines
        except msgspec.DecodeError as error:
            raise WrongServer(f"{self._gateway}/status is no gateway's: {error}", hint=WRONG_SERVER) from error


class Admin:
    """The routes that prime-rl's orchestrator calls."""

    def __init__(self, broadcasts: Broadcasts, fleet: Fleet | None) -> None:
        self._broadcasts, self._fleet = broadcasts, fleet

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors])
        for path in ("/health", "/liveness"):
            app.router.add_get(path, self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/update_weights", self.update_weights)
        for path in ("/pause", "/resume"):
            app.router.add_post(path, self.nothing)
        for path in ("/init_broadcaster", "/load_lora_adapter"):
            app.router.add_post(path, self.refused)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(self, _: web.Request) -> web.Response:
        """prime-rl looks for its own model's name here, unless `client.skip_model_check` is set."""
        return web.json_response({"object": "list", "data": [{"id": self._broadcasts.model, "object": "model"}]})

    async def nothing(self, _: web.Request) -> web.Response:
        """Turns go on under the version they began with, and engines load between sessions: nothing has to pause."""
        return web.json_response({"status": "ok"})

    async def refused(self, request: web.Request) -> web.Response:
        raise InvalidRequest(f"{request.path} belongs to another mode of prime-rl", hint=FILESYSTEM_ONLY)

    async def update_weights(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            directory = Path(body["weight_dir"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                'the body is not {"weight_dir": "..."}', hint=f"without a directory: {FILESYSTEM_ONLY}"
            ) from error
        version = await self._broadcasts.publish(directory)
        if self._fleet is not None:
            await self._fleet.until_served(version)
        return web.json_response({"status": "ok", "version": version})


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except LaminarError as error:
        log.warning("%s %s: %s", request.method, request.path, error)
        # prime-rl sends a request again after a status of 500 or more only.
        status = 503 if isinstance(error, OutOfCapacity | VersionLost) else error.http_status
        return web.json_response({"error": {"code": error.code, "message": str(error)}}, status=status)


@asynccontextmanager
async def serving(admin: Admin, host: str, port: int) -> AsyncIterator[str]:
    """The server's URL, while it serves."""
    runner = web.AppRunner(admin.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise Unavailable(f"{host}:{port} cannot be listened on: {error.strerror}") from error
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--relay", type=HostPort(), required=True, envvar="LAMINAR_RELAY", help="gRPC HOST:PORT of a relay.")
@click.option("--gateway", help="URL of the gateway: an update then ends when an engine serves its version.")
@click.option("--model", default="policy", help="Name to publish under; prime-rl looks for its model by this name.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; there is no authentication.")
@click.option("--insecure", is_flag=True, help=INSECURE)
@click.option("--port", type=PORT, default=8090, help="0: any free one.")
@click.option("--seal-timeout-s", type=click.FloatRange(1), default=300.0, help="For a version to be sealed.")
@click.option("--serve-timeout-s", type=click.FloatRange(1), default=300.0, help="For an engine to serve it.")
@click.option("--ready-file", type=click.Path(dir_okay=False, path_type=Path), help="JSON with the URL, once serving.")
@click.option("--log-level", type=LOG_LEVEL, default="info")
def main(
    relay: str,
    gateway: str | None,
    model: str,
    host: str,
    insecure: bool,
    port: int,
    seal_timeout_s: float,
    serve_timeout_s: float,
    ready_file: Path | None,
    log_level: str,
) -> None:
    """Answers prime-rl's admin calls until SIGTERM: each update of weights publishes its directory to a relay.

    \b
    In prime-rl's configuration (filesystem weight broadcast, no LoRA):
      client.base_url = the gateway's URL with /v1, client.admin_base_url = ["http://HOST:8090"]
    """
    setup_logging(log_level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look at the gateway

    async def serve() -> None:
        check_listening(
            "the prime-rl server",
            host,
            insecure=insecure,
            mend="give --insecure, in a closed network alone: it publishes weights",
        )
        if insecure:
            warn_insecure(log, "the prime-rl server", host)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with (
            RelayClient(relay) as client,
            httpx.AsyncClient(headers=bearer(), **our_transport(gateway or "")) as http,
        ):
            fleet = None if gateway is None else Fleet(http, gateway, serve_timeout_s=serve_timeout_s)
            broadcasts = Broadcasts(client, model, seal_timeout_s=seal_timeout_s)
            async with serving(Admin(broadcasts, fleet), host, port) as url:
                write_ready_file(ready_file, {"url": url})
                click.echo(f"url={url}")
                await stop.wait()

    try:
        asyncio.run(serve())
    except LaminarError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
