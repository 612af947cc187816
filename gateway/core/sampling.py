"""How each segment of a turn is sampled. Pure.

Engines start a request's random stream anew whenever it is sent. A segment that used the turn's seed again would repeat
the noise of the turn's beginning; siblings (`n` > 1) and later turns of a session would repeat each other's. So each
segment has a recorded seed of its own, derived from choice, turn and position: the same request over the same history
draws the same seeds. Bitwise the same answer is promised only for a turn that was neither cut nor moved, on one engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection

from gateway.core.parameters import PARAMETERS, distorting, truncating
from gateway.core.types import LogprobsKind, SamplingParams, TurnRequest
from protos.engines import ENGINE_KINDS
from protos.trajectories import SampledWith

TELL_TRUNCATED = frozenset(name for name, kind in ENGINE_KINDS.items() if kind.truncated_logprobs)
CONSTRAINING = frozenset(name for name, kind in ENGINE_KINDS.items() if kind.constrains)


def kinds_for(*, constrained: bool, truncated: bool = False, parameters: Collection[str] = ()) -> frozenset[str] | None:
    """Kinds of engines that support a turn; None for all.

    `constrained`: by a grammar, a schema or a pattern. `truncated`: its logprobs are to be those of a truncated policy.
    `parameters`: the names of those that its engine has to take.
    """
    able = CONSTRAINING if constrained else frozenset(ENGINE_KINDS)
    able = able & TELL_TRUNCATED if truncated else able
    able = frozenset(kind for kind in able if ENGINE_KINDS[kind].lacks.isdisjoint(parameters))
    return able if able < frozenset(ENGINE_KINDS) else None


def segment_seed(seed: int, choice: int, turn: int, generated: int) -> int:
    """32 bits, which every engine takes. `turn` is its depth in the session, `generated` the turn's tokens so far."""
    digest = hashlib.sha256(f"{seed}:{choice}:{turn}:{generated}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def distorted(sampling: SamplingParams) -> list[str]:
    """The fields by which tokens are drawn from another distribution than the model's own, greedy apart."""
    others = {
        "min_tokens": sampling.min_tokens > 0,
        "logit_bias": bool(sampling.logit_bias),
        "response_format": bool(sampling.json_schema),
        "structured_outputs": bool(sampling.regex),
        "tool_choice": bool(sampling.structural_tag),
    }
    return [*distorting(sampling), *(name for name, does in others.items() if does)]


def tied_by(sampling: SamplingParams) -> str:
    """What another engine would not know of a turn that has to end where it began; empty for one that may move."""
    if not sampling.in_place:
        return ""
    if sampling.constrained:
        what = "JSON schema" if sampling.json_schema else "pattern" if sampling.regex else "tool call"
        return f"how far its {what} is fulfilled"
    return "which tokens its penalties have counted"


def sampled_with(sampling: SamplingParams, kind: LogprobsKind, engine_kind: str = "vllm") -> SampledWith:
    """What a segment's record has of its sampling, which is what `segment_sampling` returned for it."""
    raw = kind == "raw" and bool(distorted(sampling))
    untruncated = engine_kind not in TELL_TRUNCATED and bool(truncating(sampling))
    logprobs = "raw" if raw else "greedy" if sampling.temperature == 0.0 else "untruncated" if untruncated else "policy"
    return SampledWith(
        **{parameter.name: getattr(sampling, parameter.name) for parameter in PARAMETERS},
        constrained=sampling.constrained,
        logprobs=logprobs,
        logit_bias={str(token_id): bias for token_id, bias in sampling.logit_bias},
        min_tokens=sampling.min_tokens,
    )


def segment_sampling(request: TurnRequest, generated: int) -> SamplingParams:
    """The turn's sampling for what is left of it after `generated` tokens."""
    sampling = request.sampling
    seed = sampling.seed
    if seed is None and not generated:
        return sampling
    if seed is not None:
        seed = segment_seed(seed, request.choice, request.turn_index, generated)
    return dataclasses.replace(
        sampling,
        max_tokens=sampling.max_tokens - generated,
        min_tokens=max(0, sampling.min_tokens - generated),
        seed=seed,
    )
