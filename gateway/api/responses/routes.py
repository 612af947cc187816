"""`POST /v1/responses`, and what is read of a response, at the root and below a session's path.

A call that names no session makes one, unless it says `store`: false, so that the next call can continue it by
`previous_response_id`; nothing trains on such a session. It ends as others do: finished, abandoned, or idle.
"""

from __future__ import annotations

from aiohttp import web

from gateway.api.access import caller_of
from gateway.api.bodies import AT_ONCE_BYTES, answer_json, within
from gateway.api.calls.service import Calls
from gateway.api.errors import RefusedField
from gateway.api.openai.parser import Parser
from gateway.api.openai.routes import PREFIXES
from gateway.api.responses.parser import ResponsesParser
from gateway.api.responses.record import items_of, recorded, response_of
from gateway.api.responses.schema import InputItems
from gateway.core.access import READ, Target, require
from gateway.runtime.aside import aside


def _check_query(request: web.Request, *known: str) -> None:
    """Refuses what would change the answer elsewhere and is not read here."""
    for name in request.query:
        if name not in known:
            raise RefusedField(
                name,
                f"the query `{name}` is not supported",
                hint=f"there are: {', '.join(known)}" if known else "leave it out: a response is read back as recorded",
            )


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
        _check_query(request)
        return answer_json(response_of(view, turn_id, model.name))

    async def input_items(request: web.Request) -> web.Response:
        view, turn_id = recorded(calls.turns, request.match_info["response_id"])
        require(READ, caller_of(request), Target(view.session_id, view.owner))
        _check_query(request, "order", "limit", "after")
        query = request.query
        order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
        shown, left = items_of(view, turn_id, order, limit, after)
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return answer_json(InputItems(data=shown, has_more=left > 0, first_id=first, last_id=last))

    async def refuse(request: web.Request) -> web.Response:
        view, _ = recorded(calls.turns, request.match_info["response_id"])
        require(READ, caller_of(request), Target(view.session_id, view.owner))
        raise RefusedField(
            "response_id",
            "a response is part of its session's record: it is neither deleted nor cancelled by itself",
            hint="end the session with POST /sessions/ID/abandon; a client that leaves cancels its call",
        )

    for prefix in PREFIXES:
        app.router.add_get(f"{prefix}/v1/responses/{{response_id}}/input_items", input_items)
        app.router.add_delete(f"{prefix}/v1/responses/{{response_id}}", refuse)
        app.router.add_post(f"{prefix}/v1/responses/{{response_id}}/cancel", refuse)
        app.router.add_post(f"{prefix}/v1/responses", create)
        app.router.add_get(f"{prefix}/v1/responses/{{response_id}}", retrieve)
