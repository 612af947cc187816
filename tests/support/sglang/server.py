"""The stand-in's HTTP side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.support.sglang.engine import Died, Engine, Request
from tests.support.sglang.wire import (
    AbortBody,
    BeginBody,
    ContinueBody,
    DiskBody,
    EndBody,
    GenerateBody,
    NameBody,
    PauseBody,
    Refused,
    TensorBody,
    VersionBody,
    check,
    decode,
)

HEALTH_TIMEOUT_S = 20.0
INCLUDES = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One server over `engine`. `incremental`: as started with `--incremental-streaming-output`."""

    def __init__(self, engine: Engine, *, incremental: bool = False, disconnect_s: float = 2.0) -> None:
        self.engine, self.incremental, self.disconnect_s = engine, incremental, disconnect_s
        self._runs: set[asyncio.Task[None]] = set()
        self.died = asyncio.Event()

    async def drained(self) -> None:
        """Returns when no request is left."""
        while self._runs:
            await asyncio.wait(self._runs)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[self._errors])
        for path, handler in {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weight_version": self._version,
            "/get_weights_by_name": self._parameter,
        }.items():
            app.router.add_post(path, handler)
        app.router.add_route("*", "/flush_cache", self._flush)
        for path, handler in {
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
        }.items():
            app.router.add_get(path, handler)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.method == "POST":
                print("POST", request.path, "under", self.engine.label, flush=True)
            if self.engine.died:
                raise Died(self.engine.died)
            return await handler(request)
        except Died as e:
            print("died:", e, flush=True)
            self.died.set()
            assert request.transport is not None
            request.transport.abort()
            return web.Response()  # to nobody
        except Refused as e:
            if request.path == "/generate":
                return web.json_response({"error": _error(str(e))}, status=400)
            return web.json_response({"success": False, "message": str(e), "object": "error"}, status=400)

    # -- generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = decode(await http.read(), GenerateBody)
        try:
            check(body, self.engine.vocab, self.engine.context)
            request = self.engine.make_request(body)
        except Refused as e:  # found while the stream is already answered
            if not body.stream:
                raise
            return await _stream_error(http, str(e))
        run = asyncio.create_task(self.engine.generate(request))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        try:
            return await (self._stream(http, request) if body.stream else self._whole(request))
        except (asyncio.CancelledError, ConnectionError):
            asyncio.get_running_loop().call_later(self.disconnect_s, request.end)
            raise

    async def _stream(self, http: web.Request, request: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        given = 0
        while True:
            await request.grew.wait()
            request.grew.clear()
            over = request.finish is not None
            start = given if self.incremental else 0
            given = len(request.ids)
            await response.write(f"data: {json.dumps(self._event(request, start))}\n\n".encode())
            if over:
                break
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _whole(self, request: Request) -> web.Response:
        while request.finish is None:
            request.grew.clear()
            await request.grew.wait()
        return web.json_response(self._event(request, 0))

    def _event(self, request: Request, start: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.body.input_ids),
            "completion_tokens": len(request.ids),
            "cached_tokens": 0,
            "num_retractions": request.retractions,
            "weight_version": self.engine.label,
        }
        if request.finish is not None:
            meta["weight_versions"] = request.spans
        if request.body.return_logprob:
            pairs = list(zip(request.logprobs, request.ids, strict=False))[start:]
            meta["output_token_logprobs"] = [[p, i, None] for p, i in pairs]
            if num := request.body.top_logprobs_num:
                meta["output_top_logprobs"] = [[[p - k, i + k, None] for k in range(num)] for p, i in pairs]
        return {"text": "", "output_ids": request.ids[start:], "meta_info": meta}

    async def _abort(self, http: web.Request) -> web.Response:
        body = decode(await http.read(), AbortBody)
        self.engine.abort(body.rid, everything=body.abort_all)
        return web.Response()

    # -- pause and weights

    async def _pause(self, http: web.Request) -> web.Response:
        await self.engine.pause(decode(await http.read(), PauseBody).mode)
        return web.json_response({"message": "Generation paused.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        decode(await http.read(), ContinueBody)
        self.engine.resume()
        return web.json_response({"message": "Generation continued.", "status": "ok"})

    async def _begin(self, http: web.Request) -> web.Response:
        self.engine.begin(decode(await http.read(), BeginBody).selector)
        return _done()

    async def _end(self, http: web.Request) -> web.Response:
        decode(await http.read(), EndBody)
        self.engine.end_session()
        return _done()

    async def _from_disk(self, http: web.Request) -> web.Response:
        still = await self.engine.update_from_disk(decode(await http.read(), DiskBody))
        return _done(num_paused_requests=still)

    async def _from_tensor(self, http: web.Request) -> web.Response:
        await self.engine.update_from_tensor(decode(await http.read(), TensorBody))
        return _done()

    async def _parameter(self, http: web.Request) -> web.Response:
        body = decode(await http.read(), NameBody)
        found = self.engine.model.get_weights_by_name(body.name, body.truncate_size, tp_size=self.engine.tp_size)
        if found is None:
            return web.json_response({"error": _error("Get parameter by name failed")}, status=400)
        return web.json_response(found)

    async def _version(self, http: web.Request) -> web.Response:
        body = decode(await http.read(), VersionBody)
        if body.abort_all_requests:
            self.engine.abort("", everything=True)
        self.engine.label = body.new_version
        return _done(new_version=body.new_version)

    async def _flush(self, http: web.Request) -> web.Response:
        flushed = self.engine.flush()
        return web.Response(text="Cache flushed." if flushed else "Flush failed.", status=200 if flushed else 400)

    # -- looking

    async def _model_info(self, _: web.Request) -> web.Response:
        engine = self.engine
        return web.json_response({"model_path": engine.served_name, "weight_version": engine.label})

    async def _server_info(self, _: web.Request) -> web.Response:
        engine = self.engine
        return web.json_response(
            {
                "random_seed": engine.seed,
                "dtype": engine.dtype,
                "tp_size": engine.tp_size,
                "dp_size": engine.dp_size,
                "pp_size": 1,
                "enable_deterministic_inference": engine.deterministic,
                "custom_weight_loader": list(engine.loaders),
                "incremental_streaming_output": self.incremental,
                "weight_version": engine.label,
                "max_total_num_tokens": engine.max_tokens,
                "max_req_input_len": engine.context - 6,
                "internal_states": [{}],
                "version": "0.5.23",
            }
        )

    async def _loads(self, http: web.Request) -> web.Response:
        wanted = set(http.query.get("include", "all").split(","))
        if not wanted <= INCLUDES or http.query.get("format", "json") not in ("json", "prometheus"):
            raise Refused(f"include must be of {sorted(INCLUDES)}")
        engine = self.engine
        requests = list(engine.requests.values())
        used = sum(len(r.body.input_ids) + len(r.ids) for r in requests if r.kv)
        waiting = sum(not r.kv for r in requests)
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(requests) - waiting,
            "num_waiting_reqs": waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": engine.max_tokens,
            "token_usage": used / engine.max_tokens,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
        }
        return web.json_response({"version": "0.5.23", "dp_rank_count": 1, "loads": [load]})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.engine.served_name, "object": "model", "max_model_len": self.engine.context}
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.engine.running.wait()
        except TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.paused or self.engine.draining else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        """As of a server started with `--enable-metrics`: the one counter that tests read."""
        labels = f'{{model_name="{self.engine.served_name}"}}'
        return web.Response(text=f"sglang:generation_tokens_total{labels} {self.engine.generated_tokens}\n")


def _done(**more: Any) -> web.Response:
    return web.json_response({"success": True, "message": "Succeeded", **more})


async def _stream_error(http: web.Request, message: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    await response.write(f"data: {json.dumps({'error': _error(message)})}\n\ndata: [DONE]\n\n".encode())
    return response


def _error(message: str) -> dict[str, Any]:
    return {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
