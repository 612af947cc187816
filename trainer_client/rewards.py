"""Rewards and metrics as numbers: what an agent, an environment or a curriculum gives becomes a finite float here.

A bool, a scalar of numpy or a tensor with one element is a number as well; NaN and the infinities are none, since JSON
does not have them and no trainer can average them.
"""

from __future__ import annotations

import math
from typing import SupportsFloat

from protos.errors import InvalidRequest

WANTED = "a finite number is needed: an int, a float, a bool or a scalar of an array"
SHOWN_MAX = 80
"""Characters of a value that is refused."""


class NoNumber(InvalidRequest):
    """A reward, a metric or a priority that is no finite number; the message names who gave it."""


def number(value: object, what: str, giver: str, *, hint: str = WANTED) -> float:
    """`value` as a float. NoNumber if it is none, or not finite: `giver` gave it as `what`."""
    if isinstance(value, SupportsFloat):
        try:
            found = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # an array or a tensor of several, a huge int
            found = math.nan
        if math.isfinite(found):
            return found
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN_MAX else f"{shown[:SHOWN_MAX]}..."
    raise NoNumber(f"{giver} gave {shown} as {what}", hint=hint)


def name_of(giver: object) -> str:
    """How messages name a function of the user's."""
    name = getattr(giver, "__qualname__", type(giver).__qualname__)
    return f"{getattr(giver, '__module__', type(giver).__module__)}.{name}"
