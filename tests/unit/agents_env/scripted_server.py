"""A server over a real socket that speaks the gateway's sessions and OpenAI chat, with scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Conversation = list[dict[str, str]]
Script = Callable[[Conversation], Any]
"""Answers a conversation with text, or with a message's fields."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer other than 200, given once."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: str = '{"error": {"message": "scripted", "type": "t", "code": "c"}}'


class ScriptedServer:
    """`script` answers conversations; `refuse[path kind]` are answers given first: "chat", "open", "finish"."""

    def __init__(
        self, script: Script, *, model: str = "policy", extend: Callable[[web.Application], None] | None = None
    ) -> None:
        self.extend = extend
        self.script = script
        self.model = model
        self.url = ""
        self.refuse: dict[str, deque[Refusal]] = defaultdict(deque)
        self.lost: deque[Refusal | None] = deque()  # instead of the answer to a finish, once carried out; None: a cut
        self.cut_chats = 0  # so many answers to chats are lost
        self.turn_keys: list[str | None] = []
        self.sessions: dict[str, dict[str, Any]] = {}
        self.finished: dict[str, dict[str, Any]] = {}
        self.abandoned: dict[str, str] = {}
        self.chats: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most_at_once = 0
        self.hold: asyncio.Event | None = None  # answers wait for it
        self.hold_from: int | None = None  # the answer of this number, from 1, and later ones never come
        self._chat_begun = asyncio.Condition()
        self._at_once = 0

    async def chats_reach(self, number: int) -> None:
        """Waits until so many requests to chat have come."""
        async with self._chat_begun:
            await self._chat_begun.wait_for(lambda: len(self.chats) >= number)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/sessions", self._open)
        app.router.add_get("/sessions/{session}", self._look)
        app.router.add_post("/sessions/{session}/finish", self._finish)
        app.router.add_post("/sessions/{session}/abandon", self._abandon)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.extend is not None:
            self.extend(app)
        return app

    def _refusal(self, kind: str) -> web.Response | None:
        if not self.refuse[kind]:
            return None
        refusal = self.refuse[kind].popleft()
        return web.Response(
            status=refusal.status, headers=refusal.headers, text=refusal.body, content_type="application/json"
        )

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "test"}
        return self._refusal("models") or web.json_response({"object": "list", "data": [entry]})

    async def _open(self, request: web.Request) -> web.Response:
        if refused := self._refusal("open"):
            return refused
        body = await request.json()
        session = body["session_id"]
        if session in self.sessions:
            return web.json_response({"error": {"message": "there is such a session"}}, status=409)
        self.sessions[session] = body
        url = f"{self.url}/sessions/{session}/v1"
        return web.json_response({"session_id": session, "base_url": url, "api_key": f"key-{session}"})

    async def _look(self, request: web.Request) -> web.Response:
        session = request.match_info["session"]
        if (asked := self.finished.get(session)) is not None:
            return web.json_response({"session_id": session, "state": "finished", "result": asked})
        if session in self.abandoned:
            return web.json_response({"session_id": session, "state": "abandoned", "result": None})
        if session in self.sessions:
            turns = sum(key == f"Bearer key-{session}" for key in self.keys)
            return web.json_response({"session_id": session, "state": "live", "turns": turns, "running": 0})
        return web.json_response({"error": {"message": "no such session"}}, status=404)

    async def _finish(self, request: web.Request) -> web.Response:
        if refused := self._refusal("finish"):
            return refused
        self.finished[request.match_info["session"]] = await request.json()
        if self.lost:
            if (instead := self.lost.popleft()) is not None:
                return web.Response(status=instead.status, text=instead.body)
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({})

    async def _abandon(self, request: web.Request) -> web.Response:
        session = request.match_info["session"]
        if session not in self.sessions:
            return web.json_response({"error": {"message": "no such session"}}, status=404)
        self.abandoned[session] = (await request.json())["reason"]
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.Response:
        if refused := self._refusal("chat"):
            return refused
        body = await request.json()
        self.chats.append(body)
        self.keys.append(request.headers["Authorization"])
        self.turn_keys.append(request.headers.get("Idempotency-Key"))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        async with self._chat_begun:
            self._chat_begun.notify_all()
        try:
            if self.hold is not None:
                await self.hold.wait()
            if self.hold_from is not None and len(self.chats) >= self.hold_from:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        finally:
            self._at_once -= 1
        if self.cut_chats:
            self.cut_chats -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.Response(text=json.dumps(self._completion(body)), content_type="application/json")

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.script(body["messages"])
        text = answer if isinstance(answer, str) else ""
        words = text.split()
        cut = len(words) > body["max_tokens"]
        message = {"role": "assistant", "content": " ".join(words[: body["max_tokens"]]) if cut else text}
        if not isinstance(answer, str):
            message = {"role": "assistant", "content": None, **answer}
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop", "logprobs": None}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncIterator[ScriptedServer]:
    """Serves on a free port of loopback until left."""
    server = ScriptedServer(script, **options)
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    host, port = site._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


def perfect(conversation: Conversation) -> str:
    """What a model writes that makes no mistake in a tool chain."""
    last = conversation[-1]["content"].removeprefix("Start with ")
    value, _, instruction = last.partition(". ")
    if instruction == "Result?":
        return value
    operation, operand = instruction.removesuffix(".").rsplit(" ", 1)
    return f"calc({value} {({'Add': '+', 'Subtract': '-', 'Multiply by': '*'})[operation]} {operand})"
