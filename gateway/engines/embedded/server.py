"""The HTTP routes of the embedded engine, in vLLM's dialect."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.engines.embedded import dialect
from gateway.engines.embedded.answers import Answer, completion_span
from gateway.engines.embedded.batching.sequence import GenerationRequest
from gateway.engines.embedded.metrics import EngineMetrics
from gateway.engines.embedded.service import DeltaStream, EngineService
from gateway.engines.embedded.text import Text
from protos.errors import InvalidRequest, LaminarError, OutOfCapacity
from protos.telemetry.context import TRACEPARENT, parse_traceparent
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)

VERSION = "laminar-embedded-0.1.0"
BODY_BYTES_MAX = 16 << 20
"""A prompt of a million token ids fits."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: EngineService, text: Text, tracer: Tracer | None = None) -> web.Application:
    """The application over a running service."""
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors_as_json])
    api = EngineApi(service, text, tracer)
    app.add_routes(
        [
            web.post("/v1/completions", api.completions),
            web.get("/v1/models", api.models),
            web.post("/tokenize", api.tokenize),
            web.get("/health", api.health),
            web.route("*", "/ping", api.health),
            web.get("/version", api.version),
            web.get("/load", api.load),
            web.get("/metrics", api.metrics_text),
            web.post("/pause", api.pause),
            web.post("/resume", api.resume),
            web.get("/is_paused", api.is_paused),
            web.post("/abort_requests", api.abort_requests),
            web.post("/init_weight_transfer_engine", api.init_transfer),
            web.post("/start_weight_update", api.start_update),
            web.post("/update_weights", api.update_weights),
            web.post("/finish_weight_update", api.finish_update),
            web.post("/update_weight_version", api.update_weight_version),
            web.get("/weight_info", api.weight_info),
            web.post("/reset_prefix_cache", api.reset_prefix_cache),
            web.get("/get_world_size", api.world_size),
            web.post("/collective_rpc", api.collective_rpc),
        ]
    )
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except LaminarError as e:
        if e.http_status >= 500:
            log.warning("%s %s: %s", request.method, request.path, e)
        headers = {"Retry-After": str(max(1, round(e.retry_after_s)))} if isinstance(e, OutOfCapacity) else {}
        return _json(_error_body(e), status=e.http_status, headers=headers)
    except web.HTTPException as e:
        if e.status < 400:
            raise
        known = ", ".join(sorted({r.resource.canonical for r in request.app.router.routes() if r.resource is not None}))
        hint = f"routes: {known}" if e.status == 404 else e.reason
        body = {"message": f"{request.method} {request.path}: {e.reason} ({hint})", "type": "HTTPException"}
        return _json({"error": {**body, "param": None, "code": e.status}}, status=e.status)


def _error_body(error: LaminarError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": error.code}}


def _json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )


