"""The scripted engine: it speaks vLLM's dialect over real HTTP, and fails as its script wants.

Its tokens are those of `gateway.faultkit.script.scripted`, or of `generate`: either way a function of all ids before
them, so that a turn that was cut and resumed can be compared with the uncut one.

Tests use it with their own scripts, not fakes of their own. Three engines stand beside it, each for a reason: that of
`tests/bench/gateway` must cost less than the gateway that it measures, that of `tests/bench/repack` decodes by a
committed curve, and `gateway.sim` has virtual time and no HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

from aiohttp import web

from gateway.faultkit.script import Cut, logprobs_of, scripted
from protos.telemetry.context import TRACEPARENT

MODEL = "policy"
Answer = str | bytes | int | tuple[int, str]
"""To a control call: a body (`bytes` may be anything), a status, both, or "reset" or "hang"."""
CONTEXT_TOKENS, BLOCKS, BLOCK_TOKENS = 4096, 1000, 16
LOAD_STEPS = (
    "/init_weight_transfer_engine",  # proves the snapshot
    "/pause",
    "/init_weight_transfer_engine",  # checks whether an update was left open
    "/start_weight_update",
    "/update_weights",
    "/init_weight_transfer_engine",  # checks whether all of it landed
    "/finish_weight_update",
    "/weight_info",
    "/resume",
)
"""The calls of a weight load, in order."""


@dataclass
class ReceivedRequest:
    """One completion request, and how it went."""

    body: dict[str, Any]
    version: str = ""  # the engine's at that time
    written: bool = False  # all of the response was handed to the socket
    left: bool = False  # the client disconnected before
    traceparent: str = ""  # the header of that name

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self.body["prompt"]
        return ids


@dataclass
class ScriptedEngine:
    """`async with ScriptedEngine("e0") as engine`: serves at `engine.url`.

    Each request takes one of `cuts`, and `always` when there are none left. `before_cut` is awaited with the number of
    ids, prompt included, that were generated. A stream waits before token `hold_at` (of its request) until `go` is set.
    """

    name: str = "e0"
    chunk: int = 2  # tokens per event
    split: bool = False  # every event in several writes, torn in the middle of anything
    burst: bool = False  # all events in one write, faster than any reader
    version: str = "0"
    version_told: str | None = None  # reported in streams, where it differs from `version`
    tells_versions: bool = True  # streams report versions
    version_early: bool = False  # in every event, as SGLang does, not in the last alone
    cuts: deque[Cut] = field(default_factory=deque)
    always: Cut | None = None
    draw: Callable[[], Cut | None] | None = None  # instead of `cuts` and `always`
    generate: Callable[[Sequence[int]], Sequence[int] | None] | None = None  # ids after a prompt, to a stop
    vocab_size: int = 1000
    revive_s: float | None = None  # how long a death lasts; None: for ever
    before_cut: Callable[[int], Awaitable[None]] | None = None
    hold_at: int | None = None
    pause_s: float = 0.0  # before every event
    said_tokens: int = 0  # handed to sockets, over all requests
    go: asyncio.Event = field(default_factory=asyncio.Event)
    top: list[dict[str, float] | None] | None = None  # top_logprobs of each event
    requests: list[ReceivedRequest] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)  # control: path and body
    answers: dict[str, Answer] = field(default_factory=dict)
    """By path, what a control call gets instead of its usual response."""
    answer: Callable[[str, Any], Answer | None] | None = None  # as `answers`, from path and body
    extra_metrics: str = ""
    started_unix_s: float = 1.0
    paused: bool = False
    dtype: str = ""  # reported as vLLM does, in the text of its configuration; empty: not reported
    port: int = 0
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/metrics", self._control)
        app.router.add_get("/v1/models", self._control)
        app.router.add_post("/tokenize", self._control)  # reports no tokens, unless `answers` has some
        app.router.add_get("/is_paused", self._control)
        app.router.add_get("/server_info", self._control)
        for path in dict.fromkeys(LOAD_STEPS):
            app.router.add_route("*", path, self._control)
        return app

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(self.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._reviving: set[asyncio.Task[None]] = set()
        await self._listen()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", int(self.url.rpartition(":")[2] or self.port))
        await self._site.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reviving in self._reviving:
            reviving.cancel()
        await self.die()
        await self._runner.cleanup()

    async def die(self) -> None:
        """As kill -9 does: nothing listens any more, and every connection is reset."""
        if self._site in self._runner.sites:
            # A connection that asyncio has accepted and not yet set up would be lost, unclosed, with its server: no
            # more are accepted, and those get two rounds of the event loop.
            for sock in self._site._server.sockets:  # type: ignore[union-attr]  # it listens
                asyncio.get_running_loop().remove_reader(sock.fileno())
            for _ in range(2):
                await asyncio.sleep(0)
            await self._site.stop()
        server = self._runner.server
        assert server is not None
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def revive(self, after_s: float) -> None:
        """Another incarnation under the same address."""
        await asyncio.sleep(after_s)
        self.started_unix_s += 1
        await self._listen()

    # -- generation

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._record(request, self.requests, self._answer)

    async def _record(
        self,
        request: web.Request,
        log: list[ReceivedRequest],
        answer: Callable[[web.Request, ReceivedRequest, Cut | None], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Notes the request in `log`, and answers it with its cut."""
        trace = request.headers.get(TRACEPARENT, "")
        received = ReceivedRequest(await request.json(), self.version, traceparent=trace)
        log.append(received)
        cut = self.draw() if self.draw is not None else self.cuts.popleft() if self.cuts else self.always
        try:
            return await answer(request, received, cut)
        except asyncio.CancelledError:
            received.left = True
            raise
        except ConnectionError:
            received.left = True
            return web.Response()  # nobody is left to get it

    async def _refused(self, cut: Cut | None) -> web.Response | None:
        """The response to a request that gets no stream, if it gets any."""
        if cut is not None and cut.kind == "silent":
            await _for_ever()
        if cut is not None and cut.kind in ("400", "500", "503"):
            return web.json_response({"error": {"message": f"scripted to answer {cut.kind}"}}, status=int(cut.kind))
        return None

    async def _answer(self, request: web.Request, received: ReceivedRequest, cut: Cut | None) -> web.StreamResponse:
        if (refused := await self._refused(cut)) is not None:
            return refused
        torn = cut is not None and cut.kind == "torn_500"
        response = web.StreamResponse(status=500 if torn else 200, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        budget, prompt = received.body["max_tokens"], received.prompt
        ids, logprobs, finish_reason = self._say(prompt, budget)
        changed_at = None
        if cut is not None and cut.kind == "version":
            changed_at, cut = max(1, min(cut.after, len(ids) - 1)), None
        whole = len(ids) if cut is None else min(cut.after, len(ids))
        held = b""
        for start in range(0, whole, self.chunk):
            if self.hold_at is not None and start >= self.hold_at:
                await self.go.wait()
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            end = min(start + self.chunk, whole)
            finish = finish_reason if cut is None and end == whole else None
            event = self._event(ids[start:end], logprobs[start:end], finish, end, changed_at)
            if self.burst:
                held += event
            else:
                await self._write(response, event)
            self.said_tokens += end - start
        if cut is not None:
            if self.before_cut is not None:
                await self.before_cut(len(prompt) + whole)
            await self._cut(request, response, cut, ids, logprobs, whole)
        else:
            await response.write(held + b"data: [DONE]\n\n")
        received.written = True
        return response

    def _say(self, prompt: Sequence[int], budget: int) -> tuple[list[int], list[float], str]:
        wanted = self.generate(prompt) if self.generate is not None else None
        if wanted is None:
            return *scripted(prompt, budget, self.vocab_size), "length"
        ids = list(wanted[:budget])
        return ids, logprobs_of(prompt, ids), "stop" if len(wanted) <= budget else "length"

    async def _cut(
        self,
        request: web.Request,
        response: web.StreamResponse,
        cut: Cut,
        ids: list[int],
        logprobs: list[float],
        at: int,
    ) -> None:
        """`ids` and `logprobs`: all that it would say; the first `at` were."""
        match cut.kind:
            case "closed" | "torn_500":
                await response.write(b'data: {"choices": [{"token_ids": [7')
            case "done":
                await response.write(b"data: [DONE]\n\n")
            case "abort":
                await response.write(self._event([], [], "abort", 0))
            case "error_event":
                await response.write(b'data: {"error": {"message": "the engine core died"}}\n\n')
            case "malformed":
                await response.write(b'data: {"choices": [\n\n')
            case "not_utf8":
                await response.write(b'data: {"choices": [{"finish_reason": "\xff"}]}\n\n')
            case "huge_line":
                await response.write(b'data: {"x": "' + b"x" * (9 << 20) + b'"}\n\n')
            case "no_logprobs":
                rest = {"choices": [{"token_ids": ids[at : at + 2]}]}
                await response.write(b"data: " + json.dumps(rest).encode() + b"\n\n")
            case "huge_id":
                await response.write(self._event([2**63], logprobs[at : at + 1] or [-1.0], None, at + 1))
            case "repeat":
                last = max(0, at - self.chunk)
                await response.write(self._event(ids[last:at], logprobs[last:at], None, at))
            case "shorten":
                missing = min(at + 1, len(ids))
                await response.write(self._event(ids[missing : at + 3], logprobs[missing : at + 3], None, at + 3))
        await self._break(request, cut)

    async def _break(self, request: web.Request, cut: Cut) -> None:
        """Does to the connection what the cut wants; most cuts only end the response."""
        assert request.transport is not None
        match cut.kind:
            case "reset":
                request.transport.abort()
            case "closed" | "torn_500":
                request.transport.close()
            case "hang":
                await _for_ever()
            case "death":
                await self.die()
                if self.revive_s is not None:
                    self._reviving.add(asyncio.create_task(self.revive(self.revive_s)))

    async def _write(self, response: web.StreamResponse, event: bytes) -> None:
        for piece in (event[i : i + 37] for i in range(0, len(event), 37)) if self.split else (event,):
            await response.write(piece)
            if self.split:
                await asyncio.sleep(0)

    def _event(
        self,
        ids: list[int],
        logprobs: list[float],
        finish: str | None,
        num_said: int,
        changed_at: int | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish}
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": ["é"] * len(ids), "top_logprobs": self.top}
        if self.tells_versions and (finish in ("length", "stop") or self.version_early):
            choice["weight_versions"] = self._spans(num_said, changed_at)
        usage = {"completion_tokens": num_said}
        return f"data: {json.dumps({'choices': [choice], 'usage': usage})}\r\n\r\n".encode()

    def _spans(self, num_said: int, changed_at: int | None) -> list[dict[str, Any]]:
        version = self.version if self.version_told is None else self.version_told
        if changed_at is None or changed_at >= num_said:
            return [{"version": version, "start": 0, "end": num_said}]
        other = {"version": f"{version}1", "start": changed_at, "end": num_said}
        return [{"version": version, "start": 0, "end": changed_at}, other]

    # -- control

    async def _control(self, request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else None
        path = request.path
        if path in LOAD_STEPS:
            self.calls.append((path, body))
        answer = self.answers.get(path) if self.answer is None else self.answer(path, body)
        if answer == "hang":
            await _for_ever()
        if answer == "reset":
            assert request.transport is not None
            request.transport.abort()
        if isinstance(answer, int):
            return web.Response(status=answer, text=f"scripted to answer {answer}")
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], text=answer[1])
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        if answer is not None:
            return web.Response(text=answer)
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        return web.Response(text=self._usual(path))

    def _usual(self, path: str) -> str:
        match path:
            case "/metrics":
                running = sum(not (a.written or a.left) for a in self.requests)
                return (
                    f"process_start_time_seconds {self.started_unix_s}\n"
                    f'vllm:num_requests_running{{engine="0"}} {running}\n'
                    f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{BLOCKS}"}} 1\n'
                ) + self.extra_metrics
            case "/server_info":
                dtype = f", dtype=torch.{self.dtype}" if self.dtype else ""
                return json.dumps({"vllm_config": f"model='{MODEL}'{dtype}, kv_cache_dtype=auto"})
            case "/is_paused":
                return json.dumps({"is_paused": self.paused})
            case "/v1/models":
                return json.dumps({"data": [{"id": MODEL, "max_model_len": CONTEXT_TOKENS}]})
            case _:
                return json.dumps({"weight_version": self.version})


async def _for_ever() -> NoReturn:
    """Until the client goes, which cancels the handler, or the server does."""
    await asyncio.Event().wait()
    raise AssertionError
