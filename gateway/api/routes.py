"""The table of routes: each with the structs that decode its requests and encode its responses.

The served schema is made of it; a test compares it with the routes that the gateway has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.api.admin import (
    DIGITS_MAX,
    LISTED_MAX,
    AbandonIdleRequest,
    AddEngineRequest,
    EngineAdded,
    EngineRemoved,
    Events,
    IdleAbandoned,
    LiveSessions,
    Plans,
    Receipts,
)
from gateway.api.anthropic.bodies import CountTokensRequest, MessagesRequest
from gateway.api.anthropic.schema import MessageAnswer, TokenCount
from gateway.api.experience import (
    LEASE_NAME,
    MSGPACK,
    TRAJECTORIES_MAX,
    AckAnswer,
    AckRequest,
    EvictAnswer,
    EvictRequest,
    ExperienceStatistics,
    PeekRequest,
    ReclaimRequest,
    ReleaseAnswer,
    RowsAnswer,
    SampleAnswer,
    SampleRequest,
)
from gateway.api.generate import PATH as GENERATE
from gateway.api.generate import Generated, GenerateRequest
from gateway.api.groups import CreateGroupRequest, GroupAnswer
from gateway.api.openai.bodies import ChatRequest, CompletionRequest
from gateway.api.openai.routes import PREFIXES
from gateway.api.openai.schema import ChatCompletion, Completion, Model, Models
from gateway.api.records import RecordedSession
from gateway.api.responses.bodies import ResponsesRequest
from gateway.api.responses.record import LIMIT_MAX
from gateway.api.responses.schema import InputItems, ResponseObject
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
    DEFAULT_POOL,
    RESULTS_MAX,
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
from gateway.core.access import (
    CALL,
    END,
    EXPERIENCE,
    EXPERIENCE_READ,
    GROUP,
    LEASE,
    LOOK,
    MODELS,
    OPEN,
    OPERATE,
    READ,
    STATUS,
    TASKS,
    TASKS_READ,
    Operation,
)
from gateway.core.endings import Finish, Finished
from gateway.operate.report import Health, StatusReport
from gateway.store.timeline import READ_MAX
from protos.packed import MEDIA_TYPE

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """`operation`: who may use it. `query`: name to schema. `optional_body`: the body may be left out. `answers`: the
    response is one of them, as JSON. `also`: other content types of a response; `also_status`: another status.
    """

    method: str
    path: str
    operation: Operation
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


def _number(text: str) -> Json:
    return {"description": text, "schema": {"type": "integer", "minimum": 0, "maximum": 10**DIGITS_MAX - 1}}


def _limit(what: str, default: int, most: int | None = None) -> Json:
    text = f"How many {what} at most. Default: {default:,}"
    if most is not None:
        text += ", which is the most" if most == default else f"; the most is {most:,}"
    return _number(f"{text}.")


_NAMED: Json = {
    "description": "The session.",
    "schema": {"type": "string", "minLength": 1},
    "required": True,
}
_POOL: Json = {
    "description": f"The prompt pool. Default: {DEFAULT_POOL}.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200},
}
_TOKENS: Json = {
    "description": "Whether the response has the text of each token. Default: false.",
    "schema": {"type": "boolean"},
}
_AFTER_ROW = _number("Rows with a higher number; `next_after` of the response before. Default: 0, from the first.")
_AFTER_EVENT = _number("Events with a higher `seq`; `next` of the response before. Default: 0, from the oldest kept.")
_AFTER_RESULT = _number("Results after this one; `next` of the response before. Default: 0, from the oldest kept.")
_IDLE = _number("Only sessions without a running turn for so many seconds. Default: all.")
_LEASED = _number("1: also trajectories that readers have under a lease. Default: 0.")
_LEASE_NAME = {
    "description": "What to name the lease, so that it can be given back without this response. Default: a new name.",
    "schema": {"type": "string", "pattern": f"^{LEASE_NAME.pattern}$"},
}
_CHAT = f"A chat completion: the next turn of a session. {_RELAYED}"
_COMPLETION = f"A completion of a text or of token ids. {_RELAYED}"
_EVENTS = ("text/event-stream",)
_ENDED = (Finished, SessionAnswer)  # the latter waits for its reward


def _calls(prefix: str) -> Sequence[Route]:
    return [
        Route(
            "post",
            f"{prefix}/v1/chat/completions",
            CALL,
            _CHAT,
            ChatRequest,
            answers=[ChatCompletion],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "post",
            f"{prefix}/v1/completions",
            CALL,
            _COMPLETION,
            CompletionRequest,
            answers=[Completion],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "post",
            prefix + GENERATE,
            CALL,
            "Token ids in and out, as vLLM has it.",
            GenerateRequest,
            answers=[Generated],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "post",
            f"{prefix}/v1/responses",
            CALL,
            "A response in OpenAI's newer API: the next turn of a session.",
            ResponsesRequest,
            answers=[ResponseObject],
            also=_EVENTS,
            turn=True,
        ),
        Route(
            "get",
            f"{prefix}/v1/responses/{{response_id}}",
            READ,
            "A response of a live session, as recorded.",
            answers=[ResponseObject],
        ),
        Route(
            "get",
            f"{prefix}/v1/responses/{{response_id}}/input_items",
            READ,
            "What a response was answered to: its conversation, as items.",
            query={
                "order": {
                    "schema": {"type": "string", "enum": ["asc", "desc"]},
                    "description": "Default: desc, the newest first.",
                },
                "limit": {
                    "schema": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
                    "description": "Items at most. Default: 20.",
                },
                "after": {"schema": {"type": "string"}, "description": "The items behind the one of this id."},
            },
            answers=[InputItems],
        ),
        Route(
            "delete",
            f"{prefix}/v1/responses/{{response_id}}",
            READ,
            "Refused: a response is part of its session's record.",
            status=400,
        ),
        Route(
            "post",
            f"{prefix}/v1/responses/{{response_id}}/cancel",
            READ,
            "Refused: a client that leaves cancels its call.",
            status=400,
        ),
        Route(
            "post",
            f"{prefix}/v1/messages",
            CALL,
            "A message in Anthropic's API: the next turn of a session.",
            MessagesRequest,
            answers=[MessageAnswer],
            also=_EVENTS,
            turn=True,
            error="AnthropicError",
        ),
        Route(
            "post",
            f"{prefix}/v1/messages/count_tokens",
            CALL,
            "The number of tokens of a message's prompt.",
            CountTokensRequest,
            answers=[TokenCount],
            error="AnthropicError",
        ),
        Route("get", f"{prefix}/v1/models", MODELS, "The models served.", answers=[Models]),
        Route("get", f"{prefix}/v1/models/{{model}}", MODELS, "One model.", answers=[Model]),
    ]


_SESSIONS = [
    Route(
        "post",
        "/sessions",
        OPEN,
        "Makes a session, and the keys that belong to it.",
        CreateRequest,
        answers=[SessionMade],
        optional_body=True,
    ),
    Route(
        "get",
        "/sessions/{sid}",
        READ,
        "A session as it stands, or how it ended.",
        answers=[SessionAnswer, SessionEnded],
    ),
    Route(
        "get",
        "/sessions/{sid}/trajectories",
        READ,
        "What is recorded of a session, until a trainer has used it.",
        query={"tokens": _TOKENS},
        answers=[RecordedSession],
    ),
    Route(
        "post",
        "/sessions/{sid}/finish",
        END,
        "Ends a session with a reward; without one, the session waits for it.",
        Finish,
        answers=_ENDED,
    ),
    Route(
        "post",
        "/finish_session",
        END,
        "The same as `POST /sessions/{sid}/finish`, under the path that other rollout routers have.",
        Finish,
        {"session_id": _NAMED},
        answers=_ENDED,
    ),
    Route(
        "post",
        "/sessions/{sid}/reward",
        END,
        "Rewards a session, or its turns or leaves, also after its finish.",
        RewardRequest,
        answers=[SessionPhase],
    ),
    Route(
        "post",
        "/sessions/{sid}/abandon",
        END,
        "Ends a session without a reward: no trainer gets it.",
        AbandonRequest,
        answers=[Abandoned],
        optional_body=True,
    ),
    Route(
        "post", "/groups", OPEN, "Makes a group of sessions, admitted whole.", CreateGroupRequest, answers=[GroupAnswer]
    ),
    Route("get", "/groups/{gid}", GROUP, "A group as it stands.", answers=[GroupAnswer]),
    Route(
        "post",
        "/groups/{gid}/abandon",
        GROUP,
        "Ends a group: its live sessions are abandoned.",
        AbandonRequest,
        answers=[GroupAnswer],
        optional_body=True,
    ),
]
_TRAINER = [
    Route(
        "post",
        "/experience/sample",
        EXPERIENCE,
        "Leases finished trajectories to a reader.",
        SampleRequest,
        query={"lease_id": _LEASE_NAME},
        answers=[SampleAnswer],
        also=(MSGPACK, MEDIA_TYPE),
    ),
    Route(
        "post",
        "/experience/peek",
        EXPERIENCE_READ,
        "What a sample would get now, under no lease, and without a say in the admission of new sessions.",
        PeekRequest,
        answers=[SampleAnswer],
        also=(MSGPACK, MEDIA_TYPE),
    ),
    Route(
        "post", "/experience/ack", EXPERIENCE, "Uses the trajectories of a lease up.", AckRequest, answers=[AckAnswer]
    ),
    Route(
        "post",
        "/experience/release",
        EXPERIENCE,
        "Gives the trajectories of a lease back unused.",
        AckRequest,
        answers=[ReleaseAnswer],
    ),
    Route(
        "post",
        "/experience/reclaim",
        EXPERIENCE,
        "Gives back what an earlier life of a reader had leased.",
        ReclaimRequest,
        answers=[ReleaseAnswer],
    ),
    Route(
        "post",
        "/experience/evict",
        EXPERIENCE,
        "Removes finished sessions for good: no trainer gets them.",
        EvictRequest,
        answers=[EvictAnswer],
    ),
    Route(
        "get",
        "/experience/rows",
        EXPERIENCE_READ,
        "What waits for a trainer, without its tokens.",
        query={
            "after": _AFTER_ROW,
            "limit": _limit("rows", TRAJECTORIES_MAX, TRAJECTORIES_MAX),
            "leased": _LEASED,
        },
        answers=[RowsAnswer],
    ),
    Route(
        "get",
        "/experience/rows/{number}",
        EXPERIENCE_READ,
        "A session that waits for a trainer, with all its trajectories, under no lease.",
        answers=[SampleAnswer],
        also=(MSGPACK, MEDIA_TYPE),
    ),
    Route(
        "get",
        "/experience/statistics",
        EXPERIENCE_READ,
        "Staleness, lengths, rewards and waiting times of trajectories, and the buffer's counts.",
        answers=[ExperienceStatistics],
    ),
]
_TASKS = [
    Route("post", "/tasks", TASKS, "Adds tasks to a prompt pool.", AddTasksRequest, answers=[TasksAdded]),
    Route("get", "/tasks", TASKS_READ, "A prompt pool as it stands.", query={"pool": _POOL}, answers=[PoolAnswer]),
    Route(
        "post", "/tasks/lease", LEASE, "Leases samples of tasks to a runner.", LeaseTasksRequest, answers=[TasksLeased]
    ),
    Route("post", "/tasks/renew", LEASE, "Prolongs leases of samples.", RenewTasksRequest, answers=[TasksRenewed]),
    Route(
        "post",
        "/tasks/finish",
        LEASE,
        "Ends the lease of a sample with a reward.",
        FinishTaskRequest,
        answers=[TaskEnded],
    ),
    Route(
        "post",
        "/tasks/fail",
        LEASE,
        "Ends the lease of a sample that failed; it is leased again until its attempts are used up.",
        FailTaskRequest,
        answers=[TaskEnded],
    ),
    Route(
        "post",
        "/tasks/release",
        LEASE,
        "Gives samples back that were not begun.",
        ReleaseTasksRequest,
        answers=[TasksReleased],
    ),
    Route(
        "get",
        "/tasks/results",
        TASKS_READ,
        "The rewards of the rounds that ended last.",
        query={"pool": _POOL, "after": _AFTER_RESULT, "limit": _limit("results", 1000, RESULTS_MAX)},
        answers=[TaskResults],
    ),
    Route(
        "post",
        "/tasks/priorities",
        TASKS,
        "Sets priorities of tasks.",
        PrioritizeTasksRequest,
        answers=[TasksPrioritized],
    ),
    Route(
        "post", "/tasks/remove", TASKS, "Removes tasks from a prompt pool.", RemoveTasksRequest, answers=[TasksRemoved]
    ),
]
_OPERATOR = [
    Route("get", "/status", STATUS, "The gateway, its engines and its counters.", answers=[StatusReport]),
    Route(
        "get",
        "/healthz",
        LOOK,
        "200 while an engine serves and the store can be written, else 503 with the reasons.",
        answers=[Health],
        also_status=503,
    ),
    Route(
        "get",
        "/health",
        LOOK,
        "The same as `GET /healthz`, under the path that engines have.",
        answers=[Health],
        also_status=503,
    ),
    Route("get", "/metrics", STATUS, "The metrics, in the text format of Prometheus.", also=("text/plain",)),
    Route(
        "get",
        "/admin/timeline",
        STATUS,
        "The events of the fleet: engines, turns, refreshes, repacks.",
        query={"after": _AFTER_EVENT, "limit": _limit("events", 1000, READ_MAX)},
        answers=[Events],
    ),
    Route(
        "post",
        "/admin/engines",
        OPERATE,
        "Adds an engine to the fleet.",
        AddEngineRequest,
        status=201,
        answers=[EngineAdded],
    ),
    Route(
        "delete",
        "/admin/engines/{name}",
        OPERATE,
        "Removes an engine; its turns continue on other engines.",
        answers=[EngineRemoved],
    ),
    Route(
        "get",
        "/admin/sessions",
        STATUS,
        "The live sessions, the oldest first.",
        query={"limit": _limit("sessions", 1000, LISTED_MAX), "idle_s": _IDLE},
        answers=[LiveSessions],
    ),
    Route(
        "post",
        "/admin/sessions/abandon",
        OPERATE,
        "Ends sessions that nobody uses: no turn, no runner's lease, no child, no reward to come.",
        AbandonIdleRequest,
        answers=[IdleAbandoned],
        optional_body=True,
    ),
    Route(
        "get",
        "/admin/repack",
        STATUS,
        "The moves that the planner would make now; nothing moves.",
        answers=[Plans],
    ),
    Route("post", "/admin/repack", OPERATE, "Plans moves now, in any mode, and begins them.", answers=[Plans]),
    Route(
        "get",
        "/admin/receipts",
        STATUS,
        "What moves cost and gained, as estimated and as measured, the newest first.",
        query={"limit": _limit("receipts", 100)},
        answers=[Receipts],
    ),
    Route("get", "/ui", LOOK, "The dashboard: a page without data, which fills itself.", also=("text/html",)),
    Route("get", "/ui/{file}", LOOK, "A file of the dashboard.", also=("text/html", "text/css", "text/javascript")),
    Route(
        "get",
        "/ui/feed",
        STATUS,
        "What the dashboard shows, as server-sent events: a snapshot, then what changes.",
        query={"frames": _number("Events after which the response ends. Default: 0, it never does.")},
        also=_EVENTS,
    ),
    Route("get", "/openapi.json", LOOK, "The schema of all routes, in OpenAPI 3.1.", also=("application/json",)),
]
GROUPS: Mapping[str, Sequence[Route]] = {
    "Model calls": [route for prefix in PREFIXES for route in _calls(prefix)],
    "Sessions and groups": _SESSIONS,
    "Experience": _TRAINER,
    "Prompt pool": _TASKS,
    "Operation": _OPERATOR,
}
"""The routes by what they are for. docs/reference/http.md has a part for each group."""
ROUTES: Sequence[Route] = [route for routes in GROUPS.values() for route in routes]
