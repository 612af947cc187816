"""Anthropic's routes: `POST /v1/messages` and `/v1/messages/count_tokens`, on the same sessions and turns as chat.

Their errors are Anthropic's (`gateway.api.errors`), and every response has a `request-id`.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.api.anthropic.bodies import CountTokensRequest, MessagesRequest
from gateway.api.anthropic.conversation import chat_of
from gateway.api.anthropic.schema import TokenCount
from gateway.api.anthropic.writer import MessagesForm
from gateway.api.bodies import answer_json, decode, within
from gateway.api.calls.service import NOBODY, Calls, ParsedRequest
from gateway.api.openai.parser import Parser
from gateway.api.openai.routes import PREFIXES

_messages = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountTokensRequest)


def add_anthropic_routes(app: web.Application, calls: Calls) -> None:
    handlers = _Handlers(calls)
    for prefix in PREFIXES:
        app.router.add_post(f"{prefix}/v1/messages", handlers.messages)
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", handlers.count_tokens)


class _Handlers:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._parser = Parser(calls.turns, calls.codec)
        self._switches_thinking = any("enable_thinking" in chat.template.variables for chat in calls.codec.chats)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        parsed = await within(request, raw, lambda: self._parse(decode(_messages, raw), len(raw)))
        return await self._calls.answer(request, raw, parsed)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """The length of the prompt that the message would have, in its session if that exists."""
        raw = await request.read()
        parsed = await within(request, raw, lambda: self._parse(decode(_count, raw), len(raw)))
        identity = self._calls.identify(request, parsed.named)
        found = None if identity.session_id is None else self._calls.turns.find_session(identity.session_id)
        [prompt], _ = await self._calls.prompts(found or NOBODY, parsed)
        return answer_json(TokenCount(len(prompt.token_ids)))

    def _parse(self, body: MessagesRequest | CountTokensRequest, size: int) -> ParsedRequest:
        chat = chat_of(body, switches_thinking=self._switches_thinking)
        return self._parser.chat(chat, size, api="messages", form=MessagesForm())
