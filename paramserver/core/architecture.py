"""How the tensors of a version differ from those of the version before: names, shapes and dtypes.

Engines load by name into the shapes that they were started with, so other names or shapes are another architecture,
which they refuse. Float dtypes they convert, so another one is worth a warning.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protos.errors import Corrupt

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
TIED = "tied:"
"""Before the name of a tensor in the metadata: its value is the name that carries it."""
SHOWN = 3
NAME_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Architecture:
    """`tensors`: name to dtype and shape; `tied`: name to the name that carries it."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Differences:
    """In words, by name. `changes` make it another architecture, `conversions` are float dtypes alone.

    `of_ties`: the changes are of ties alone: a name that was tied has bytes of its own, or the other way round.
    """

    changes: tuple[str, ...] = ()
    conversions: tuple[str, ...] = ()
    of_ties: bool = False


def read_heads(heads: Iterable[bytes]) -> Architecture:
    """From the headers of a version's safetensors files, each with its length before it."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    tied: dict[str, str] = {}
    for head in heads:
        try:
            (length,) = struct.unpack_from("<Q", head)
            entries = json.loads(head[8 : 8 + length])
            metadata = entries.pop("__metadata__", {})
            tensors |= {name: (one["dtype"], tuple(one["shape"])) for name, one in entries.items()}
            tied |= {key.removeprefix(TIED): of for key, of in metadata.items() if key.startswith(TIED)}
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise Corrupt(f"a safetensors header cannot be read: {error!r}") from error
    return Architecture(tensors, tied)


def compare(before: Architecture, after: Architecture) -> Differences:
    """The differences of `after`, in the order of names."""
    changes, conversions, num_ties = [], [], 0
    for name in sorted(before.tensors.keys() | after.tensors.keys()):
        old, new = before.tensors.get(name), after.tensors.get(name)
        if old == new:
            continue
        if old is None:
            was = before.tied.get(name)
            num_ties += was is not None
            changes.append(f"{_named(name)} is new" if was is None else f"{_named(name)} was tied to {_named(was)}")
        elif new is None:
            to = after.tied.get(name)
            num_ties += to is not None
            changes.append(
                f"{_named(name)} is missing" if to is None else f"{_named(name)} is tied to {_named(to)} now"
            )
        elif old[1] != new[1]:
            changes.append(f"{_named(name)} has the shape {list(new[1])}, before {list(old[1])}")
        elif {old[0], new[0]} <= FLOATS:
            conversions.append(f"{_named(name)} is {new[0]}, before {old[0]}")
        else:
            changes.append(f"{_named(name)} is {new[0]}, before {old[0]}")
    return Differences(tuple(changes), tuple(conversions), 0 < num_ties == len(changes))


def some(differences: tuple[str, ...]) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return "; ".join(differences[:SHOWN]) + more


def _named(name: str) -> str:
    return repr(name if len(name) <= NAME_SHOWN else name[:NAME_SHOWN] + "...")
