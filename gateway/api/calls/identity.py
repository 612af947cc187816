"""The identity of a request: its session, and the digest or key that identifies its retries.

The first place that names a session wins: URL, per-session API key, header, body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gateway.api.access import API_KEY_HEADER, api_keys
from gateway.api.errors import BadField
from gateway.core.retries import KEY_MAX, Call
from gateway.core.sessions import names_a_session
from gateway.core.types import SessionId
from gateway.ports import SESSION_KEY_PREFIX, SessionIdentity, Turns
from protos.access.roles import FINISH_KEY_PREFIX
from protos.errors import Forbidden, NotFound

SESSION_HEADERS = (
    "X-Session-ID",
    "X-SMG-Routing-Key",
    "X-Dynamo-Session-ID",
    "X-Claude-Code-Session-Id",
    "Session-Id",
    "Thread-Id",
)
SESSION_ID_MAX = 256
KEY_HEADER = "Idempotency-Key"
RETRY_HEADER = "X-Stainless-Retry-Count"
"""The official SDKs count their own retries in it, from 0."""


def identify(
    request: web.Request, turns: Turns, *, metadata: Mapping[str, Any] | None, session_id: str | None, user: str | None
) -> SessionIdentity:
    """The session that a request names. `metadata`, `session_id` and `user`: the body's fields; None to ignore one."""
    if (sid := request.match_info.get("sid")) is not None:
        return SessionIdentity(_checked(sid, "session id in the URL"), "url")
    for key in api_keys(request):
        if (of_key := _session_of(key, turns)) is not None:
            return SessionIdentity(of_key, "api_key")
    for header in SESSION_HEADERS:
        if (value := request.headers.get(header)) is not None:
            return SessionIdentity(_checked(value, header), "header")
    named = (metadata or {}).get("session_id")
    for value, field in ((named, "metadata.session_id"), (session_id, "session_id")):
        if value is not None:
            return SessionIdentity(_checked(value, field), "body")
    return SessionIdentity(_of_user(user), "body") if user else SessionIdentity(None, "none")


def _of_user(user: str) -> SessionId:
    """OpenAI allows any text as `user`: the name of its session is made of its digest where it cannot be one itself."""
    if names_a_session(user):
        return SessionId(user)
    return SessionId(f"user-{hashlib.blake2b(user.encode(), digest_size=12).hexdigest()}")


def _session_of(key: str, turns: Turns) -> SessionId | None:
    """None for a key that is not the gateway's. Raises NotFound for a session's key that is no longer valid: the call
    would not be recorded in the session that its client means."""
    if key.startswith(FINISH_KEY_PREFIX):
        raise Forbidden(
            "this is a finish key: it finishes, rewards and abandons its session",
            hint="the session's calls are made with its `api_key`",
        )
    found = turns.session_of_key(key)
    if found is None and key.startswith(SESSION_KEY_PREFIX):
        raise NotFound(
            "no live session has this API key: it has ended, or the gateway was restarted without --data",
            hint="make a session with POST /sessions",
        )
    return found


ATTEMPT_DIGITS_MAX = 6
"""Of the number of an attempt: no client retries more often."""


def call_of(request: web.Request, raw: bytes, session_id: SessionId | None) -> Call:
    """`raw` is the body: a retry repeats it byte for byte, for the same route and with the same credentials."""
    route = request.path.rpartition("/v1/")[2]
    keys = [request.headers.get("Authorization", ""), *request.headers.getall(API_KEY_HEADER, ())]
    head = "".join(f"{line}\n" for line in (route, *keys)).encode()
    key = request.headers.get(KEY_HEADER)
    if key is not None and (not 1 <= len(key) <= KEY_MAX or not key.isprintable()):
        raise BadField(KEY_HEADER, f"{KEY_HEADER} is not a key: {key!r:.80}", hint=f"1 to {KEY_MAX} characters")
    count = request.headers.get(RETRY_HEADER, "0")
    return Call(
        hashlib.blake2b(head + raw, digest_size=16).hexdigest(),
        session_id,
        key,
        retried=count != "0",
        attempt=int(count) if count.isascii() and count.isdigit() and len(count) <= ATTEMPT_DIGITS_MAX else 0,
    )


def _checked(value: Any, where: str) -> SessionId:
    if not isinstance(value, str) or not 1 <= len(value) <= SESSION_ID_MAX or not value.isprintable():
        raise BadField(where, f"{where} is not a session id: {value!r:.80}", hint=f"1 to {SESSION_ID_MAX} characters")
    return SessionId(value)
