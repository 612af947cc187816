"""For operators: status, health, metrics, timeline, engines, and what the repacker would do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.api.answers import answer_json
from gateway.api.bodies import decode
from gateway.api.errors import BadField
from gateway.config import EngineSpec
from gateway.core.receipts import Outcome, Receipt
from gateway.core.repack import Freed, Move, Plan
from gateway.core.types import EngineName
from gateway.fleet.fleet import Fleet
from gateway.operate.status import GatewayStatus
from gateway.repack.loop import Repacker
from gateway.runtime.orders import Orders
from gateway.store import Timeline
from gateway.store.timeline import READ_MAX
from protos.engines import base_url_hint, check_kind, is_address, is_host_port
from protos.errors import InvalidRequest

DIGITS_MAX = 15
"""Of a number in a query: whatever is counted here stays below it."""


class AddEngineRequest(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[^\s/]{1,256}$")]
    url: str
    kind: str = "vllm"
    relay: str | None = None
    check: bool = True  # refuse it unless it answers now


class Health(msgspec.Struct):
    """`reasons`: why it is not well; empty while it is."""

    serving_engines: Sequence[str]
    uptime_s: float
    reasons: Sequence[str] = ()


class Events(msgspec.Struct):
    """Each has `seq`, `t_unix_s` and `kind`, and what its kind tells. `next`: to ask `after` the last one."""

    next: int
    events: Sequence[Mapping[str, Any]]


class EngineAdded(msgspec.Struct):
    name: str


class EngineRemoved(msgspec.Struct):
    name: str
    removed: bool = True


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
    """In seconds of an engine; `measured` is null while it is not known."""

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
    """One engine that was emptied. `emptied_after_s`: null while it is under way, and if it never was empty."""

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


@dataclass(frozen=True, slots=True)
class AdminDeps:
    status: GatewayStatus
    fleet: Fleet
    repacker: Repacker
    timeline: Timeline


def add_admin_routes(app: web.Application, deps: AdminDeps) -> None:
    handlers = _Handlers(deps)
    app.router.add_get("/status", handlers.status)
    app.router.add_get("/healthz", handlers.healthz)
    app.router.add_get("/health", handlers.healthz)  # as engines have it
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_get("/admin/timeline", handlers.timeline)
    app.router.add_post("/admin/engines", handlers.add_engine)
    app.router.add_delete("/admin/engines/{name}", handlers.remove_engine)
    app.router.add_get("/admin/repack", handlers.plan)
    app.router.add_post("/admin/repack", handlers.repack)
    app.router.add_get("/admin/receipts", handlers.receipts)


class _Handlers:
    def __init__(self, deps: AdminDeps) -> None:
        self._status, self._fleet, self._repacker, self._timeline = (
            deps.status,
            deps.fleet,
            deps.repacker,
            deps.timeline,
        )
        self._orders = Orders()

    async def status(self, request: web.Request) -> web.Response:
        return answer_json(self._status.snapshot())

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while an engine serves and the store can be written; 503 tells load balancers to look elsewhere."""
        serving = [e.name for e in self._fleet.state.sorted_engines() if e.status == "serving"]
        reasons = [] if serving else ["no engine serves"]
        if failure := self._status.database.failure:
            reasons.append(f"the store cannot be written: {failure}")
        health = Health(serving, time.monotonic() - self._status.started, reasons)
        return answer_json(health, 503 if reasons else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._status.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def timeline(self, request: web.Request) -> web.Response:
        after, limit = _number(request, "after", 0), _number(request, "limit", 1000)
        next_, events = self._timeline.read(after, min(limit, READ_MAX))
        return answer_json(Events(next_, [event.flat() for event in events]))

    async def add_engine(self, request: web.Request) -> web.Response:
        wanted = decode(_add, await request.read())
        if not is_address(wanted.url):
            raise BadField("url", f"{wanted.url!r} is no engine's address", hint="such as http://127.0.0.1:8000")
        if hint := base_url_hint(wanted.url):
            raise BadField("url", f"{wanted.url!r} is not the engine's own address", hint=hint)
        if wanted.relay and not is_host_port(wanted.relay):
            raise BadField("relay", f"{wanted.relay!r} is not HOST:PORT", hint="such as 127.0.0.1:7070")
        check_kind(wanted.kind, "`kind`")
        spec = EngineSpec(wanted.name, wanted.kind, wanted.url, wanted.relay or None)
        if wanted.check:
            await self._fleet.probe(spec)
        self._fleet.add(spec)
        return answer_json(EngineAdded(wanted.name), 201)

    async def remove_engine(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._orders.carry_out(self._fleet.remove(EngineName(name)), f"remove-{name}")
        return answer_json(EngineRemoved(name))

    async def plan(self, request: web.Request) -> web.Response:
        """What the planner would do now, with its reasons; nothing is moved."""
        return answer_json(Plans([told_plan(plan) for plan in self._repacker.plan()]))

    async def repack(self, request: web.Request) -> web.Response:
        """A round now, whatever the mode: the plans whose moves have begun."""
        return answer_json(Plans([told_plan(plan) for plan in self._repacker.repack()]))

    async def receipts(self, request: web.Request) -> web.Response:
        """Every move, newest first: price and gain as estimated, and as measured (null while not known)."""
        book = self._repacker.book
        newest = list(book.receipts)[::-1][: _number(request, "limit", 100)]
        rate = book.prefill_tokens_per_s(self._status.config.prefill_tokens_per_s)
        return answer_json(Receipts(rate, [told_receipt(r) for r in newest]))


def told_plan(plan: Plan) -> PlanReport:
    return PlanReport(plan.version, plan.moves, plan.freed, plan.reasons, plan.price_s, plan.gain_s)


def told_receipt(receipt: Receipt) -> ReceiptReport:
    return ReceiptReport(
        receipt.number,
        receipt.planned_unix_s,
        receipt.version,
        receipt.engine,
        receipt.reason,
        receipt.emptied_after_s,
        EstimatedAndMeasured(receipt.estimate.price_s, receipt.price_measured_s),
        EstimatedAndMeasured(receipt.estimate.gain_s, receipt.gain_measured_s),
        [MoveReport(**asdict(m.move), outcome=m.outcome, pause_s=m.pause_s) for m in receipt.moves],
    )


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise InvalidRequest(f"{name}={text!r} is not a number", hint=f"such as {name}={default}")
    return int(text)
