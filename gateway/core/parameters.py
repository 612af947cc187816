"""The numeric sampling parameters, a row each: bounds, defaults, and their effect on the distribution. Pure.

Requests are checked, schemas served, engines' requests written and segments recorded from this table. A new row needs a
field of the same name in `SamplingFields`, `core.types.SamplingParams` and `protos.trajectories.SampledWith`; kinds of
engines that do not take it, or one of `OTHERS`, name it in `lacks` (`protos.engines`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec

from gateway.core.types import SamplingParams


class SamplingFields(msgspec.Struct, kw_only=True):
    """The parameters in the body of a request; None where the body has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. `plain`: its values that leave the model's own distribution as it is, or are greedy; the first
    one is the default."""

    name: str
    plain: tuple[float, ...]
    low: float
    high: float
    low_excluded: bool = False
    off: float | None = None  # another way in which requests write the default
    truncates: bool = False  # some tokens are never drawn

    @property
    def default(self) -> float:
        return self.plain[0]

    def fits(self, value: float) -> bool:
        """Whether the value is in range; NaN is not."""
        return (self.low < value if self.low_excluded else self.low <= value) and value <= self.high

    @property
    def range(self) -> str:
        """As text, for the error of a request with another value."""
        if self.low_excluded:
            return f"above {self.low:g}, at most {self.high:g}"
        return f"{self.low} to {self.high}"


PARAMETERS = (
    Parameter("temperature", (1.0, 0.0), 0.0, 2.0),
    Parameter("top_p", (1.0,), 0.0, 1.0, low_excluded=True, truncates=True),
    Parameter("top_k", (0,), -1, 1 << 30, off=-1, truncates=True),
    Parameter("min_p", (0.0,), 0.0, 1.0, truncates=True),
    Parameter("presence_penalty", (0.0,), -2.0, 2.0),
    Parameter("frequency_penalty", (0.0,), -2.0, 2.0),
    Parameter("repetition_penalty", (1.0,), 0.0, 2.0, low_excluded=True),
)
ALWAYS_SENT = frozenset({"temperature", "top_p"})
"""Engines have defaults of their own for these, from the model's generation config."""


OTHERS = ("min_tokens", "seed", "stop_token_ids", "ignore_eos", "top_logprobs", "logit_bias")
"""Fields of `SamplingParams` beside the table that adapters write out, and that a kind of engine may lack as well."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams) if field.name in OTHERS}


def distorting(sampling: SamplingParams) -> list[str]:
    """Names of the parameters by which tokens are drawn from another distribution than the model's own."""
    return [p.name for p in PARAMETERS if getattr(sampling, p.name) not in p.plain]


def truncating(sampling: SamplingParams) -> list[str]:
    """Names of the parameters by which some tokens are never drawn. None in a greedy answer: they do not change it."""
    if sampling.temperature == 0.0:
        return []
    return [p.name for p in PARAMETERS if p.truncates and getattr(sampling, p.name) != p.default]


def sent(sampling: SamplingParams) -> dict[str, object]:
    """What an engine's request has of them: what is not at its default, and what engines have other defaults for."""
    values = ((p, getattr(sampling, p.name)) for p in PARAMETERS)
    return {p.name: value for p, value in values if p.name in ALWAYS_SENT or value != p.default}


def required(sampling: SamplingParams) -> list[str]:
    """Names of all parameters that an engine has to take for it (`EngineKind.lacks`)."""
    return [*sent(sampling), *(name for name, default in _DEFAULTS.items() if getattr(sampling, name) != default)]
