"""The seam for engines: what the gateway needs of any inference server. One adapter per dialect, one contract suite.

Every method has a deadline inside; none retries: that is the gateway's decision.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from gateway.core.types import NO_VERSION, FinishReason, SamplingParams, TopLogprob, Version
from protos.errors import LaminarError

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""As an engine may say it: what is no such number ends its stream where it is read."""

CutReason = Literal["refused", "reset", "early_end", "abort", "server_error", "stalled", "protocol", "version"]


class StreamCut(LaminarError):
    """The engine's stream ended without completing the turn. What was received before stands."""

    code = "stream_cut"
    http_status = 502

    def __init__(self, reason: CutReason, message: str) -> None:
        super().__init__(message)
        self.reason: CutReason = reason


class NoLogprob(StreamCut):
    """A token came without a number as its logprob: JSON has no NaN, and says null."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol", message)


class EngineFailed(LaminarError):
    """A control call failed; for a weight load this means the engine must stay fenced."""

    code = "engine_failed"
    http_status = 502


class SnapshotRefused(EngineFailed):
    """The snapshot was not good enough to fence for: the engine holds, whole and unfenced, what it held before."""

    code = "snapshot_refused"


class RequestRefused(LaminarError):
    """The engine says that this request can never work (HTTP 4xx): no other engine is asked."""

    code = "request_refused"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class EngineChunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens that came together. `versions` are the engine's own labels for its spans, when it tells them.

    `failure`: what ended the stream after these tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    finish_reason: FinishReason | None = None
    versions: tuple[str, ...] = ()
    failure: LaminarError | None = None


COUNT_MAX = 1 << 40
"""Of whatever an engine counts: requests, tokens. Beyond it is no engine's truth."""
WORD_MAX = 256
"""Characters of an engine's label or incarnation."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One look at an engine. `incarnation` differs after a restart. EngineFailed when it cannot be true."""

    incarnation: str
    kv_usage: float  # 0..1
    running: int
    waiting: int

    def __post_init__(self) -> None:
        _check_word("incarnation", self.incarnation)
        _check_number("KV usage", self.kv_usage)
        _check_number("running requests", self.running)
        _check_number("waiting requests", self.waiting)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can hold; read when an incarnation is first met. EngineFailed when it cannot be true."""

    context_tokens: int
    kv_capacity_tokens: int
    weight_version: str
    fenced: bool = False
    """Paused, by whomever: perhaps in the middle of a load, and then its label proves nothing."""

    def __post_init__(self) -> None:
        _check_number("context tokens", self.context_tokens)
        _check_number("KV tokens", self.kv_capacity_tokens)
        _check_word("weight version", self.weight_version)


def whole(said: float, what: str) -> int:
    """What an engine says of `what`, which is counted. EngineFailed when it is no such number."""
    _check_number(what, said)
    return int(said)


def _check_number(what: str, said: float) -> None:
    if not (math.isfinite(said) and 0 <= said <= COUNT_MAX):
        raise EngineFailed(f"it says {str(said)[:40]} of its {what}", hint="no engine can mean that: restart it")


def _check_word(what: str, said: str) -> None:
    if len(said) > WORD_MAX:
        raise EngineFailed(f"it says {len(said)} characters of its {what}", hint=f"at most {WORD_MAX} are taken")


VERSION_DIGITS_MAX = 18
"""Of a version: what has more is stored nowhere, and was given by no relay."""


def version_of(label: str) -> Version:
    """The version that an engine's label names; any other word is what it was started with."""
    named = label.isascii() and label.isdigit() and len(label) <= VERSION_DIGITS_MAX
    return Version(int(label)) if named else NO_VERSION


class PassedAnswer(Protocol):
    """An answer as its bytes come. It has to be closed, which aborts the request unless it was read to its end."""

    @property
    def heard_at(self) -> float:
        """When anything of it came last, or the request was sent: on the event loop's clock."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the engine is held back, until what waits here is taken."""
        ...

    async def head(self) -> tuple[int, str]:
        """Status and content type, once they came. Raises StreamCut."""
        ...

    async def some(self) -> bytes:
        """What came since the last call, once something did; nothing at the answer's end. Raises StreamCut."""
        ...

    def cut(self, cut: StreamCut) -> None:
        """Aborts the request in the engine; who reads gets `cut`."""
        ...

    def close(self) -> None: ...


TakeChunk = Callable[[EngineChunk], Awaitable[object] | None]
"""Is given a chunk as soon as it was read; returns what to wait for before the next one, or None."""


DTYPE_NAME = re.compile(r"[a-z0-9_]{0,32}")


def dtype_name(told: str) -> str:
    """The name of a dtype that an engine told, or empty. EngineFailed when it cannot be one."""
    if DTYPE_NAME.fullmatch(told) is None:
        raise EngineFailed(f"an engine says that it computes in {told[:64]!r}, which names no dtype")
    return told


class EngineStream(Protocol):
    """One turn's tokens, up to the finish. Both ways raise StreamCut or RequestRefused."""

    async def deliver(self, take: TakeChunk) -> None: ...

    def __aiter__(self) -> AsyncIterator[EngineChunk]: ...


class EngineAdapter(Protocol):
    """One engine."""

    def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str, session_id: str
    ) -> AbstractAsyncContextManager[EngineStream]:
        """Streams the turn. Leaving the context early aborts it upstream. Raises StreamCut or RequestRefused."""
        ...

    async def pass_on(self, path: str, body: bytes, *, stall_timeout_s: float) -> PassedAnswer:
        """A client's own request at a text route, its answer as it is. Raises StreamCut."""
        ...

    async def report(self) -> EngineReport:
        """Raises EngineFailed when it does not answer in time or says it is broken."""
        ...

    async def limits(self) -> EngineLimits: ...

    async def dtype(self) -> str:
        """What it computes in, as torch names it ("bfloat16"); empty when it does not tell. Raises EngineFailed."""
        ...

    async def weight_version(self) -> str:
        """Its label now. Raises EngineFailed."""
        ...

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """The ids of `text` by its own tokenizer, without special tokens added; None: it has no route that tells."""
        ...

    async def load(self, path: Path, version: int, digest: str, *, keep_running: bool = False) -> float:
        """Fence, load, verify the label, unfence; returns the seconds it was fenced. EngineFailed: it stays fenced,
        SnapshotRefused: it never was.

        Turns that run meanwhile are aborted; with `keep_running` they stand still and go on under the new weights,
        their KV computed anew. No KV of the old weights is used afterwards.
        """
        ...

    async def close(self) -> None: ...
