"""Access control: the middleware that lets a request pass by its API key and its route's operation.

Invariants:
- a route without a row in the table of routes is refused, whatever the key;
- a request is let through to its handler only after its caller, and the session or group that its URL names, were
  checked. Both stay what they were while the body comes: names are used once, and what is not known yet is refused
  to whoever may reach only what is theirs;
- the session that a body or a header names is checked where it is found (`Calls.identify`), and once more where the
  call enters it (`SessionRegistry.named_by`);
- keys are in no log and no message.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from gateway.api.errors import Handler
from gateway.api.http_server import let_in
from gateway.core.access import CALL, END, Caller, FinishKey, Operation, SessionKey, Target, require
from gateway.core.types import GroupId, SessionId
from gateway.sessions.group_service import GroupService
from gateway.sessions.registry import SessionRegistry
from protos.access.key_file import REFRESH_S, KeyFile
from protos.access.roles import FINISH_KEY_PREFIX, SESSION_KEY_PREFIX, ApiKey
from protos.errors import Forbidden, Unauthenticated

API_KEY_HEADER = "X-Api-Key"
_NAME = "laminar.caller"
CALLER: Any = web.RequestKey(_NAME, object) if hasattr(web, "RequestKey") else _NAME  # keys of requests came with 3.14
"""Of a request: who sent it, once that is known."""
Operations = Mapping[tuple[str, str], Operation]
"""By method and path, as the table of routes has them."""
HINT = "send `Authorization: Bearer KEY`, or `X-Api-Key`, with a key of the gateway's key file or of a live session"


def api_keys(request: web.Request) -> list[str]:
    """The API keys of a request, where OpenAI's clients send theirs and where Anthropic's do."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    bearer = [key.strip()] if scheme.lower() == "bearer" else []
    return [*bearer, *([request.headers[API_KEY_HEADER].strip()] if API_KEY_HEADER in request.headers else ())]


def caller_of(request: web.Request) -> Caller | None:
    """Who sent the request; None while access control is off."""
    found: Caller | None = request.get(CALLER)
    return found


class Access:
    """Who sent a request, and whose is what it names."""

    def __init__(
        self, keys: KeyFile, live: SessionRegistry, groups: GroupService, *, agents_may_reward: bool = False
    ) -> None:
        self._keys, self._live, self._groups = keys, live, groups
        self._agents_may_reward = agents_may_reward

    async def follow(self) -> None:
        """Reads the key file again whenever it changes; until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await asyncio.to_thread(self._keys.refresh)

    def control(self, operations: Operations) -> Middleware:
        @web.middleware
        async def controlled(request: web.Request, handler: Handler) -> web.StreamResponse:
            operation = _operation(request, operations)
            if operation is None or not operation.public:
                request[CALLER] = self._let_in(request, operation)
                let_in(request)
            return await handler(request)

        return controlled

    def _let_in(self, request: web.Request, operation: Operation | None) -> Caller:
        """The request's caller. Raises Unauthenticated or Forbidden; NotFound for a session or group that is not there,
        where the caller may reach only some."""
        session_id = _session_id(request, operation)
        caller = self._caller(request, session_id)
        if operation is None:
            if request.match_info.http_exception is not None:  # there is no such route, which its handler says
                return caller
            raise Forbidden(f"no rule allows {request.method} {request.path}")
        require(operation, caller, agents_may_reward=self._agents_may_reward)
        target = self._target(request, operation, caller, session_id)
        require(operation, caller, target, agents_may_reward=self._agents_may_reward)
        return caller

    def _caller(self, request: web.Request, session_id: SessionId | None) -> Caller:
        given = list(filter(None, api_keys(request)))
        for key in given:
            if (known := self._keys.find(key)) is not None:
                return known
        for key in given:
            if (of_key := self._live.of_key(key)) is not None:
                return SessionKey(of_key)
            if session_id is not None and key.startswith(FINISH_KEY_PREFIX):
                right = self._live.finish_key(session_id).encode()
                if hmac.compare_digest(key.encode(errors="surrogateescape"), right):
                    return FinishKey(session_id)
        raise Unauthenticated(_unknown(given), hint=HINT)

    def _target(
        self, request: web.Request, operation: Operation, caller: Caller, session_id: SessionId | None
    ) -> Target | None:
        """What the URL names, where the caller's right depends on it."""
        if not isinstance(caller, ApiKey):
            return None if session_id is None else Target(session_id)
        if caller.role in operation.roles:
            return None
        if (group_id := request.match_info.get("gid")) is not None:
            return Target(None, self._groups.get(GroupId(group_id)).spec.owner)
        if session_id is None:
            return None
        owner = self._live.owner(session_id)
        if owner is None:
            if operation is not CALL:  # a call makes the session
                self._live.get(session_id)  # raises
            return None
        return Target(session_id, owner)


def _operation(request: web.Request, operations: Operations) -> Operation | None:
    resource = request.match_info.route.resource
    if resource is None:
        return None
    method = hdrs.METH_GET if request.method == hdrs.METH_HEAD else request.method
    return operations.get((method, resource.canonical))


def _session_id(request: web.Request, operation: Operation | None) -> SessionId | None:
    """The session that the URL names: in its path, or as the query of `/finish_session`."""
    name = request.match_info.get("sid")
    if name is None and operation is END:
        name = request.query.get("session_id")
    return None if name is None else SessionId(name)


def _unknown(given: list[str]) -> str:
    if not given:
        return "the request has no API key"
    if any(key.startswith(SESSION_KEY_PREFIX) for key in given):
        return "no live session has this API key: it has ended, or the gateway was restarted without --data"
    if any(key.startswith(FINISH_KEY_PREFIX) for key in given):
        return (
            "this is a finish key, and not that of a session which the URL names: it finishes, rewards and abandons "
            "its own session, whose calls are made with its api_key"
        )
    return "the API key is not known here"
