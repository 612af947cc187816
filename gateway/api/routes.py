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
    AddEngineRequest,
    EngineAdded,
    EngineRemoved,
    Events,
    LiveSessions,
    Plans,
    Receipts,
)
from gateway.api.anthropic.bodies import CountTokensRequest, MessagesRequest
from gateway.api.anthropic.schema import MessageAnswer, TokenCount
from gateway.api.experience import (
    MSGPACK,
    AckAnswer,
    AckRequest,
    EvictAnswer,
    EvictRequest,
    ExperienceStatistics,
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
            "A response in OpenAI's newer API; a session's next turn.",
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
            "post",
            f"{prefix}/v1/messages",
            CALL,
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
            CALL,
            "The length of a message's prompt.",
            CountTokensRequest,
            answers=[TokenCount],
            error="AnthropicError",
        ),
        Route("get", f"{prefix}/v1/models", MODELS, "The models served.", answers=[Models]),
        Route("get", f"{prefix}/v1/models/{{model}}", MODELS, "One model.", answers=[Model]),
    ]


_SESSIONS = [
    Route(
        "post", "/sessions", OPEN, "Makes one and its key.", CreateRequest, answers=[SessionMade], optional_body=True
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
        query={"tokens": {"schema": {"type": "boolean"}}},
        answers=[RecordedSession],
    ),
    Route("post", "/sessions/{sid}/finish", END, "Ends a session with a reward.", Finish, answers=_ENDED),
    Route(
        "post", "/finish_session", END, "The same, as routers have it.", Finish, {"session_id": _NAMED}, answers=_ENDED
    ),
    Route(
        "post", "/sessions/{sid}/reward", END, "A reward of a turn or a leaf.", RewardRequest, answers=[SessionPhase]
    ),
    Route(
        "post",
        "/sessions/{sid}/abandon",
        END,
        "Ends a session without one.",
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
        EXPERIENCE,
        "Leases finished trajectories.",
        SampleRequest,
        answers=[SampleAnswer],
        also=(MSGPACK, MEDIA_TYPE),
    ),
    Route("post", "/experience/ack", EXPERIENCE, "Uses them up.", AckRequest, answers=[AckAnswer]),
    Route("post", "/experience/release", EXPERIENCE, "Gives them back unused.", AckRequest, answers=[ReleaseAnswer]),
    Route(
        "post",
        "/experience/reclaim",
        EXPERIENCE,
        "Gives back what an earlier life of a reader had leased.",
        ReclaimRequest,
        answers=[ReleaseAnswer],
    ),
    Route("post", "/experience/evict", EXPERIENCE, "Removes sessions for good.", EvictRequest, answers=[EvictAnswer]),
    Route(
        "get",
        "/experience/rows",
        EXPERIENCE_READ,
        "What waits for a trainer, without its tokens.",
        query={"after": _NUMBER, "limit": _NUMBER, "leased": _NUMBER},
        answers=[RowsAnswer],
    ),
    Route(
        "get",
        "/experience/rows/{number}",
        EXPERIENCE_READ,
        "One of them whole, under no lease.",
        answers=[SampleAnswer],
        also=(MSGPACK, MEDIA_TYPE),
    ),
    Route(
        "get",
        "/experience/statistics",
        EXPERIENCE_READ,
        "Staleness, lengths, rewards, waiting.",
        answers=[ExperienceStatistics],
    ),
]
_POOL: Json = {"schema": {"type": "string", "minLength": 1, "maxLength": 200}}
_TASKS = [
    Route("post", "/tasks", TASKS, "Adds tasks to a prompt pool.", AddTasksRequest, answers=[TasksAdded]),
    Route("get", "/tasks", TASKS_READ, "A prompt pool as it stands.", query={"pool": _POOL}, answers=[PoolAnswer]),
    Route(
        "post", "/tasks/lease", LEASE, "Leases samples of tasks to a runner.", LeaseTasksRequest, answers=[TasksLeased]
    ),
    Route("post", "/tasks/renew", LEASE, "Prolongs leases.", RenewTasksRequest, answers=[TasksRenewed]),
    Route("post", "/tasks/finish", LEASE, "Ends a lease with a reward.", FinishTaskRequest, answers=[TaskEnded]),
    Route("post", "/tasks/fail", LEASE, "Ends a lease without one.", FailTaskRequest, answers=[TaskEnded]),
    Route("post", "/tasks/release", LEASE, "Gives samples back.", ReleaseTasksRequest, answers=[TasksReleased]),
    Route(
        "get",
        "/tasks/results",
        TASKS_READ,
        "The last rewards of tasks.",
        query={"pool": _POOL, "after": _NUMBER, "limit": _NUMBER},
        answers=[TaskResults],
    ),
    Route("post", "/tasks/priorities", TASKS, "Sets priorities.", PrioritizeTasksRequest, answers=[TasksPrioritized]),
    Route("post", "/tasks/remove", TASKS, "Removes tasks.", RemoveTasksRequest, answers=[TasksRemoved]),
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
    Route("get", "/health", LOOK, "The same, as engines have it.", answers=[Health], also_status=503),
    Route("get", "/metrics", STATUS, "For Prometheus.", also=("text/plain",)),
    Route(
        "get",
        "/admin/timeline",
        STATUS,
        "The events of the fleet.",
        query={"after": _NUMBER, "limit": _NUMBER},
        answers=[Events],
    ),
    Route(
        "post", "/admin/engines", OPERATE, "Takes an engine in.", AddEngineRequest, status=201, answers=[EngineAdded]
    ),
    Route("delete", "/admin/engines/{name}", OPERATE, "Takes an engine out.", answers=[EngineRemoved]),
    Route("get", "/admin/sessions", STATUS, "The live sessions.", query={"limit": _NUMBER}, answers=[LiveSessions]),
    Route("get", "/admin/repack", STATUS, "What the planner would do now.", answers=[Plans]),
    Route("post", "/admin/repack", OPERATE, "Does it now.", answers=[Plans]),
    Route(
        "get", "/admin/receipts", STATUS, "What moves cost and gained.", query={"limit": _NUMBER}, answers=[Receipts]
    ),
    Route("get", "/openapi.json", LOOK, "This.", also=("application/json",)),
]
ROUTES: Sequence[Route] = [
    *(route for prefix in PREFIXES for route in _calls(prefix)),
    *_SESSIONS,
    *_TRAINER,
    *_TASKS,
    *_OPERATOR,
]
