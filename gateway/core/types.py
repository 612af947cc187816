"""The types that the gateway's rooms exchange. Nothing here decides or acts.

Invariants:
- every token of a segment was made by one engine incarnation under one version;
- `token_ids`, `logprobs` (and `top_logprobs` when present) of a delta have equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

import msgspec

from protos.telemetry.context import TraceContext
from protos.trajectories import Segment

SessionId = NewType("SessionId", str)
GroupId = NewType("GroupId", str)
TurnId = NewType("TurnId", str)
EngineName = NewType("EngineName", str)
Version = NewType("Version", int)
"""A weight version; 0 is what an engine was started with, before any published one."""
NO_VERSION = Version(0)

FinishReason = Literal["stop", "length"]
SegmentCause = Literal["start", "move", "cut"]
Split = Literal["train", "eval"]
Evidence = Literal["told", "looked", "contradicted", "none"]
"""For a segment's version: `told`: the engine reported it with the tokens; `looked`: a check of the engine afterwards
found the same incarnation and label; `contradicted`: it found another label; `none`: no check was possible."""
LogprobsKind = Literal["processed", "raw"]
"""Which logprobs engines report: after temperature, truncation and penalties, or before."""
VersionPolicy = Literal["segment", "strict", "fail"]
"""When no engine serves a session's version any more: go on under another one, have it loaded again, or give up."""
HistoryKind = Literal["first", "extended", "closed", "branch"]
"""How a prompt came from its session's record. `extended`: the newest turn, or a leaf. `closed`: the same, after the
template ended a turn that was cut short. `branch`: another path through the session began."""
InText = Literal["control", "refuse", "text"]
"""What a special token becomes that stands as text in a message: the token, a refusal, or its characters' tokens."""
History = Literal["record", "template"]
"""For templates that write history otherwise than it was sampled (Qwen3 drops old reasoning): `record` goes on from
what was sampled, `template` from what the template writes, as a branch."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled. `stop` strings are matched by the gateway, never by engines."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no truncation
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0  # alternatives reported beside the sampled token
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one are left out
    repetition_penalty: float = 1.0  # on what the prompt or the answer holds already, as the engine counts it
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id, each once
    json_schema: str = ""  # as JSON text: the answer is constrained to it
    regex: str = ""  # the same to a pattern, in the engine's dialect
    structural_tag: str = ""  # the same to tagged text, as xgrammar has it: JSON
    in_place: bool = False
    """It ends on the engine that began it: another one lacks the state of its grammar or penalties."""
    tokens_per_event: int = 1  # that the engine gathers before it sends them; the first goes out at once

    @property
    def constrained(self) -> bool:
        return bool(self.json_schema or self.regex or self.structural_tag)


@dataclass(frozen=True, slots=True)
class TurnOrigin:
    """The request behind a turn: what identifies a retry of it, and what its answer's head and record need."""

    digest: str = ""
    unnamed: bool = False  # it named no session
    idempotency_key: str | None = None
    history: HistoryKind = "first"
    history_reason: str = ""
    messages_added: int = 0  # the last ones of the request's: those that its parent's path has not
    created_unix_s: int = 0
    trace: TraceContext | None = None  # the client's own, of this call; only with tracing


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One model call of a session, already in token ids."""

    turn_id: TurnId
    session_id: SessionId
    turn_index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    parent: TurnId | None = None  # the ended turn whose ids it extends; None: a root of the session's tree
    choice: int = 0  # which of a request's `n` answers
    origin: TurnOrigin = TurnOrigin()


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


class TokenDelta(msgspec.Struct, frozen=True, gc=False):
    """Tokens that arrived together. `finish_reason` is set on the last delta of the turn, which may be empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version
    engine: EngineName
    segment: int
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class TurnRecord:
    """The record of one turn, in flight or ended: the unit of the partial-response pool."""

    request: TurnRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)  # indices relative to the turn's generated tokens
    finish_reason: FinishReason | None = None
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)  # of every token, or empty: not requested
