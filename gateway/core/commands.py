"""What a command did: commands are data, and what carries them out returns one of these. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Effect:
    """`answer`: of the operation. `counted`: what it adds to the counters, by their names. `notable`: those that wait
    for a change have to look again. `unnamed`: bodies that the command has ended the name of."""

    answer: Any
    counted: Mapping[str, int] = field(default_factory=dict)
    notable: bool = False
    unnamed: Sequence[str] = ()
