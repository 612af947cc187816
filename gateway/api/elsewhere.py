"""Calls of sessions and groups that another gateway has: they are answered 421, with that gateway's address."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.api.errors import Handler
from gateway.log.gateways import SharedGateways, of_group
from gateway.sessions.group_service import UnknownGroup
from gateway.sessions.registry import UnknownSession
from protos.errors import Unauthenticated


def elsewhere(gateways: SharedGateways) -> Middleware:
    """A session, or a group, that is not known here may be at a gateway over the same store, and so may its key."""

    @web.middleware
    async def redirected(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except UnknownSession as error:
            await gateways.find(error.session_id)
            raise
        except UnknownGroup as error:
            await gateways.find(of_group(error.group_id))
            raise
        except Unauthenticated:
            if (name := request.match_info.get("sid")) is not None:
                gateways.check(name)  # no call of the store for whoever has no key
            raise

    return redirected
