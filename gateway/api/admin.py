"""For operators: status, health, metrics, timeline, engines, live sessions, and the repacker's plans and receipts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.api.bodies import answer_json, read
from gateway.api.errors import BadField
from gateway.api.sessions import REASON_CHARS_MAX, reported_state
from gateway.config import EngineSpec
from gateway.core.admission import Keeper, is_silent
from gateway.core.networks import EnginePlaces
from gateway.core.packing.plans import Freed, Move, Plan
from gateway.core.packing.receipts import Outcome, Receipt
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, SessionId
from gateway.fleet.fleet import Fleet
from gateway.operate.status import GatewayStatus
from gateway.repack.loop import Repacker
from gateway.runtime.clock import unix_s
from gateway.runtime.shielded import ShieldedTasks
from gateway.sessions.endings import Endings
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.trainer import Trainer
from gateway.store import Timeline
from gateway.store.timeline import READ_MAX
from protos.engines import ENGINE_KINDS, URL_NAME, base_url_hint, check_kind, is_address, is_host_port
from protos.errors import Forbidden, InvalidRequest, LaminarError

DIGITS_MAX = 15
"""Digits of a number in a query."""
RESOLVE_TIMEOUT_S = 5.0
ABANDONED_AT_ONCE = 256
LISTED_MAX = 10_000
"""Sessions of one answer: making it stops all streams meanwhile."""


ADDRESS_MAX = 2048


class AddEngineRequest(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=URL_NAME, description="The engine's name, unique in the fleet.")]
    url: Annotated[
        str, Meta(max_length=ADDRESS_MAX, description="The engine's own address, such as http://127.0.0.1:8000.")
    ]
    kind: Annotated[str, Meta(description=f"One of {', '.join(ENGINE_KINDS)}.")] = "vllm"
    relay: Annotated[
        Annotated[str, Meta(max_length=ADDRESS_MAX)] | None,
        Meta(description="HOST:PORT of the relay on its host. Default: that of `--relay`; without any it loads none."),
    ] = None
    check: Annotated[bool, Meta(description="Refuse the engine unless it responds now.")] = True


class Events(msgspec.Struct):
    """Each has `seq`, `t_unix_s`, `kind`, and the fields of its kind. `next`: the `after` for what follows."""

    next: int
    events: Sequence[Mapping[str, Any]]


class EngineAdded(msgspec.Struct):
    name: str


class EngineRemoved(msgspec.Struct):
    name: str
    removed: bool = True


class LiveSession(msgspec.Struct, kw_only=True):
    """`engine`: where a turn of it was last placed, null before the first. `version`: the one it stays on, null before
    the first place unless it named one. `turns`: complete ones, beside the `running`. `idle_s`: seconds since the last
    turn, null while one runs. `kept_by`: what keeps it from being idle at the request's `idle_s`: a turn, a runner's
    lease, a child, or that its reward is to come; null if nothing does. `GET /sessions/{sid}` tells more.
    """

    session_id: str
    state: str
    engine: str | None
    version: int | None
    turns: int
    running: int
    idle_s: float | None
    kept_by: Keeper | None


class LiveSessions(msgspec.Struct):
    """`live`: how many there are, calls without a session included, as in `/status`. `sessions`: up to `limit` of them,
    the oldest first."""

    live: int
    sessions: Sequence[LiveSession]


class AbandonIdleRequest(msgspec.Struct, forbid_unknown_fields=True):
    idle_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Sessions that nothing has kept for so many seconds. Default: --idle-after-s."),
    ] = None
    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX, description="For the log and the timeline.")] = ""


class IdleAbandoned(msgspec.Struct):
    """`failed`: by session, why it could not be ended. `left`: idle sessions for another request, since one ends up to
    256."""

    abandoned: Sequence[str]
    failed: Mapping[str, str]
    left: int


class PlanReport(msgspec.Struct):
    """`freed` engines are empty once the moves are done. Price and gain in seconds of an engine."""

    version: int
    moves: Sequence[Move]
    freed: Sequence[Freed]
    reasons: Sequence[str]
    price_s: float
    gain_s: float


class Plans(msgspec.Struct):
    plans: Sequence[PlanReport]


class EstimatedAndMeasured(msgspec.Struct):
    """Seconds of an engine; `measured` is null until it is known."""

    estimated: float
    measured: float | None


class MoveReport(msgspec.Struct, kw_only=True):
    """`pause_s`: how long the turn was without tokens; null if it never moved, or waited for a tool."""

    turn_id: str | None
    session_id: str
    source: str
    destination: str
    tokens: int
    price_s: float
    outcome: Outcome
    pause_s: float | None


class ReceiptReport(msgspec.Struct):
    """One engine that was emptied. `emptied_after_s`: null until it is empty, and if it never was."""

    number: int
    planned_unix_s: float
    version: int
    engine: str
    reason: str
    emptied_after_s: float | None
    price_s: EstimatedAndMeasured
    gain_s: EstimatedAndMeasured
    moves: Sequence[MoveReport]


class Receipts(msgspec.Struct):
    prefill_tokens_per_s: float
    receipts: Sequence[ReceiptReport]


_add = msgspec.json.Decoder(AddEngineRequest)
_abandon_idle = msgspec.json.Decoder(AbandonIdleRequest)


@dataclass(frozen=True, slots=True)
class AdminDeps:
    status: GatewayStatus
    fleet: Fleet
    live: SessionRegistry
    repacker: Repacker
    timeline: Timeline
    endings: Endings
    trainer: Trainer


def add_admin_routes(app: web.Application, deps: AdminDeps, *, operate_at: str = "") -> None:
    """`operate_at`: the address of the admin listener, where another application answers the routes that change the
    fleet; here they are refused."""
    handlers = _Handlers(deps)
    operate = (handlers.add_engine, handlers.remove_engine, handlers.repack, handlers.abandon_idle)
    add_engine, remove_engine, repack, abandon = (_answered_at(operate_at),) * 4 if operate_at else operate
    app.router.add_get("/status", handlers.status)
    app.router.add_get("/healthz", handlers.healthz)
    app.router.add_get("/health", handlers.healthz)  # as engines have it
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_get("/admin/timeline", handlers.timeline)
    app.router.add_post("/admin/engines", add_engine)
    app.router.add_delete("/admin/engines/{name}", remove_engine)
    app.router.add_get("/admin/sessions", handlers.sessions)
    app.router.add_post("/admin/sessions/abandon", abandon)
    app.router.add_get("/admin/repack", handlers.plan)
    app.router.add_post("/admin/repack", repack)
    app.router.add_get("/admin/receipts", handlers.receipts)


def _answered_at(address: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def refuse(request: web.Request) -> web.Response:
        raise Forbidden(
            f"{request.method} {request.path} is not answered on this port",
            hint=f"the gateway's admin listener answers it, at {address} on its host (--admin-listen)",
        )

    return refuse


class _Handlers:
    def __init__(self, deps: AdminDeps) -> None:
        self._status, self._fleet, self._live = deps.status, deps.fleet, deps.live
        self._repacker, self._timeline = deps.repacker, deps.timeline
        self._endings, self._trainer = deps.endings, deps.trainer
        self._shielded = ShieldedTasks()

    async def status(self, request: web.Request) -> web.Response:
        return answer_json(self._status.report())

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while an engine serves and the store can be written; with 503, load balancers go elsewhere."""
        health = self._status.health()
        return answer_json(health, 503 if health.reasons else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._status.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def timeline(self, request: web.Request) -> web.Response:
        after, limit = number_in_query(request, "after", 0), number_in_query(request, "limit", 1000)
        next_, events = self._timeline.read(after, min(limit, READ_MAX))
        return answer_json(Events(next_, [event.flat() for event in events]))

    async def add_engine(self, request: web.Request) -> web.Response:
        wanted = await read(request, _add)
        if not is_address(wanted.url):
            raise BadField(
                "url", f"{wanted.url!r} is not the address of an engine", hint="such as http://127.0.0.1:8000"
            )
        if hint := base_url_hint(wanted.url):
            raise BadField("url", f"{wanted.url!r} is not the engine's own address", hint=hint)
        if wanted.relay and not is_host_port(wanted.relay):
            raise BadField("relay", f"{wanted.relay!r} is not HOST:PORT", hint="such as 127.0.0.1:7070")
        check_kind(wanted.kind, "`kind`")
        spec = EngineSpec(wanted.name, wanted.kind, wanted.url, wanted.relay or None)
        await self._check_places(spec)
        if wanted.check:
            await self._fleet.check(spec)
        await self._fleet.join(spec)
        return answer_json(EngineAdded(wanted.name), 201)

    async def _check_places(self, spec: EngineSpec) -> None:
        """Raises Forbidden where the engine or its relay is at an address at which none may be."""
        places = self._places()
        for host in _hosts(spec):
            if reason := places.refusal(host, await _addresses(host)):
                raise Forbidden(
                    reason, hint="start the gateway with --engine-networks and its network, such as 10.0.0.0/8"
                )

    def _places(self) -> EnginePlaces:
        config = self._fleet.config
        specs = [*config.engines, *(handle.spec for handle in self._fleet.handles.values())]
        named = {host for spec in specs for host in _hosts(spec)}
        if config.relay is not None:
            named.add(_host_of(config.relay))
        return EnginePlaces.of(named, config.engine_networks, listens_on=config.host, insecure=config.insecure)

    async def remove_engine(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._shielded.run(self._fleet.remove(EngineName(name)), f"remove-{name}")
        return answer_json(EngineRemoved(name))

    async def sessions(self, request: web.Request) -> web.Response:
        """Those that wait for their reward are among them, as `unrewarded`."""
        limit = min(number_in_query(request, "limit", 1000), LISTED_MAX)
        idle_s = number_in_query(request, "idle_s", 0) if "idle_s" in request.query else None
        now = unix_s()
        wanted = (s for s in self._live if idle_s is None or is_silent(s, now, idle_s))
        found = [_live_session(s, now, self._trainer.kept_by(s, now, idle_s)) for s in islice(wanted, limit)]
        return answer_json(LiveSessions(len(self._live), found))

    async def abandon_idle(self, request: web.Request) -> web.Response:
        wanted = await read(request, _abandon_idle, default=AbandonIdleRequest)
        idle = self._idle(wanted.idle_s)
        abandoned, failed = list[str](), dict[str, str]()
        for session_id in idle[:ABANDONED_AT_ONCE]:
            if session_id not in self._idle(wanted.idle_s, session_id):
                continue  # it has gone on or ended meanwhile, such as with its parent
            try:
                await self._endings.abandon(session_id, wanted.reason or "an operator ended idle sessions")
                abandoned.append(session_id)
            except LaminarError as e:
                failed[session_id] = str(e)
        return answer_json(IdleAbandoned(abandoned, failed, len(idle) - len(idle[:ABANDONED_AT_ONCE])))

    def _idle(self, idle_s: float | None, only: SessionId | None = None) -> list[SessionId]:
        """The sessions that nothing keeps."""
        found = self._live if only is None else filter(None, [self._live.find(only)])
        now = unix_s()
        return [s.session_id for s in found if s.phase == "live" and self._trainer.kept_by(s, now, idle_s) is None]

    async def plan(self, request: web.Request) -> web.Response:
        """The plans that the planner would make now, with their reasons; nothing is moved."""
        return answer_json(Plans([_plan_report(plan) for plan in await self._repacker.plan()]))

    async def repack(self, request: web.Request) -> web.Response:
        """Repacks now, whatever the mode; returns the plans, whose moves have begun."""
        # Not shielded: every part of a plan is complete in itself, so a client that hangs up only ends the planning.
        return answer_json(Plans([_plan_report(plan) for plan in await self._repacker.repack()]))

    async def receipts(self, request: web.Request) -> web.Response:
        """Every move, newest first: price and gain as estimated, and as measured (null while not known)."""
        newest = list(self._repacker.book.receipts)[::-1][: number_in_query(request, "limit", 100)]
        return answer_json(Receipts(self._repacker.prefill_tokens_per_s, [receipt_report(r) for r in newest]))


def _hosts(spec: EngineSpec) -> Sequence[str]:
    """Of the engine, and of its relay."""
    return [urlsplit(spec.url).hostname or "", *([_host_of(spec.relay)] if spec.relay else ())]


def _host_of(address: str) -> str:
    """Of HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")


async def _addresses(host: str) -> Sequence[str]:
    """What `host` resolves to; none where it does not."""
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # TimeoutError is an OSError; ValueError: a host that cannot be
        return ()
    return [str(address[0]) for *_, address in found]


def _live_session(state: SessionState, now: float, kept_by: Keeper | None) -> LiveSession:
    return LiveSession(
        session_id=state.session_id,
        state=reported_state(state),
        engine=state.engine,
        version=state.version,
        turns=state.turns,
        running=len(state.running),
        idle_s=None if state.running else max(0.0, now - state.touched_unix_s),
        kept_by=kept_by,
    )


def _plan_report(plan: Plan) -> PlanReport:
    return PlanReport(plan.version, plan.moves, plan.freed, plan.reasons, plan.price_s, plan.gain_s)


def receipt_report(receipt: Receipt) -> ReceiptReport:
    return ReceiptReport(
        receipt.number,
        receipt.planned_unix_s,
        receipt.version,
        receipt.engine,
        receipt.reason,
        receipt.emptied_after_s,
        EstimatedAndMeasured(receipt.estimate.price_s, receipt.price_measured_s),
        EstimatedAndMeasured(receipt.estimate.gain_s, receipt.gain_measured_s),
        [MoveReport(**msgspec.structs.asdict(m.move), outcome=m.outcome, pause_s=m.pause_s) for m in receipt.moves],
    )


def number_in_query(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise InvalidRequest(f"{name}={text!r} is not a number", hint=f"such as {name}={default}")
    return int(text)
