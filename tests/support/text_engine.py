"""The scripted engine with text routes: chats and completions, whole and streamed, with the same cuts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gateway.faultkit.script import Cut
from tests.support.scripted_engine import ReceivedRequest, ScriptedEngine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def words(name: str, version: str, num: int) -> list[str]:
    """The answer of engine `name` under `version`."""
    return [f"{name}-v{version}-{i}" for i in range(num)]


@dataclass
class TextEngine(ScriptedEngine):
    """Answers with `words`, one for each of `max_tokens`. A cut comes after so many of them; in an answer that is not
    streamed, before it (0) or in its middle. `hold_text_at`: waits for `go` before that word, or the whole answer."""

    texts: list[ReceivedRequest] = field(default_factory=list)
    hold_text_at: int | None = None
    said_words: int = 0
    piece: int = 1 << 20  # bytes of a stream's write
    torn_by: int = 0  # bytes of the next event that a "closed" stream, or one that is held, still sends

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post(CHAT, self._chat)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await (self._chat(request) if isinstance(body["prompt"], str) else super()._completions(request))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        streams = (await request.json()).get("stream")
        return await self._record(request, self.texts, self._text_stream if streams else self._text_whole)

    async def _refused(self, cut: Cut | None) -> web.Response | None:
        if cut is not None and cut.kind != "silent" and self.hold_text_at == 0:
            await self.go.wait()
        return await super()._refused(cut)

    async def _text_whole(self, request: web.Request, asked: ReceivedRequest, cut: Cut | None) -> web.StreamResponse:
        if self.hold_text_at is not None:
            await self.go.wait()
        if (refused := await self._refused(cut)) is not None:
            return refused
        body = json.dumps(answer(" ".join(words(self.name, self.version, asked.body["max_tokens"])))).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
        if cut is not None:
            if cut.after:
                await response.prepare(request)
                await response.write(body[: len(body) // 2])
            await self._break_text(request, cut)
            return response
        await response.prepare(request)
        await response.write(body)
        asked.written = True
        return response

    async def _text_stream(self, request: web.Request, asked: ReceivedRequest, cut: Cut | None) -> web.StreamResponse:
        if (refused := await self._refused(cut)) is not None:
            return refused
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        said = words(self.name, self.version, asked.body["max_tokens"])
        for at, word in enumerate(said if cut is None else said[: cut.after]):
            said_already = self.torn_by if at == self.hold_text_at else 0
            if at == self.hold_text_at:
                await response.write(event(word)[:said_already])
                await self.go.wait()
            await self._pieces(response, event(word)[said_already:])
            self.said_words += 1
        if cut is not None:
            if cut.kind == "closed":
                await response.write(event(said[cut.after])[: self.torn_by])
            await self._break_text(request, cut)
            return response
        await self._pieces(response, b"data: [DONE]\n\n")
        asked.written = True
        return response

    async def _break_text(self, request: web.Request, cut: Cut) -> None:
        if self.before_cut is not None:
            await self.before_cut(cut.after)
        await self._break(request, cut)

    async def _pieces(self, response: web.StreamResponse, data: bytes) -> None:
        for at in range(0, len(data), self.piece):
            await response.write(data[at : at + self.piece])
            if self.piece < len(data):
                await asyncio.sleep(0)


def answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "length"}]}


def event(word: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': word}}]})}\n\n".encode()


def said_in(stream: bytes) -> tuple[list[str], list[Any]]:
    """The words of a stream, and what else its events hold: an error, or "[DONE]"."""
    found: list[str] = []
    others: list[Any] = []
    for block in stream.split(b"\n\n"):
        if not block:
            continue
        data = block.removeprefix(b"data: ").decode()
        decoded = data if data == "[DONE]" else json.loads(data)
        if isinstance(decoded, dict) and "choices" in decoded:
            found.append(decoded["choices"][0]["delta"]["content"])
        else:
            others.append(decoded)
    return found, others


def asked_of(*engines: TextEngine) -> list[int]:
    """How many requests for text each received."""
    return [len(engine.texts) for engine in engines]
