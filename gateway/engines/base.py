"""The seam for engines: what the gateway needs of any inference server. One adapter per dialect, one contract suite.

Every method has a deadline inside; none retries: that is the gateway's decision.
"""

from __future__ import annotations

import functools
import math
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from gateway.core.types import FinishReason, SamplingParams, TopLogprob
from protos.access.credentials import Credentials
from protos.access.tls import relays_of, with_true_ends
from protos.errors import LaminarError

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A token id of an engine; any other number ends its stream where it is read."""

CutReason = Literal[
    "refused", "reset", "early_end", "abort", "no_room", "server_error", "stalled", "protocol", "version"
]


class StreamCut(LaminarError):
    """The engine's stream ended without completing the turn. What was received before stands."""

    code = "stream_cut"
    http_status = 502

    def __init__(self, reason: CutReason, message: str) -> None:
        super().__init__(message)
        self.reason: CutReason = reason


class NoLogprob(StreamCut):
    """A token came without a number as its logprob: engines write NaN as null, since JSON has no NaN."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol", message)


class EngineFailed(LaminarError):
    """A control call failed; for a weight load this means the engine must stay fenced. `outline`: the message without
    anything that the server sent, for errors of what may be no engine."""

    code = "engine_failed"
    http_status = 502

    def __init__(self, message: str, *, hint: str = "", outline: str = "") -> None:
        super().__init__(message, hint=hint)
        self.outline = outline or message


class SnapshotRefused(EngineFailed):
    """The engine refused the snapshot before it was fenced: it serves what it held before, unchanged."""

    code = "snapshot_refused"


class RequestRefused(LaminarError):
    """The engine refused the request itself (HTTP 400, 422): no other engine would take it, and none is tried."""

    code = "request_refused"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class EngineChunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens that came together. `versions` are the engine's own labels for its spans, if it reports them.

    `failure`: the error that ended the stream after these tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    finish_reason: FinishReason | None = None
    versions: tuple[str, ...] = ()
    failure: LaminarError | None = None


COUNT_MAX = 1 << 40
"""Of whatever an engine counts: requests, tokens. A larger number cannot be true."""
WORD_MAX = 256
"""Characters of an engine's label or incarnation."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's state at one poll. `incarnation` differs after a restart. EngineFailed when it cannot be true."""

    incarnation: str
    kv_usage: float  # 0..1
    running: int
    waiting: int
    ready: bool = True  # False: it says that it is to get no turns, since it is paused, or ends with its last one

    def __post_init__(self) -> None:
        _check_word("incarnation", self.incarnation)
        _check_number("KV usage", self.kv_usage)
        _check_number("running requests", self.running)
        _check_number("waiting requests", self.waiting)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The capacity of an engine, read once per incarnation. EngineFailed when it cannot be true."""

    context_tokens: int  # 0: it reports none, and has the model's
    kv_capacity_tokens: int  # 0: it reports none; turns are placed by number alone, and no plan moves them there
    weight_version: str
    fenced: bool = False
    """Paused, by anybody: perhaps in the middle of a load, and then its label proves nothing."""
    seeds: bool = True
    """It samples by a request's `seed`; False: it takes the field, and ignores it."""

    def __post_init__(self) -> None:
        _check_number("context tokens", self.context_tokens)
        _check_number("KV tokens", self.kv_capacity_tokens)
        _check_word("weight version", self.weight_version)


def count(reported: float, what: str) -> int:
    """The number of `what` that an engine reported. EngineFailed when it cannot be a count."""
    _check_number(what, reported)
    return int(reported)


def _check_number(what: str, reported: float) -> None:
    if not (math.isfinite(reported) and 0 <= reported <= COUNT_MAX):
        raise EngineFailed(f"it reports {str(reported)[:40]} {what}", hint="no engine can mean that: restart it")


def _check_word(what: str, reported: str) -> None:
    if len(reported) > WORD_MAX:
        raise EngineFailed(
            f"it reports a {what} of {len(reported)} characters", hint=f"at most {WORD_MAX} are accepted"
        )


class PassedAnswer(Protocol):
    """A response as its bytes come. It has to be closed, which aborts the request unless it was read to its end."""

    @property
    def paused(self) -> bool:
        """Whether the engine is held back until the bytes that wait here are taken."""
        ...

    async def head(self) -> tuple[int, str]:
        """Status and content type, once they came. Raises StreamCut."""
        ...

    async def some(self) -> bytes:
        """The bytes since the last call, once there are any; empty at the end. Raises StreamCut."""
        ...

    def cut(self, cut: StreamCut) -> None:
        """Aborts the request in the engine; the reader gets `cut`."""
        ...

    def close(self) -> None: ...


