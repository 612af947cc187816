"""Roles, API keys, and the lines of a key file. Pure.

Invariants:
- a key is held as its digest alone;
- no error names a word of a line: the word in the wrong place may be the key;
- a key belongs to one role and one name; a role and a name may have any number of keys, so that one is replaced while
  the other is still in use.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from protos.errors import InvalidRequest

Role = Literal["admin", "trainer", "agent", "reader"]
ROLES: tuple[Role, ...] = get_args(Role)
PURPOSE: Mapping[Role, str] = {
    "admin": "operates the gateway: adds and removes engines, repacks; may do whatever the others may",
    "trainer": "reads experience, fills the prompt pool, rewards any session",
    "agent": "rolls out: makes sessions and model calls, leases tasks, ends the sessions that it made",
    "reader": "reads status, metrics and records",
}

KEY_CHARS_MIN, KEY_CHARS_MAX = 16, 512
NEW_KEY_BYTES = 32
"""Of entropy in a key that `new_line` makes."""
KEYS_MAX = 10_000
NAME_HINT = "1 to 64 letters, digits, '.', '_' and '-'"
FORM = "a line is ROLE NAME KEY, and a comment begins with #"
SESSION_KEY_PREFIX, FINISH_KEY_PREFIX = "sk-session-", "sk-finish-"
"""Of the keys that a gateway makes for each session: no key of a file begins so."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(rf"[!-~]{{{KEY_CHARS_MIN},{KEY_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key of a key file. `name`: whom it was given to; the keys of one name count as one owner of sessions."""

    role: Role
    name: str
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one file, by their digests."""

    _by_digest: Mapping[bytes, ApiKey] = field(repr=False)

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, key: str) -> ApiKey | None:
        """One lookup by a digest: how long it takes says nothing of the keys that are there."""
        digest = digest_of(key)
        found = self._by_digest.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def by_role(self) -> Mapping[Role, int]:
        """How many keys each role has; roles without one are left out."""
        counts = Counter(key.role for key in self._by_digest.values())
        return {role: counts[role] for role in ROLES if counts[role]}


def digest_of(key: str) -> bytes:
    """`key` as a header had it: bytes that are no text are in it as surrogates."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_keys(text: str, source: str) -> Keys:
    """The keys of a file's text. Raises InvalidRequest with the number of the first line that is wrong; `source` names
    the file."""
    found: dict[bytes, ApiKey] = {}
    lines: dict[bytes, int] = {}
    for number, words in _lines(text):
        where = f"{source}, line {number}"
        key = _parsed(words, where)
        if key.digest in found:
            raise InvalidRequest(
                f"{where} has the key of line {lines[key.digest]} again", hint="one role and one name for each key"
            )
        found[key.digest], lines[key.digest] = key, number
    if not found:
        raise InvalidRequest(f"{source} has no key", hint="`gateway keys new ROLE NAME` prints a line for it")
    if len(found) > KEYS_MAX:
        raise InvalidRequest(f"{source} has {len(found)} keys", hint=f"{KEYS_MAX} at most")
    return Keys(found)


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines that are more than a comment: their numbers, from 1, and their words."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        comment = next((i for i, word in enumerate(words) if word.startswith("#")), len(words))
        if words[:comment]:
            yield number, words[:comment]


def newest_key(text: str, source: str, role: Role, name: str | None) -> str:
    """The key of a role and a name: of keys that replace each other the last one, since new lines are added at the end.
    Without a name it is that of the role's own name, which a new file has, or of the only name. Raises InvalidRequest
    as `parse_keys` does, where there is none, and where the name is needed."""
    parse_keys(text, source)
    of_role = [(owner, key) for _, (of, owner, key) in _lines(text) if of == role]
    names = list(dict.fromkeys(owner for owner, _ in of_role))
    known = f"it has {', '.join(names)}" if names else f"`gateway keys new {role} NAME >> {source}` adds one"
    if name is None and role in names:
        name = role
    if name is None and len(names) > 1:
        raise InvalidRequest(f"{source} has keys of several names with the role {role}", hint=f"name one: {known}")
    found = [key for owner, key in of_role if name in (None, owner)]
    if not found:
        whose = f"the role {role}" if name is None else f"{name[:80]!r} with the role {role}"
        raise InvalidRequest(f"{source} has no key of {whose}", hint=known)
    return found[-1]


def _parsed(words: list[str], where: str) -> ApiKey:
    if len(words) != 3:
        raise InvalidRequest(f"{where} has {len(words)} words", hint=FORM)
    role, name, key = words
    known = next((one for one in ROLES if one == role), None)
    if known is None:
        raise InvalidRequest(f"{where} begins with no role", hint=f"roles are {', '.join(ROLES)}; {FORM}")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where} has no name in its second place", hint=NAME_HINT)
    if not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"{where} has no key in its third place",
            hint=f"{KEY_CHARS_MIN} to {KEY_CHARS_MAX} characters of ASCII; `gateway keys new ROLE NAME` makes one",
        )
    if key.startswith((SESSION_KEY_PREFIX, FINISH_KEY_PREFIX)):
        raise InvalidRequest(f"{where} has a key that begins as those of sessions do", hint="make another")
    return ApiKey(known, name, digest_of(key))


def new_line(role: Role, name: str) -> str:
    """A line of a key file with a new key. InvalidRequest for what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name[:80]!r} cannot name the holder of a key", hint=NAME_HINT)
    return f"{role} {name} {secrets.token_urlsafe(NEW_KEY_BYTES)}"
