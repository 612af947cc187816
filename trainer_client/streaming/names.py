"""Name maps: from a trainer's names of tensors to those that engines load by.

A map is a function from a name to a name, or pairs (regular expression, replacement), which are applied one after the
other by `re.sub`. A function that returns None, or the replacement None where the expression is found, leaves the
tensor out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from protos.errors import InvalidRequest
from trainer_client.sources import held_together

Names = Callable[[str], str | None] | Sequence[tuple[str, str | None]]


def rename(names: Names, name: str) -> str | None:
    """The name under which a tensor is published; None: it is not."""
    if callable(names):
        found = names(name)
        if found is not None and not isinstance(found, str):
            raise InvalidRequest(
                f"the name map made {found!r} of {name!r}", hint="return a str, or None to leave it out"
            )
        return found
    for pattern, replacement in map(_pair, names):
        try:
            if replacement is None:
                if re.search(pattern, name):
                    return None
            else:
                name = re.sub(pattern, replacement, name)
        except re.error as error:
            raise InvalidRequest(
                f"{pattern!r} -> {replacement!r} is no map of names: {error}", hint="pairs are for re.sub"
            ) from error
    return name


def _pair(pair: Any) -> tuple[str, str | None]:
    if isinstance(pair, tuple | list) and len(pair) == 2:
        return pair[0], pair[1]
    raise InvalidRequest(f"names holds {pair!r}", hint="give a function, or pairs (expression, replacement)")


def renamed(tensors: Any, names: Names | None) -> Any:
    """A state dict or pairs with every name mapped; what is no pair is left to whoever reads them. What is made
    while it is iterated over is not taken here."""
    if names is None or not isinstance(tensors, Iterable):
        return tensors
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    found = (new for pair in pairs if (new := _renamed(pair, names)) is not None)
    return list(found) if held_together(tensors) else found


def _renamed(pair: Any, names: Names) -> Any:
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        return pair
    name = rename(names, pair[0])
    return None if name is None else (name, pair[1])