TakeChunk = Callable[[EngineChunk], Awaitable[object] | None]
"""Takes a chunk as soon as it was read; returns an awaitable if the next one has to wait for it, else None."""


DTYPE_NAME = re.compile(r"[a-z0-9_]{0,32}")


def dtype_name(reported: str) -> str:
    """The name of a dtype that an engine reported, or empty. EngineFailed when it cannot be one."""
    if DTYPE_NAME.fullmatch(reported) is None:
        raise EngineFailed(f"an engine reports that it computes in {reported[:64]!r}, which names no dtype")
    return reported


class EngineStream(Protocol):
    """One turn's tokens, up to the finish. Both ways raise StreamCut or RequestRefused."""

    async def deliver(self, take: TakeChunk) -> None: ...

    def __aiter__(self) -> AsyncIterator[EngineChunk]: ...


Tls = Callable[[], ssl.SSLContext]
"""TLS for the next connection to an engine whose address is https."""


@functools.cache
def system_tls() -> ssl.SSLContext:
    """By the CAs of this host."""
    return with_true_ends(ssl.create_default_context())


def engine_tls(credentials: Credentials | None) -> Tls:
    """With a fleet's credentials engines are behind ports of its relays, and these alone are taken."""
    return system_tls if credentials is None else relays_of(credentials).context


CONTROL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 300.0


class TextCodec(Protocol):
    """The model's tokenizer: text to token ids and back. Special tokens are text like any other, and none is added."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterContext:
    """What every adapter is made with besides its engine's address. Each takes of it what its engine needs, so that one
    more kind of engine needs no argument of its own. Deadlines in seconds.

    `model`: the served name. `tokenizer`: the gateway's, for engines that take text; None where none could be read, as
    `gateway doctor` may find it: a gateway that serves has one.
    """

    model: str
    tokenizer: TextCodec | None
    stall_timeout_s: float = 60.0  # silence on a stream for longer counts as a cut
    control_timeout_s: float = CONTROL_TIMEOUT_S  # a whole control call without a deadline of its own
    load_timeout_s: float = LOAD_TIMEOUT_S  # each step of a load
    tls: Tls = system_tls

    @property
    def codec(self) -> TextCodec:
        """The tokenizer, for an adapter that cannot do without. Raises EngineFailed if there is none."""
        if self.tokenizer is None:
            raise EngineFailed("it takes text, and the gateway has no tokenizer", hint="give --tokenizer the model's")
        return self.tokenizer


class EngineAdapter(Protocol):
    """One engine."""

    def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        traceparent: str = "",
    ) -> AbstractAsyncContextManager[EngineStream]:
        """Streams the turn. Leaving the context early aborts it upstream. Raises StreamCut or RequestRefused.

        `traceparent`: W3C's header, for the engine's own spans; empty without tracing.
        """
        ...

    async def pass_on(self, path: str, body: bytes, *, stall_timeout_s: float) -> PassedAnswer:
        """Forwards a client's own request to a text route; the response is unchanged. Raises StreamCut."""
        ...

    async def report(self) -> EngineReport:
        """Raises EngineFailed when the engine does not respond in time, or reports an error."""
        ...

    async def limits(self) -> EngineLimits: ...

    async def dtype(self) -> str:
        """The dtype it computes in, as torch names it ("bfloat16"); empty if not reported. Raises EngineFailed."""
        ...

    async def weight_version(self) -> str:
        """The current label of its weights; empty is taken for version 0. Raises EngineFailed.

        An engine that cannot name its weights is `fenced` in its limits until this adapter has loaded some.
        """
        ...

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """The ids of `text` by its own tokenizer, without added special tokens; None: it has no route for that."""
        ...

    async def load(self, path: Path, version: int, digest: str) -> float:
        """Fence, load, verify the label, unfence; returns the seconds it was fenced. EngineFailed: it stays fenced (by
        the adapter, if the engine has no such state), SnapshotRefused: it never was.

        Turns that run meanwhile are aborted. No KV of the old weights is used afterwards. Never called for a kind that
        does not load (`protos.engines`), whose adapter raises SnapshotRefused.
        """
        ...

    async def close(self) -> None: ...
