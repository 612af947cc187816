"""The seam between the routes of model calls and the rooms behind them: all that those handlers use.

Errors of every method are LaminarError subclasses; handlers map them to HTTP responses by their table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from gateway.core.access import Caller
from gateway.core.retries import Call
from gateway.core.tree import TurnTree
from gateway.core.types import History, LogprobsKind, SessionId, TokenDelta, TurnId, TurnRequest
from protos.access.roles import SESSION_KEY_PREFIX as SESSION_KEY_PREFIX  # for the rooms above
from protos.engines import ENGINE_KINDS
from protos.telemetry.context import TraceContext
from protos.trajectories import Segment, VersionChange

IdentitySource = Literal["url", "api_key", "header", "body", "none"]
Message = Mapping[str, Any]
"""One chat message as OpenAI's API has it: role, content, tool_calls, ..."""


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """Which session a request names, and where. `None`: the call is a session of its own, which ends with it, unless it
    is `kept` for calls that continue it. `caller`: whose call it is; None while access control is off. `trace`: the
    span that the call is below at its client; None without one, and without tracing."""

    session_id: SessionId | None
    source: IdentitySource
    kept: bool = False
    caller: Caller | None = None
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model this gateway serves. `context_tokens` bounds prompt and answer together."""

    name: str
    context_tokens: int
    created_unix_s: int
    penalties_move: bool = False  # turns with penalties may go on at another engine
    kinds: frozenset[str] = frozenset(ENGINE_KINDS)  # of its engines
    away: str = ""  # why no engine has responded, where none has


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session: the next turn's prompt extends a turn of its tree, or is a root."""

    session_id: SessionId
    tree: TurnTree
    ephemeral: bool
    history: History = "record"
    trains: bool = False
    logprobs_kind: LogprobsKind = "processed"
    max_context_tokens: int | None = None  # of a prompt and its answer, if that is less than the model's
    owner: str = ""  # the name whose API key made it


class TurnHandle(Protocol):
    """One running turn: an asynchronous context manager, within which it is read.

    Several clients may read it, each from its first token. A client that leaves the context before the last delta does
    not end the turn. When all clients have left, it goes on for a grace period, so that a retry can join, and is then
    aborted.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def read(self, take: Callable[[TokenDelta], Awaitable[object] | None], *, at_end: bool = False) -> None:
        """Gives `take` every delta, from the first token to the finish, as soon as it is there, or all `at_end`.

        What `take` returns is awaited before the next one. Raises what it raises, or what ended the turn.
        """
        ...

    async def finish_early(self, num_tokens: int) -> None:
        """A stop string matched: the turn ends with its first `num_tokens` generated tokens, reason "stop"."""
        ...

    @property
    def request(self) -> TurnRequest: ...

    async def give_up(self, why: str) -> None:
        """Ends the turn at once if no client reads it: no retry will request it."""
        ...

    def sent(self, num_tokens: int) -> None:
        """So many of its generated tokens were sent to a client; 0 until the end, of an answer that is sent whole."""
        ...

    def left(self) -> None:
        """A client that has read the turn to its end is gone; call it once for each. Unless the answer was delivered, a
        request with the same body may join the turn."""
        ...

    def delivered(self) -> None:
        """The client has the whole answer: from now on only a marked retry, or one with its key, joins the turn."""
        ...

    @property
    def segments(self) -> Sequence[Segment]:
        """Segments so far; `start` and `end` count the turn's generated tokens."""
        ...

    @property
    def version_changes(self) -> Sequence[VersionChange]:
        """Changes of its session's version while this turn ran."""
        ...


class Turns(Protocol):
    """What the handlers of model calls use of the gateway."""

    def models(self) -> Sequence[ModelInfo]: ...

    def tokens_per_event(self, *, streamed: bool) -> int:
        """How many tokens engines should gather for a turn that begins now."""
        ...

    def session_of_key(self, api_key: str) -> SessionId | None:
        """The session whose key this is; None for any other key."""
        ...

    def find_session(self, session_id: SessionId) -> SessionView | None:
        """The live session of that name, if there is one."""
        ...

    async def open_session(self, identity: SessionIdentity, turns: int = 1) -> SessionView:
        """Gets or makes the session. Raises Conflict when it has ended, or has no room for so many turns more, and
        Forbidden when it is not the caller's."""
        ...

    def session_of_turn(self, turn_id: TurnId) -> SessionView | None:
        """The live session in whose tree this turn is."""
        ...

    async def join(self, call: Call, choices: int, *, again: bool = False) -> Sequence[TurnHandle] | None:
        """The turns, one a choice, of the earlier request that this one repeats; None: it is a new one.

        `again`: it was new a moment ago, and others may have come since. Raises Conflict when its key was used for
        another request.
        """
        ...

    def refused(self, call: Call) -> None:
        """The request was refused before it had a turn, and may be sent again."""
        ...

    def start(self, request: TurnRequest) -> TurnHandle:
        """The turn, not yet started: entering the context places it. OutOfCapacity when every queue is full."""
        ...

    async def record_turn(self, request: TurnRequest, head: Message, messages: Sequence[Message]) -> None:
        """Records the messages that the turn adds to its history, the answer included, for later turns to extend."""
        ...
