"""The types of generation: a request, the state of its sequence, and the deltas of a step.

Invariant of a sequence: `num_computed` tokens have their KV in the workspace row `slot`; a running sequence holds
the pool blocks that cover them; when it is not running it has no slot and no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int = 16
    min_tokens: int = 0
    """End tokens are forbidden before this many generated ones."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are left out; 0: none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """On tokens that were generated: once, and for each time."""
    repetition_penalty: float = 1.0
    """On tokens of the prompt and generated ones: positive logits are divided by it, others multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these ids, each named once."""
    seed: int = 0
    """The noise of a token is a function of seed and absolute position, so a resumed turn draws the same."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs; 0: the sampled token's; n: also the n most likely."""

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def truncated(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    """Prefix KV is shared only between requests of the same salt."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Generated tokens [start, end) were sampled under weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token; `top`: (id, logprob) of the most likely ones, on request."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A step's result for one request: at most one token, and its end."""

    request_id: str
    token: Token | None = None
    version: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerationRequest
    order: int
    """Arrival number: the oldest are served first and preempted last."""
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens whose KV came from the prefix cache when it was first admitted."""
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the full blocks so far; those below `num_published` are in the prefix cache."""
    num_published: int = 0
    epoch: int = 0
    """Weight epoch under which its KV was begun; blocks of another epoch are never published."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed; 1 means that it decodes."""
        return len(self.token_ids) - self.num_computed
