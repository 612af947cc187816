"""Which turn a request joins instead of starting another. Pure.

A client that lost its connection sends the same request again (SDKs do so by themselves, marked); its turn may still
run, wait for a reader, or have ended. Two requests with the same body may as well be two samples of one group: joined
by mistake, the group would have one sample twice.

Invariants:
- an idempotency key decides alone: the same key is the same turn, and a key used for something else is refused;
- siblings never merge: no two requests that may both be alive get one turn. Where it is not certain whose a turn is, a
  request gets a turn of its own;
- without a key, a turn whose answer is read, or was received, is joined only by a marked retry that names its session,
  if it is the only turn that may be its own: only earlier attempts requested it, and no other request of the same body
  was refused without a turn, or had one that is forgotten;
- without a session, a turn is joined only if no client reads it or has received its answer, and it is the only such
  one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.core.types import SessionId, TurnId
from protos.errors import Conflict

Attention = Literal["read", "unread", "answered", "unknown"]
"""Who has a turn's answer: a client that reads it, no client, a client that received it whole, or (the turn ended
before a restart of the gateway) not known."""

KEY_MAX = 256
"""Characters of an idempotency key."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request, as far as joining depends on it. `session_id` None: it names none. `retried`: its client marked it as
    a retry; `attempt`, if above 0, is the number of the retry."""

    digest: str
    session_id: SessionId | None
    idempotency_key: str | None = None
    retried: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """A turn that may be joined. `session_id` None: it belongs to no session that a client named."""

    turn_id: TurnId
    digest: str
    session_id: SessionId | None
    idempotency_key: str | None
    attention: Attention
    attempt: float = 0  # the highest that requested it; infinite where one had no number


UNMARKED = math.inf
"""The attempt of a request that joined a turn and is not a marked retry: it may be any client's."""


def attempt_of(call: Call) -> float:
    """Which attempt joins with this call."""
    return call.attempt if call.retried and call.attempt else UNMARKED


def choice_id(first: TurnId, choice: int) -> TurnId:
    """The turn of another choice of the same request."""
    return TurnId(f"{first}-{choice}") if choice else first


def attention_of(choices: Sequence[Attention]) -> Attention:
    """The attention of all choices of a request together."""
    order: Sequence[Attention] = ("read", "unread", "unknown", "answered")
    return next(attention for attention in order if attention in choices)


def join(call: Call, known: Iterable[Known], *, others: bool = False) -> TurnId | None:
    """The turn that this request joins; None: it is a new one. Raises Conflict for a key used for something else.

    `known` is in order of beginning; of several unread turns of a session the newest is taken. `others`: there were
    more such requests than `known` turns: one was refused before it had a turn, or its turn is forgotten.
    """
    if call.idempotency_key is not None:
        return _by_key(call, call.idempotency_key, known)
    same = [
        k for k in known if k.idempotency_key is None and (k.digest, k.session_id) == (call.digest, call.session_id)
    ]
    if call.session_id is None:
        unread = [k for k in same if k.attention == "unread" or (k.attention == "unknown" and call.retried)]
        return unread[0].turn_id if len(unread) == 1 else None
    unread = [k for k in same if k.attention in ("unread", "unknown")]
    if unread:
        return unread[-1].turn_id
    own = [k for k in same if not call.attempt or k.attempt < call.attempt]
    return own[0].turn_id if call.retried and not others and len(own) == 1 and len(same) == 1 else None


def _by_key(call: Call, key: str, known: Iterable[Known]) -> TurnId | None:
    same = [k for k in known if k.idempotency_key == key and k.session_id == call.session_id]
    if not same:
        return None
    if same[-1].digest != call.digest:
        raise Conflict(f"idempotency key {key!r} was used for another request", hint="make a new key for each request")
    return same[-1].turn_id
