"""The nouns that the gateway's parts hand to each other. Nothing here decides or does anything.

Invariants:
- every token of a segment was made by one engine incarnation under one version;
- `token_ids`, `logprobs` (and `top_logprobs` when present) of a delta have equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

import msgspec

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
"""For a segment's version: the engine told it with the tokens; a look at the engine afterwards found the same
incarnation and label; found another label; or nobody could ask any more."""
LogprobsKind = Literal["processed", "raw"]
"""Which logprobs engines report: after temperature, truncation and penalties, or before."""
VersionPolicy = Literal["segment", "strict", "fail"]
"""When no engine serves a session's version any more: go on under another one, have it loaded again, or give up."""
HistoryKind = Literal["first", "extended", "closed", "branch"]
"""How a prompt came from its session's record. `extended`: the newest turn, or a leaf. `closed`: the same, after the
template ended a turn that was cut short. `branch`: another path through the session began."""
History = Literal["record", "template"]
"""Where a template writes history otherwise than it was sampled (Qwen3 drops old reasoning): `record` goes on from what
was sampled, `template` from what the template writes, as a branch."""


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
    """It ends on the engine that began it: another would not know what its grammar or penalties have seen."""
    tokens_per_event: int = 1  # that the engine gathers before it sends them; the first goes out at once

    @property
    def constrained(self) -> bool:
        return bool(self.json_schema or self.regex or self.structural_tag)


@dataclass(frozen=True, slots=True)
class TurnOrigin:
    """The request behind a turn: by what a retry of it is known, and what its answer's head and record need."""

    digest: str = ""
    unnamed: bool = False  # it named no session
    idempotency_key: str | None = None
    history: HistoryKind = "first"
    history_reason: str = ""
    messages_added: int = 0  # the last ones of the request's: those that its parent's path has not
    created_unix_s: int = 0


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


class SampledWith(msgspec.Struct, frozen=True):
    """What a trainer needs to know of how a segment was sampled. `logprobs` are of that distribution, unless `kind`:

    `raw`: of the model's, before temperature, truncation and penalties; `untruncated`: after temperature and penalties,
    before `top_p`, `top_k` and `min_p`; `greedy`: the likeliest token was taken.
    """

    temperature: float
    top_p: float
    top_k: int
    presence_penalty: float
    frequency_penalty: float
    constrained: bool
    logprobs: Literal["policy", "raw", "untruncated", "greedy"]
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}  # by token id


class VersionChange(msgspec.Struct, frozen=True):
    """A session's version was lost, and it went on under another one."""

    turn: int
    turn_id: str
    from_version: int
    to_version: int
    reason: str


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens of one turn. `start` and `end` index the session's token ids, end exclusive.

    `dtype`: what the engine computes in; empty: it does not tell. A greedy turn whose segments differ in it is not the
    turn that one engine alone would have made.
    """

    turn: int
    engine: str
    incarnation: str
    version: int
    start: int
    end: int
    cause: SegmentCause
    started_unix_s: float
    ended_unix_s: float
    seed: int | None = None
    sampled_with: SampledWith | None = None
    evidence: Evidence = "none"
    dtype: str = ""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One path through a finished session as a trainer reads it; the lists per token have equal length.

    A session whose history was edited, or that had turns side by side, gives one for each leaf: what they share is
    masked in all but the first, so that every sampled token is trained on once.
    """

    session_id: str
    group_id: str
    sample_index: int
    reward: float
    status: str  # "completed" | "truncated"
    mixed: bool  # more than one version sampled its tokens
    split: Split
    token_ids: list[int]
    logprobs: list[float]  # behaviour policy's; 0.0 where loss_mask is 0
    loss_mask: list[int]  # 1: sampled by the policy, and not trained on in an earlier leaf
    versions: list[int]  # -1 where loss_mask is 0
    turns: int
    segments: list[Segment]
    started_unix_s: float
    finished_unix_s: float
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    leaf: int = 0  # which path of the session, in the order in which they ended
    leaves: int = 1
    version_policy: VersionPolicy = "segment"
    version_changes: list[VersionChange] = msgspec.field(default_factory=list)
    turn_ids: list[str] = msgspec.field(default_factory=list)  # of the path; an answer's id without its prefix
    own_reward: bool = False  # the leaf's, not the session's
    turn_rewards: list[float | None] = msgspec.field(
        default_factory=list
    )  # by turn of the path; empty: none were given


@dataclass(slots=True)
class TurnRecord:
    """What is known of one turn, in flight or done: the unit of the partial-response pool."""

    request: TurnRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)  # indices relative to the turn's generated tokens
    finish_reason: FinishReason | None = None
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)  # of every token, or empty: not asked for
