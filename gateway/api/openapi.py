"""`GET /openapi.json`: the served schema, made of the table of routes and of the structs that it names.

Every route may also respond with 4xx or 5xx and the error body of `gateway.api.errors`. Which keys a route takes
follows from its operation; a gateway without `--api-keys` takes every request.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.access import API_KEY_HEADER
from gateway.api.anthropic.bodies import NEUTRAL as NEUTRAL_MESSAGES
from gateway.api.anthropic.bodies import NEUTRAL_TOOL, CountTokensRequest, MessagesRequest
from gateway.api.anthropic.conversation import NEEDED as BLOCK_TYPES
from gateway.api.anthropic.conversation import ROLES as MESSAGE_ROLES
from gateway.api.calls.answer import VERSION_HEADER
from gateway.api.calls.fields import FIELDS, NEUTRAL
from gateway.api.calls.identity import KEY_HEADER, SESSION_HEADERS
from gateway.api.generate import NEUTRAL as NEUTRAL_GENERATE
from gateway.api.generate import GenerateRequest, GenerateSampling
from gateway.api.openai.bodies import NEUTRAL_CHAT, NEUTRAL_COMPLETION, ChatRequest, CompletionRequest
from gateway.api.openai.requests import CHOICES_MAX, LOGPROBS_MAX, ROLES
from gateway.api.openai.text_proxy import ENGINE_HEADER
from gateway.api.responses.bodies import NEUTRAL as NEUTRAL_RESPONSES
from gateway.api.responses.bodies import ResponsesRequest
from gateway.api.routes import ROUTES, Json, Route
from gateway.core.access import Operation
from gateway.core.parameters import PARAMETERS
from protos.access.roles import ROLES as KEY_ROLES


def add_openapi_route(app: web.Application) -> None:
    document = _document()

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=document, content_type="application/json")

    app.router.add_get("/openapi.json", openapi)


@functools.cache
def _document() -> bytes:
    """The same for every application of this process; it takes some 40 ms of processor time."""
    return msgspec.json.encode(schema())


def schema() -> Json:
    structs = list(dict.fromkeys(s for route in ROUTES for s in (route.body, *route.answers) if s is not None))
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    components |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components["ChatMessage"]["properties"]["role"] = {"enum": list(ROLES)}
    components["Tool"]["properties"]["type"] = {"enum": ["function"]}
    for struct, neutral in _NEUTRAL.items():
        fields = components[struct.__name__]["properties"]
        fields |= _neutral(neutral)
        for name, bounds in (_BOUNDS | _BOUNDS_OF[struct]).items():
            if name in fields:
                _bound(fields[name], bounds)
    components["GenerateSampling"]["properties"] |= _neutral(NEUTRAL_GENERATE)
    _constrain_messages(components)
    _describe(components)
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Laminar rollout gateway", "version": version("laminar-rl")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY_SCHEMES},
    }


def _constrain_messages(components: Json) -> None:
    """What the Messages API checks after decoding."""
    components["MessageParam"]["properties"]["role"] = {"enum": list(MESSAGE_ROLES)}
    components["Block"]["properties"]["type"] = {"enum": list(BLOCK_TYPES)}
    for name, neutral in (
        ("MessagesRequest", NEUTRAL_MESSAGES),
        ("CountTokensRequest", NEUTRAL_MESSAGES),
        ("ToolDefinition", NEUTRAL_TOOL),
    ):
        components[name]["properties"] |= _neutral(neutral)
    for parameter in PARAMETERS:
        _bound(components["MessagesRequest"]["properties"][parameter.name], _BOUNDS[parameter.name])


def _neutral(neutral: Mapping[str, Sequence[Any]]) -> Json:
    """Fields of which only values that change nothing are taken."""
    return {name: {"enum": list(allowed), "default": None, "description": NEUTRAL} for name, allowed in neutral.items()}


def _describe(components: Json) -> None:
    """The fields of model calls, where their structs have no descriptions."""
    for struct in _CALLS:
        for name, field in components[struct.__name__]["properties"].items():
            if "description" not in field and name in FIELDS:
                field["description"] = FIELDS[name]


def _bound(field: Json, bounds: Json) -> None:
    next(kind for kind in field["anyOf"] if kind["type"] in ("integer", "number")).update(bounds)


_BOUNDS: dict[str, Json] = {
    "max_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": CHOICES_MAX},
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    **{p.name: {"exclusiveMinimum" if p.low_excluded else "minimum": p.low, "maximum": p.high} for p in PARAMETERS},
}
_CALLS = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, GenerateRequest, GenerateSampling),
    *(MessagesRequest, CountTokensRequest),
)
_NEUTRAL: dict[type[msgspec.Struct], dict[str, tuple[Any, ...]]] = {
    ChatRequest: NEUTRAL_CHAT,
    CompletionRequest: NEUTRAL_COMPLETION,
    ResponsesRequest: NEUTRAL_RESPONSES,
}
_BOUNDS_OF: dict[type[msgspec.Struct], dict[str, Json]] = {
    ChatRequest: {
        "max_completion_tokens": {"minimum": 1},
        "top_logprobs": {"minimum": 0, "maximum": LOGPROBS_MAX},
    },
    CompletionRequest: {"logprobs": {"minimum": 0, "maximum": LOGPROBS_MAX}},
    ResponsesRequest: {
        "max_output_tokens": {"minimum": 1},
        "top_logprobs": {"minimum": 0, "maximum": LOGPROBS_MAX},
    },
}
"""Bounds of numbers that the request side checks itself, so that its error names the field and the range."""
_TEXT: Json = {"type": "string"}
_IN_HEADERS: Sequence[Json] = [
    {"name": name, "in": "header", "description": text, "schema": {**_TEXT, "minLength": 1, "maxLength": 256}}
    for name, text in {
        SESSION_HEADERS[0]: "The session, where neither the URL nor the API key names one. "
        f"So do, in this order: {', '.join(SESSION_HEADERS[1:])}.",
        KEY_HEADER: "A request with the same key is the same request: it gets the same answer.",
    }.items()
]
_ANSWER_HEADERS = {
    "X-Session-ID": "The session, also of a call that is a session of its own.",
    "X-Request-Id": "The response's id.",
    "X-Laminar-Session-From": "What named the session: url, api_key, header, body or none.",
    "X-Laminar-History": "How the prompt came from the session's record: first, extended, closed or branch.",
    "X-Laminar-History-Reason": "Why it is a branch.",
    "X-Laminar-Joined": "true: this answers a request that was sent before.",
    "X-Laminar-Without-Effect": "Fields that were accepted and have no effect, and max_tokens=N where the context has "
    "room for no more than N tokens.",
    VERSION_HEADER: "The weight version, or versions, that sampled the answer; of a stream, its first tokens. "
    "Missing where a whole answer was kept alive: its headers were sent before it.",
    ENGINE_HEADER: "Of text that an engine answered itself: the engine.",
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_ANTHROPIC_ERROR: Json = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": _TEXT,
    },
}


_SECURITY_SCHEMES: Json = {
    "api_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key of the gateway's key file (`--api-keys`), of one of the roles in `x-laminar-roles`.",
    },
    "api_key_header": {
        "type": "apiKey",
        "in": "header",
        "name": API_KEY_HEADER,
        "description": "The same, where Anthropic's clients send theirs.",
    },
    "session_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "The `api_key` of a session: makes its calls, and reads it.",
    },
    "finish_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "The `finish_key` of a session: finishes, rewards or abandons it, and reads it.",
    },
}
_REFUSALS = {
    "401": ("No API key, or none that is known.", {"WWW-Authenticate": {"schema": _TEXT}}),
    "403": ("The API key does not allow it; the message names the role that does.", {}),
}


def _security(operation: Operation) -> Json:
    """Which keys the operation takes. The empty one: a gateway without access control asks for none."""
    if operation.public:
        return {"security": []}
    schemes = ["api_key", "api_key_header"]
    schemes += ["session_key"] if operation.session_key else []
    schemes += ["finish_key"] if operation.finish_key else []
    roles = [role for role in KEY_ROLES if role in operation.roles | operation.own]
    return {"security": [{}, *({scheme: []} for scheme in schemes)], "x-laminar-roles": roles}


def _refused(route: Route) -> Json:
    if route.operation.public:
        return {}
    return {
        status: {"description": text, "content": _content(route.error), **({"headers": headers} if headers else {})}
        for status, (text, headers) in _REFUSALS.items()
    }


def _operation(route: Route) -> Json:
    response: Json = {"description": "The response."}
    if route.answers or route.also:
        names = [answer.__name__ for answer in route.answers]
        response["content"] = (_content(*names) if names else {}) | {kind: {} for kind in route.also}
    elif route.status >= 400:
        response = {"description": "It is refused.", "content": _content(route.error)}
    if route.turn:
        response["headers"] = {name: {"description": text, "schema": _TEXT} for name, text in _ANSWER_HEADERS.items()}
    statuses = [route.status, route.also_status] if route.also_status is not None else [route.status]
    out: Json = {
        "summary": route.summary,
        "operationId": f"{route.method} {route.path}",
        **_security(route.operation),
        "parameters": [*_in_path(route.path), *_in_query(route.query or {}), *(_IN_HEADERS if route.turn else ())],
        "responses": {
            **{str(status): response for status in statuses},
            **_refused(route),
            "default": {"description": "An error.", "content": _content(route.error)},
        },
    }
    if route.body is not None:
        out["requestBody"] = {"required": not route.optional_body, "content": _content(route.body.__name__)}
    return out


def _content(*names: str) -> Json:
    refs = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    return {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}


def _in_path(path: str) -> list[Json]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _in_query(query: Mapping[str, Json]) -> list[Json]:
    return [{"name": name, "in": "query", **described} for name, described in query.items()]
