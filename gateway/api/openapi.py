"""`GET /openapi.json`: every route, with the structs that decode its requests and encode its responses as schemas.

Every route may also respond with 4xx or 5xx and the error body of `gateway.api.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.admin import (
    DIGITS_MAX,
    AddEngineRequest,
    EngineAdded,
    EngineRemoved,
    Events,
    LiveSessions,
    Plans,
    Receipts,
)
from gateway.api.anthropic.bodies import NEUTRAL as NEUTRAL_MESSAGES
from gateway.api.anthropic.bodies import NEUTRAL_TOOL, CountTokensRequest, MessagesRequest
from gateway.api.anthropic.conversation import NEEDED as BLOCK_TYPES
from gateway.api.anthropic.conversation import ROLES as MESSAGE_ROLES
from gateway.api.anthropic.schema import MessageAnswer, TokenCount
from gateway.api.calls.answer import VERSION_HEADER
from gateway.api.calls.identity import KEY_HEADER, SESSION_HEADERS
from gateway.api.experience import MSGPACK, AckAnswer, AckRequest, ReleaseAnswer, SampleAnswer, SampleRequest
from gateway.api.generate import PATH as GENERATE
from gateway.api.generate import Generated, GenerateRequest
from gateway.api.groups import CreateGroupRequest, GroupAnswer
from gateway.api.openai.bodies import NEUTRAL_CHAT, NEUTRAL_COMPLETION, ChatRequest, CompletionRequest
from gateway.api.openai.requests import CHOICES_MAX, LOGPROBS_MAX, ROLES
from gateway.api.openai.routes import PREFIXES
from gateway.api.openai.schema import ChatCompletion, Completion, Model, Models
from gateway.api.openai.text_proxy import ENGINE_HEADER
from gateway.api.responses.bodies import NEUTRAL as NEUTRAL_RESPONSES
from gateway.api.responses.bodies import ResponsesRequest
from gateway.api.responses.schema import ResponseObject
from gateway.api.sessions import (
    Abandoned,
    AbandonRequest,
    CreateRequest,
    RewardRequest,
    SessionAnswer,
    SessionEnded,
    SessionMade,
    SessionPhase,
)
from gateway.api.tasks import (
    AddTasksRequest,
    FailTaskRequest,
    FinishTaskRequest,
    LeaseTasksRequest,
    PoolAnswer,
    PrioritizeTasksRequest,
    ReleaseTasksRequest,
    RemoveTasksRequest,
    RenewTasksRequest,
    TaskEnded,
    TaskResults,
    TasksAdded,
    TasksLeased,
    TasksPrioritized,
    TasksReleased,
    TasksRemoved,
    TasksRenewed,
)
from gateway.core.endings import Finish, Finished
from gateway.core.parameters import PARAMETERS
from gateway.operate.report import Health, StatusReport

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """`query`: name to schema. `optional_body`: the body may be left out. `answers`: the response is one of them, as
    JSON. `also`: other content types of a response; `also_status`: another status.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    query: Mapping[str, Json] | None = None
    status: int = 200
    answers: Sequence[type[msgspec.Struct]] = ()
    also: Sequence[str] = ()
    also_status: int | None = None
    optional_body: bool = False
    error: str = "Error"  # the schema of its errors
    turn: bool = False  # a model call: it may name its session and be a retry, and its response's headers have both


_RELAYED = "With --relay-text, a call without a session goes to an engine, which checks its fields and answers."
_NUMBER: Json = {"schema": {"type": "integer", "minimum": 0, "maximum": 10**DIGITS_MAX - 1}}
_NAMED: Json = {"schema": {"type": "string", "minLength": 1}, "required": True}
_CHAT = f"A chat completion; a session's next turn. {_RELAYED}"
_COMPLETION = f"A completion of a text or of token ids. {_RELAYED}"
_EVENTS = ("text/event-stream",)
_ENDED = (Finished, SessionAnswer)  # the latter waits for its reward


