"""The cases of a fuzzer: those kept in `corpus/`, and mutations of them by a seed.

`LAMINAR_FUZZ_EXAMPLES` bounds their number, `LAMINAR_FUZZ_SEED` chooses them: the same seed gives the same cases.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = int(os.environ.get("LAMINAR_FUZZ_EXAMPLES", "15"))
SEED = int(os.environ.get("LAMINAR_FUZZ_SEED", "1"))
BYTES_MAX = 1 << 16
"""Of a mutated case; what is larger is a case of its own."""

ODD_BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\x80\0\0\0",
    b"\n",
    b"\r\n",
    b'"',
    b"{}",
    b"[" * 200,
)
ODD_NAMES = ("", "/", "..", "../..", "a/b", "a\nb", "a\0b", "\ud800", "\u202e", "%2e%2e", "x" * 300, "é", " ", "-", "0")
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 1e308, -0.5, 1e-308),
    *ODD_NAMES,
    *([], {}, [[]], [None], {"": ""}, [[[[]]]], "x" * 5000),
)


@dataclass(frozen=True, slots=True)
class Case:
    """`of`: what `data` is for, such as a key of the registry, or a method of a service."""

    name: str
    of: str
    data: bytes

    def __str__(self) -> str:
        shown = self.data[:400].hex()
        return f'{{"name": "{self.name}", "of": {json.dumps(self.of)}, "hex": "{shown}"}}'


def kept(kind: str) -> list[Case]:
    found = json.loads((CORPUS / f"{kind}.json").read_text())
    return [Case(row["name"], row.get("of", ""), _data(row)) for row in found]


def _data(row: dict[str, Any]) -> bytes:
    if "hex" in row:
        return bytes.fromhex(row["hex"])
    if "json" in row:
        return json.dumps(row["json"]).encode()
    return str(row["text"]).encode("utf-8", "surrogatepass")


def cases(kind: str, count: int) -> Iterator[Case]:
    """All that are kept, then `count` mutations."""
    seeds = kept(kind)
    yield from seeds
    chance = random.Random(f"{kind} {SEED}")
    for number in range(count):
        yield mutated(chance, chance.choice(seeds), f"{kind}-{SEED}-{number}")


def mutated(chance: random.Random, case: Case, name: str) -> Case:
    """One to four changes: of the text's structure where it is JSON, else of its bytes; sometimes of what it is for."""
    for _ in range(chance.randint(1, 4)):
        if case.of and chance.random() < 0.2:
            case = replace(case, of=_changed_name(chance, case.of))
        else:
            case = replace(case, data=_changed_json(chance, case.data) or _changed_bytes(chance, case.data))
    return replace(case, name=name)


def _changed_name(chance: random.Random, name: str) -> str:
    parts = name.split("/")
    at = chance.randrange(len(parts))
    match chance.randrange(3):
        case 0:
            parts[at] = chance.choice(ODD_NAMES)
        case 1:
            parts.insert(at, chance.choice(ODD_NAMES))
        case _:
            del parts[at]
    return "/".join(parts)


def _changed_json(chance: random.Random, data: bytes) -> bytes | None:
    """None for what is no JSON, and one time in three."""
    if chance.random() < 0.34:
        return None
    try:
        whole = json.loads(data)
    except ValueError:  # of which UnicodeDecodeError is one
        return None
    if not isinstance(whole, dict | list) or not whole:
        return None
    places = list(_places(whole))
    within, at = chance.choice(places)
    if isinstance(within, dict) and chance.random() < 0.2:
        del within[at]
    elif isinstance(within, list) and chance.random() < 0.3:
        within.extend(within[:1] * chance.choice((1, 3, 300)))
    else:
        within[at] = chance.choice(ODD_VALUES)
    return json.dumps(whole).encode()[:BYTES_MAX]


def _places(within: Any) -> Iterator[tuple[Any, Any]]:
    for at in list(within) if isinstance(within, dict) else range(len(within)):
        yield within, at
        if isinstance(within[at], dict | list):
            yield from _places(within[at])


def _changed_bytes(chance: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    at = chance.randrange(len(found) + 1)
    match chance.randrange(6):
        case 0 if found:
            found[min(at, len(found) - 1)] ^= 1 << chance.randrange(8)
        case 1:
            found[at:at] = chance.choice(ODD_BYTES)
        case 2:
            del found[at:]
        case 3:
            del found[at : at + chance.randint(1, 8)]
        case 4:
            found[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x01", b"\0\0\0\0"))
        case _:
            found[at:at] = found[: chance.randint(1, 64)]
    return bytes(found[:BYTES_MAX])
