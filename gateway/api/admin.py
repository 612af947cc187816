"""For operators: status, health, metrics, timeline, engines, and what the repacker would do."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.api.openai_errors import BadField
from gateway.api.openai_requests import decode
from gateway.config import EngineSpec
from gateway.core.receipts import Receipt
from gateway.core.repack import Plan
from gateway.core.types import EngineName
from gateway.data.timeline import READ_MAX
from gateway.status import GatewayStatus
from protos.engines import check_kind, is_address, is_host_port
from protos.errors import InvalidRequest

DIGITS_MAX = 15
"""Of a number in a query: whatever is counted here stays below it."""


class AddEngineRequest(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[^\s/]{1,256}$")]
    url: str
    kind: str = "vllm"
    relay: str | None = None
    check: bool = True  # refuse it unless it answers now


_add = msgspec.json.Decoder(AddEngineRequest)


def add_admin_routes(app: web.Application, status: GatewayStatus) -> None:
    handlers = _Handlers(status)
    app.router.add_get("/status", handlers.status)
    app.router.add_get("/healthz", handlers.healthz)
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_get("/admin/timeline", handlers.timeline)
    app.router.add_post("/admin/engines", handlers.add_engine)
    app.router.add_delete("/admin/engines/{name}", handlers.remove_engine)
    app.router.add_get("/admin/repack", handlers.plan)
    app.router.add_post("/admin/repack", handlers.repack)
    app.router.add_get("/admin/receipts", handlers.receipts)


class _Handlers:
    def __init__(self, status: GatewayStatus) -> None:
        self._of = status

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(self._of.snapshot())

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while at least one engine serves; 503 tells load balancers to look elsewhere."""
        serving = [e.name for e in self._of.fleet.state.sorted_engines() if e.status == "serving"]
        return web.json_response(
            {"serving_engines": serving, "uptime_s": time.monotonic() - self._of.started},
            status=200 if serving else 503,
        )

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._of.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def timeline(self, request: web.Request) -> web.Response:
        after, limit = _number(request, "after", 0), _number(request, "limit", 1000)
        next_, events = self._of.timeline.read(after, min(limit, READ_MAX))
        return web.json_response({"next": next_, "events": [event.flat() for event in events]})

    async def add_engine(self, request: web.Request) -> web.Response:
        wanted = decode(_add, await request.read())
        if not is_address(wanted.url):
            raise BadField("url", f"{wanted.url!r} is no engine's address", hint="such as http://127.0.0.1:8000")
        if wanted.relay and not is_host_port(wanted.relay):
            raise BadField("relay", f"{wanted.relay!r} is not HOST:PORT", hint="such as 127.0.0.1:7070")
        check_kind(wanted.kind, "`kind`")
        spec = EngineSpec(wanted.name, wanted.kind, wanted.url, wanted.relay or None)
        if wanted.check:
            await self._of.fleet.probe(spec)
        self._of.fleet.add(spec)
        return web.json_response({"name": wanted.name}, status=201)

    async def remove_engine(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._of.fleet.remove(EngineName(name))
        return web.json_response({"name": name, "removed": True})

    async def plan(self, request: web.Request) -> web.Response:
        """What the planner would do now, with its reasons; nothing is moved."""
        return web.json_response({"plans": [plan_body(plan) for plan in self._of.repacker.plan()]})

    async def repack(self, request: web.Request) -> web.Response:
        """A round now, whatever the mode: the plans whose moves have begun."""
        return web.json_response({"plans": [plan_body(plan) for plan in self._of.repacker.repack()]})

    async def receipts(self, request: web.Request) -> web.Response:
        """Every move, newest first: price and gain as estimated, and as measured (null while not known)."""
        book = self._of.repacker.book
        newest = list(book.receipts)[::-1][: _number(request, "limit", 100)]
        rate = book.prefill_tokens_per_s(self._of.config.prefill_tokens_per_s)
        return web.json_response({"prefill_tokens_per_s": rate, "receipts": [receipt_body(r) for r in newest]})


def plan_body(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "price_s": plan.price_s, "gain_s": plan.gain_s}


def receipt_body(receipt: Receipt) -> dict[str, Any]:
    return {
        "number": receipt.number,
        "planned_unix_s": receipt.planned_unix_s,
        "version": receipt.version,
        "engine": receipt.engine,
        "reason": receipt.reason,
        "emptied_after_s": receipt.emptied_after_s,
        "price_s": {"estimated": receipt.estimate.price_s, "measured": receipt.price_measured_s},
        "gain_s": {"estimated": receipt.estimate.gain_s, "measured": receipt.gain_measured_s},
        "moves": [{**asdict(m.move), "outcome": m.outcome, "pause_s": m.pause_s} for m in receipt.moves],
    }


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise InvalidRequest(f"{name}={text!r} is not a number", hint=f"such as {name}={default}")
    return int(text)