def _calls(prefix: str) -> Sequence[Route]:
    return [
        Route(
            "post",
            f"{prefix}/v1/chat/completions",
            _CHAT,
            ChatRequest,
            answers=[ChatCompletion],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "post",
            f"{prefix}/v1/completions",
            _COMPLETION,
            CompletionRequest,
            answers=[Completion],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "post",
            prefix + GENERATE,
            "Token ids in and out, as vLLM has it.",
            GenerateRequest,
            answers=[Generated],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "post",
            f"{prefix}/v1/responses",
            "A response in OpenAI's newer API; a session's next turn.",
            ResponsesRequest,
            answers=[ResponseObject],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "post",
            f"{prefix}/v1/messages",
            "Anthropic's Messages API; a session's next turn.",
            MessagesRequest,
            answers=[MessageAnswer],
            also=_EVENTS,
            turn=True,
            error="AnthropicError",
        ),
        Route(
            "post",
            f"{prefix}/v1/messages/count_tokens",
            "The length of a message's prompt.",
            CountTokensRequest,
            answers=[TokenCount],
            error="AnthropicError",
        ),
        Route("get", f"{prefix}/v1/models", "The models served.", answers=[Models]),
        Route("get", f"{prefix}/v1/models/{{model}}", "One model.", answers=[Model]),
    ]


_SESSIONS = [
    Route("post", "/sessions", "Makes one and its key.", CreateRequest, answers=[SessionMade], optional_body=True),
    Route("get", "/sessions/{sid}", "A session as it stands, or how it ended.", answers=[SessionAnswer, SessionEnded]),
    Route("post", "/sessions/{sid}/finish", "Ends a session with a reward.", Finish, answers=_ENDED),
    Route("post", "/finish_session", "The same, as routers have it.", Finish, {"session_id": _NAMED}, answers=_ENDED),
    Route("post", "/sessions/{sid}/reward", "A reward of a turn or a leaf.", RewardRequest, answers=[SessionPhase]),
    Route(
        "post",
        "/sessions/{sid}/abandon",
        "Ends a session without one.",
        AbandonRequest,
        answers=[Abandoned],
        optional_body=True,
    ),
    Route("post", "/groups", "Makes a group of sessions, admitted whole.", CreateGroupRequest, answers=[GroupAnswer]),
    Route("get", "/groups/{gid}", "A group as it stands.", answers=[GroupAnswer]),
    Route(
        "post",
        "/groups/{gid}/abandon",
        "Ends a group's sessions.",
        AbandonRequest,
        answers=[GroupAnswer],
        optional_body=True,
    ),
]
_TRAINER = [
    Route(
        "post",
        "/experience/sample",
        "Leases finished trajectories.",
        SampleRequest,
        answers=[SampleAnswer],
        also=(MSGPACK,),
    ),
    Route("post", "/experience/ack", "Uses them up.", AckRequest, answers=[AckAnswer]),
    Route("post", "/experience/release", "Gives them back unused.", AckRequest, answers=[ReleaseAnswer]),
]
_POOL: Json = {"schema": {"type": "string", "minLength": 1, "maxLength": 200}}
_TASKS = [
    Route("post", "/tasks", "Adds tasks to a prompt pool.", AddTasksRequest, answers=[TasksAdded]),
    Route("get", "/tasks", "A prompt pool as it stands.", query={"pool": _POOL}, answers=[PoolAnswer]),
    Route("post", "/tasks/lease", "Leases samples of tasks to a runner.", LeaseTasksRequest, answers=[TasksLeased]),
    Route("post", "/tasks/renew", "Prolongs leases.", RenewTasksRequest, answers=[TasksRenewed]),
    Route("post", "/tasks/finish", "Ends a lease with a reward.", FinishTaskRequest, answers=[TaskEnded]),
    Route("post", "/tasks/fail", "Ends a lease without one.", FailTaskRequest, answers=[TaskEnded]),
    Route("post", "/tasks/release", "Gives samples back.", ReleaseTasksRequest, answers=[TasksReleased]),
    Route(
        "get",
        "/tasks/results",
        "The last rewards of tasks.",
        query={"pool": _POOL, "after": _NUMBER, "limit": _NUMBER},
        answers=[TaskResults],
    ),
    Route("post", "/tasks/priorities", "Sets priorities.", PrioritizeTasksRequest, answers=[TasksPrioritized]),
    Route("post", "/tasks/remove", "Removes tasks.", RemoveTasksRequest, answers=[TasksRemoved]),
]
_OPERATOR = [
    Route("get", "/status", "The gateway, its engines and its counters.", answers=[StatusReport]),
    Route(
        "get",
        "/healthz",
        "200 while an engine serves and the store can be written, else 503 with the reasons.",
        answers=[Health],
        also_status=503,
    ),
    Route("get", "/health", "The same, as engines have it.", answers=[Health], also_status=503),
    Route("get", "/metrics", "For Prometheus.", also=("text/plain",)),
    Route(
        "get",
        "/admin/timeline",
        "The events of the fleet.",
        query={"after": _NUMBER, "limit": _NUMBER},
        answers=[Events],
    ),
    Route("post", "/admin/engines", "Takes an engine in.", AddEngineRequest, status=201, answers=[EngineAdded]),
    Route("delete", "/admin/engines/{name}", "Takes an engine out.", answers=[EngineRemoved]),
    Route("get", "/admin/sessions", "The live sessions.", query={"limit": _NUMBER}, answers=[LiveSessions]),
    Route("get", "/admin/repack", "What the planner would do now.", answers=[Plans]),
    Route("post", "/admin/repack", "Does it now.", answers=[Plans]),
    Route("get", "/admin/receipts", "What moves cost and gained.", query={"limit": _NUMBER}, answers=[Receipts]),
    Route("get", "/openapi.json", "This.", also=("application/json",)),
]
ROUTES: Sequence[Route] = [
    *(route for prefix in PREFIXES for route in _calls(prefix)),
    *_SESSIONS,
    *_TRAINER,
    *_TASKS,
    *_OPERATOR,
]


