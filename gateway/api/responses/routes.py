"""`POST /v1/responses` and `GET /v1/responses/{id}`, at the root and below a session's path, as the other model calls.

A call that names no session makes one, unless it says `store`: false, so that the next call can continue it by
`previous_response_id`; nothing trains on such a session. It ends as others do: finished, abandoned, or idle.
"""

from __future__ import annotations

from aiohttp import web

from gateway.api.access import caller_of
from gateway.api.bodies import AT_ONCE_BYTES, answer_json, within
from gateway.api.calls.service import Calls
from gateway.api.openai.parser import Parser
from gateway.api.openai.routes import PREFIXES
from gateway.api.responses.parser import ResponsesParser
from gateway.api.responses.record import recorded, response_of
from gateway.core.access import READ, Target, require
from gateway.runtime.aside import aside


def add_responses_routes(app: web.Application, calls: Calls) -> None:
    parser = ResponsesParser(calls.turns, calls.codec, Parser(calls.turns, calls.codec))

    async def create(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = await within(request, raw, lambda: parser.decode(raw))
        previous = parser.previous(body)
        parsed = await aside(lambda: parser.parse(body, len(raw), previous), long=len(raw) > AT_ONCE_BYTES)
        return await calls.answer(request, raw, parsed)

    async def retrieve(request: web.Request) -> web.Response:
        [model] = calls.turns.models()
        view, turn_id = recorded(calls.turns, request.match_info["response_id"])
        require(READ, caller_of(request), Target(view.session_id, view.owner))
        return answer_json(response_of(view, turn_id, model.name))

    for prefix in PREFIXES:
        app.router.add_post(f"{prefix}/v1/responses", create)
        app.router.add_get(f"{prefix}/v1/responses/{{response_id}}", retrieve)
