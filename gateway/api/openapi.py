"""`GET /openapi.json`: every route, with the very structs that decode its bodies as schemas.

Answers of the OpenAI routes are OpenAI's; theirs are not repeated here. Every route may also answer 401 to 5xx with the
error body that `openai_errors` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.admin import DIGITS_MAX, AddEngineRequest
from gateway.api.experience import AckRequest, SampleAnswer, SampleRequest
from gateway.api.groups import CreateGroupRequest
from gateway.api.openai_requests import CHOICES_MAX, LOGPROBS_MAX, ROLES
from gateway.api.openai_routes import PREFIXES
from gateway.api.openai_types import NEUTRAL_CHAT, NEUTRAL_COMPLETION, ChatRequest, CompletionRequest
from gateway.api.sessions import AbandonRequest, CreateRequest, RewardRequest
from gateway.core.endings import Finish, Finished

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """`query`: name to schema. `optional_body`: the body may be left out."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    query: Mapping[str, Json] | None = None
    status: int = 200
    answer: type[msgspec.Struct] | None = None
    optional_body: bool = False


_RELAYED = "With --relay-text, a call without a session goes to an engine as it is, which checks its fields."
_NUMBER: Json = {"schema": {"type": "integer", "minimum": 0, "maximum": 10**DIGITS_MAX - 1}}
_NAMED: Json = {"schema": {"type": "string", "minLength": 1}, "required": True}
_OPENAI = [
    Route("post", "/v1/chat/completions", f"A chat completion; a session's next turn. {_RELAYED}", ChatRequest),
    Route("post", "/v1/completions", f"A completion of a text or of token ids. {_RELAYED}", CompletionRequest),
    Route("get", "/v1/models", "The models served."),
    Route("get", "/v1/models/{model}", "One model."),
]
ROUTES: Sequence[Route] = [
    *(Route(r.method, prefix + r.path, r.summary, r.body) for prefix in PREFIXES for r in _OPENAI),
    Route("post", "/sessions", "Makes a session and its API key.", CreateRequest, optional_body=True),
    Route("get", "/sessions/{sid}", "A session as it stands."),
    Route("post", "/sessions/{sid}/finish", "Ends a session with a reward.", Finish, answer=Finished),
    Route("post", "/finish_session", "The same, as routers have it.", Finish, {"session_id": _NAMED}),
    Route("post", "/sessions/{sid}/reward", "A reward of a turn or a leaf.", RewardRequest),
    Route("post", "/sessions/{sid}/abandon", "Ends a session without one.", AbandonRequest, optional_body=True),
    Route("post", "/groups", "Makes a group of sessions, admitted whole.", CreateGroupRequest),
    Route("get", "/groups/{gid}", "A group as it stands."),
    Route("post", "/groups/{gid}/abandon", "Ends a group's sessions.", AbandonRequest, optional_body=True),
    Route("post", "/experience/sample", "Leases finished trajectories.", SampleRequest, answer=SampleAnswer),
    Route("post", "/experience/ack", "Uses them up.", AckRequest),
    Route("get", "/status", "The gateway, its engines and its counters."),
    Route("get", "/healthz", "200 while an engine serves, else 503."),
    Route("get", "/metrics", "For Prometheus."),
    Route("get", "/admin/timeline", "What happened.", query={"after": _NUMBER, "limit": _NUMBER}),
    Route("post", "/admin/engines", "Takes an engine in.", AddEngineRequest, status=201),
    Route("delete", "/admin/engines/{name}", "Takes an engine out."),
    Route("get", "/admin/repack", "What the planner would do now."),
    Route("post", "/admin/repack", "Does it now."),
    Route("get", "/admin/receipts", "What moves cost and gained.", query={"limit": _NUMBER}),
    Route("get", "/openapi.json", "This."),
]


def add_openapi_route(app: web.Application) -> None:
    document = msgspec.json.encode(schema())

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=document, content_type="application/json")

    app.router.add_get("/openapi.json", openapi)


def schema() -> Json:
    structs = list(dict.fromkeys(s for route in ROUTES for s in (route.body, route.answer) if s is not None))
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    components["Error"] = _ERROR
    components["ChatMessage"]["properties"]["role"] = {"enum": list(ROLES)}
    components["Tool"]["properties"]["type"] = {"enum": ["function"]}
    for struct, neutral in ((ChatRequest, NEUTRAL_CHAT), (CompletionRequest, NEUTRAL_COMPLETION)):
        fields = components[struct.__name__]["properties"]
        fields |= {name: {"enum": list(allowed), "default": None} for name, allowed in neutral.items()}
        for name, bounds in (_BOUNDS | _BOUNDS_OF[struct]).items():
            of_number = next(kind for kind in fields[name]["anyOf"] if kind["type"] in ("integer", "number"))
            of_number |= bounds
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Laminar rollout gateway", "version": version("laminar-rl")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"session_key": {"type": "http", "scheme": "bearer"}}},
    }


_BOUNDS: dict[str, Json] = {
    "max_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": CHOICES_MAX},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 1 << 30},
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
}
_BOUNDS_OF: dict[type[msgspec.Struct], dict[str, Json]] = {
    ChatRequest: {
        "max_completion_tokens": {"minimum": 1},
        "top_logprobs": {"minimum": 0, "maximum": LOGPROBS_MAX},
    },
    CompletionRequest: {"logprobs": {"minimum": 0, "maximum": LOGPROBS_MAX}},
}
"""Of numbers that the request side checks itself, to name the field and what would be right."""
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


def _operation(route: Route) -> Json:
    said: Json = {"description": "The answer."}
    if route.answer is not None:
        said["content"] = _content(route.answer.__name__)
    out: Json = {
        "summary": route.summary,
        "operationId": f"{route.method} {route.path}",
        "parameters": [*_in_path(route.path), *_in_query(route.query or {})],
        "responses": {
            str(route.status): said,
            "default": {"description": "An error.", "content": _content("Error")},
        },
    }
    if route.body is not None:
        out["requestBody"] = {"required": not route.optional_body, "content": _content(route.body.__name__)}
    return out


def _content(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _in_path(path: str) -> list[Json]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _in_query(query: Mapping[str, Json]) -> list[Json]:
    return [{"name": name, "in": "query", **said} for name, said in query.items()]
