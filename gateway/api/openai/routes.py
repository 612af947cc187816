"""The OpenAI endpoints: from a request to its session, prompt and turns, which `gateway.api.calls` reads and sends.

Every path is served at the root and below `/sessions/{sid}` and `/s/{sid}`. Every response has `X-Session-ID`,
`X-Laminar-Session-From` (what named the session; "none": nothing did) and `X-Laminar-History` (how the prompt came from
the session's record: `gateway.api.calls.history`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from gateway.api.bodies import answer_json, within
from gateway.api.calls.service import Calls, ParsedRequest
from gateway.api.openai import requests
from gateway.api.openai.parser import Parser
from gateway.api.openai.schema import Model, Models
from gateway.api.openai.text_proxy import TextRoutes
from gateway.core.placing.text_requests import TextApi
from gateway.ports import ModelInfo

PREFIXES = ("", "/sessions/{sid}", "/s/{sid}")
BODY_BYTES_MAX = 1 << 30
"""For the application's `client_max_size`: long histories with logprobs exceed aiohttp's 1 MiB."""


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    calls: Calls
    text: TextRoutes | None = None  # None: every request takes the token path


def add_openai_routes(app: web.Application, deps: OpenAIDeps) -> None:
    """Run the application with `handler_cancellation=True`: a client that disconnects then cancels its handler."""
    handlers = _Handlers(deps)
    for prefix in PREFIXES:
        app.router.add_post(f"{prefix}/v1/chat/completions", handlers.chat)
        app.router.add_post(f"{prefix}/v1/completions", handlers.completions)
        app.router.add_get(f"{prefix}/v1/models", handlers.models)
        app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", handlers.model)


class _Handlers:
    def __init__(self, deps: OpenAIDeps) -> None:
        self._calls, self._text = deps.calls, deps.text
        self._turns = deps.calls.turns
        self._parser = Parser(deps.calls.turns, deps.calls.codec)

    async def models(self, request: web.Request) -> web.Response:
        return answer_json(Models("list", [_model(m) for m in self._turns.models()]))

    async def model(self, request: web.Request) -> web.Response:
        return answer_json(_model(requests.find_model(request.match_info["model"], self._turns.models())))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat", lambda raw: self._parser.chat(requests.decode_chat(raw), len(raw)))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request, "completion", lambda raw: self._parser.completion(requests.decode_completion(raw), len(raw))
        )

    async def _answer(
        self, request: web.Request, api: TextApi, parse: Callable[[bytes], ParsedRequest]
    ) -> web.StreamResponse:
        raw = await request.read()
        if self._text is not None and (seen := await self._text.glance(request, raw)) is not None:
            return await self._text.answer(request, raw, api, seen)
        return await self._calls.answer(request, raw, await within(request, raw, lambda: parse(raw)))


def _model(model: ModelInfo) -> Model:
    return Model(model.name, "model", model.created_unix_s, "laminar", model.context_tokens, model.name)