def add_openapi_route(app: web.Application) -> None:
    document = msgspec.json.encode(schema())

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=document, content_type="application/json")

    app.router.add_get("/openapi.json", openapi)


def schema() -> Json:
    structs = list(dict.fromkeys(s for route in ROUTES for s in (route.body, *route.answers) if s is not None))
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    components |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components["ChatMessage"]["properties"]["role"] = {"enum": list(ROLES)}
    components["Tool"]["properties"]["type"] = {"enum": ["function"]}
    for struct, neutral in _NEUTRAL.items():
        fields = components[struct.__name__]["properties"]
        fields |= {name: {"enum": list(allowed), "default": None} for name, allowed in neutral.items()}
        for name, bounds in (_BOUNDS | _BOUNDS_OF[struct]).items():
            if name in fields:
                _bound(fields[name], bounds)
    _constrain_messages(components)
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Laminar rollout gateway", "version": version("laminar-rl")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"session_key": {"type": "http", "scheme": "bearer"}}},
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
        fields = components[name]["properties"]
        fields |= {field: {"enum": list(allowed), "default": None} for field, allowed in neutral.items()}
    for parameter in PARAMETERS:
        _bound(components["MessagesRequest"]["properties"][parameter.name], _BOUNDS[parameter.name])


def _bound(field: Json, bounds: Json) -> None:
    next(kind for kind in field["anyOf"] if kind["type"] in ("integer", "number")).update(bounds)


_BOUNDS: dict[str, Json] = {
    "max_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": CHOICES_MAX},
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    **{p.name: {"exclusiveMinimum" if p.low_excluded else "minimum": p.low, "maximum": p.high} for p in PARAMETERS},
}
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


def _operation(route: Route) -> Json:
    response: Json = {"description": "The response."}
    if route.answers or route.also:
        names = [answer.__name__ for answer in route.answers]
        response["content"] = (_content(*names) if names else {}) | {kind: {} for kind in route.also}
    if route.turn:
        response["headers"] = {name: {"description": text, "schema": _TEXT} for name, text in _ANSWER_HEADERS.items()}
    statuses = [route.status, route.also_status] if route.also_status is not None else [route.status]
    out: Json = {
        "summary": route.summary,
        "operationId": f"{route.method} {route.path}",
        "parameters": [*_in_path(route.path), *_in_query(route.query or {}), *(_IN_HEADERS if route.turn else ())],
        "responses": {
            **{str(status): response for status in statuses},
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
