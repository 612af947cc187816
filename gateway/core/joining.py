"""Which turn a request joins instead of starting another. Pure.

A client that lost its connection sends the same request again (SDKs do so by themselves, marked); its turn may still
run, wait for a reader, or have ended. Two requests with the same body may as well be two samples of one group.

Invariants:
- an idempotency key decides alone: the same key is the same turn, and a key used for something else is refused;
- without a key, a turn whose answer somebody reads or has got is joined only by a marked retry that names its session;
- siblings never merge: without a session, a turn is joined only if nobody reads it, nobody has got its answer, and it
  is the only such one that matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gateway.core.types import SessionId, TurnId
from protos.errors import Conflict

Attention = Literal["read", "unread", "answered", "unknown"]
"""Who has a turn's answer: a client that reads it, nobody, a client that got it whole, or (it ended before the gateway
was started again) nobody knows."""

KEY_MAX = 256
"""Characters of an idempotency key."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as far as joining goes. `session_id` None: it named none. `retried`: its client says so."""

    digest: str
    session_id: SessionId | None
    idempotency_key: str | None = None
    retried: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A turn that may be joined. `session_id` None: it belongs to no session that a client named."""

    turn_id: TurnId
    digest: str
    session_id: SessionId | None
    idempotency_key: str | None
    attention: Attention


def join(call: Call, known: Iterable[Known]) -> TurnId | None:
    """The turn that this request joins; None: it is a new one. Raises Conflict for a key used for something else.

    `known` is in order of beginning; of several that qualify in a session the newest is taken.
    """
    if call.idempotency_key is not None:
        return _by_key(call, call.idempotency_key, known)
    same = [
        k for k in known if k.idempotency_key is None and (k.digest, k.session_id) == (call.digest, call.session_id)
    ]
    if call.session_id is None:
        unread = [k for k in same if k.attention == "unread" or (k.attention == "unknown" and call.retried)]
        return unread[0].turn_id if len(unread) == 1 else None
    if call.retried:
        return same[-1].turn_id if same else None
    unread = [k for k in same if k.attention in ("unread", "unknown")]
    return unread[-1].turn_id if unread else None


def _by_key(call: Call, key: str, known: Iterable[Known]) -> TurnId | None:
    same = [k for k in known if k.idempotency_key == key and k.session_id == call.session_id]
    if not same:
        return None
    if same[-1].digest != call.digest:
        raise Conflict(f"idempotency key {key!r} was used for another request", hint="make a new key for each request")
    return same[-1].turn_id