async def _done(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


class EngineApi:
    """One handler per route."""

    def __init__(self, service: EngineService, text: Text, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._service, self._loop, self._text = service, service.loop, text
        config = service.config
        self._model = config.served_model_name
        self._limits = dialect.Limits(self._model, config.max_model_len, service.shape.vocab)
        self._metrics = EngineMetrics(config, lambda: service.loop.statistics)
        self._started = int(time.time())

    # -- generation --

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = dialect.decode(await request.read(), dialect.CompletionBody)
        request_id = body.request_id or request.headers.get("X-Request-Id") or uuid.uuid4().hex
        generation = dialect.to_request(body, request_id, self._limits, self._text.encode)
        answer = Answer(body, generation, self._model, self._text)
        started_unix_s = time.time()
        try:
            return await self._answer(request, body, generation, answer)
        finally:
            if self._tracer is not None:
                trace = parse_traceparent(request.headers.get(TRACEPARENT)) or self._tracer.begin()
                self._tracer.record(completion_span(trace, generation, answer, started_unix_s, time.time()))

    async def _answer(
        self, request: web.Request, body: dialect.CompletionBody, generation: GenerationRequest, answer: Answer
    ) -> web.StreamResponse:
        async with self._service.generate(generation) as stream:
            chunks = self._chunks(stream, answer)
            if body.stream:
                return await self._stream(request, body, answer, chunks)
            return await self._whole(answer, chunks)

    async def tokenize(self, request: web.Request) -> web.Response:
        """The ids of a text, in vLLM's format."""
        body = dialect.decode(await request.read(), dialect.TokenizeBody)
        if body.model not in (None, self._model):
            raise InvalidRequest(f"this engine serves {self._model!r}, not {body.model!r}")
        ids = self._text.encode(body.prompt, body.add_special_tokens)
        return _json({"count": len(ids), "max_model_len": self._limits.max_model_len, "tokens": ids})

    async def _chunks(self, stream: DeltaStream, answer: Answer) -> AsyncIterator[None]:
        """Feeds the answer as deltas arrive; yields when a chunk is due."""
        last = time.monotonic()
        while not stream.finished:
            answer.add(await stream.take())
            now = time.monotonic()
            if answer.first_token_s is None:
                answer.first_token_s = now - last
                self._metrics.first_token(now - last)
            else:
                self._metrics.next_token(now - last)
            last = now
            if answer.due:
                yield
        self._metrics.request_ended(answer.finish_reason or "abort")

    async def _whole(self, answer: Answer, chunks: AsyncIterator[None]) -> web.Response:
        async for _ in chunks:
            pass
        return _json({**answer.take(), "usage": answer.usage()})

    async def _stream(
        self, request: web.Request, body: dialect.CompletionBody, answer: Answer, chunks: AsyncIterator[None]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            async for event in self._events(body, answer, chunks):
                await response.write(event)
        except ConnectionResetError:
            log.debug("a client disconnected, and an event was written before its handler was cancelled")
        return response

    async def _events(
        self, body: dialect.CompletionBody, answer: Answer, chunks: AsyncIterator[None]
    ) -> AsyncIterator[bytes]:
        options = body.stream_options
        try:
            async for _ in chunks:
                event = answer.take()
                if options is not None and options.continuous_usage_stats:
                    event["usage"] = answer.usage()
                yield _event(event)
        except LaminarError as e:  # the status line is out: the error is the stream's last event, and no [DONE]
            yield _event(_error_body(e))
            return
        if options is not None and options.include_usage:
            yield _event(answer.usage_chunk())
        yield b"data: [DONE]\n\n"

    async def abort_requests(self, request: web.Request) -> web.Response:
        body = dialect.decode(await request.read(), dialect.AbortBody)
        aborted = await _done(self._loop.abort(body.request_ids or None))
        return _json({"status": "aborted", "aborted": aborted})

    # -- status --

    async def models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "laminar",
            "root": str(self._service.config.model),
            "parent": None,
            "max_model_len": self._service.config.max_model_len,
            "dtype": self._service.config.dtype,
        }
        return _json({"object": "list", "data": [card]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._loop.failed is None else 503)

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def load(self, _: web.Request) -> web.Response:
        return _json({"server_load": self._service.num_open})

    async def metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), content_type="text/plain", charset="utf-8")

    async def world_size(self, _: web.Request) -> web.Response:
        return _json({"world_size": 1})

    # -- pause --

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise InvalidRequest(f"pause mode {mode!r} is unknown", hint="abort, wait or keep")
        clear = _flag(request, "clear_cache", default=True)
        await _done(self._loop.pause(mode, clear_cache=clear))  # type: ignore[arg-type]
        return _json({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await _done(self._loop.resume())
        return _json({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return _json({"is_paused": await _done(self._loop.is_paused())})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        await _done(self._loop.reset_prefix_cache())
        return _json({"success": True})

    # -- weights --

    async def init_transfer(self, request: web.Request) -> web.Response:
        dialect.decode(await request.read(), dialect.InitBody)
        with self._timed("init"):
            await _done(self._loop.init_transfer())
        return _json({"message": "Weight transfer initialized"})

    async def start_update(self, _: web.Request) -> web.Response:
        with self._timed("start"):
            await _done(self._loop.start_update())
        return _json({"message": "Weight update started"})

    async def update_weights(self, request: web.Request) -> web.Response:
        body = dialect.decode(await request.read(), dialect.UpdateBody)
        with self._timed("update"):
            await _done(self._loop.update_weights(Path(body.update_info.path)))
        return _json({"message": "Weights updated"})

    async def finish_update(self, request: web.Request) -> web.Response:
        body = dialect.decode(await request.read(), dialect.FinishBody)
        with self._timed("finish"):
            await _done(self._loop.finish_update(body.weight_version))
        return _json({"message": "Weight update finished"})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = dialect.decode(await request.read(), dialect.LabelBody)
        await _done(self._loop.set_label(body.new_version))
        return _json({"success": True, "new_version": body.new_version})

    async def weight_info(self, _: web.Request) -> web.Response:
        return _json({"weight_version": await _done(self._loop.weight_version())})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = dialect.decode(await request.read(), dialect.RpcBody)
        await _done(self._loop.reload_weights(Path(body.kwargs.weights_path)))
        return _json({"results": [None]})

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._metrics.update_operation(operation, time.monotonic() - started)


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    value = request.query.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}={value!r} is not a boolean", hint="true or false")
    return value.lower() in ("true", "1")
