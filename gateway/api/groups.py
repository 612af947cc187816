"""Groups over HTTP: made whole, looked at, abandoned."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.api.numbers import Count
from gateway.api.openai_requests import decode, in_range
from gateway.api.sessions import AbandonRequest, CreateRequest, session_spec
from gateway.core.types import GroupId
from gateway.data.groups import Group
from gateway.groups import Groups

GROUP_SIZE_MAX = 4096


class CreateGroupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`session` says what every member is, as `POST /sessions` takes it."""

    size: Annotated[int, Meta(ge=1, le=GROUP_SIZE_MAX)]
    group_id: str | None = None
    group_min: Annotated[int, Meta(ge=1)] | None = None  # None: all of them
    resample_max: Count = 0  # members that fail are sampled again, so often altogether
    session: CreateRequest = CreateRequest()


_create = msgspec.json.Decoder(CreateGroupRequest)
_abandon = msgspec.json.Decoder(AbandonRequest)


def add_group_routes(app: web.Application, groups: Groups) -> None:
    handlers = _Handlers(groups)
    app.router.add_post("/groups", handlers.create)
    app.router.add_get("/groups/{gid}", handlers.show)
    app.router.add_post("/groups/{gid}/abandon", handlers.abandon)


class _Handlers:
    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    async def create(self, request: web.Request) -> web.Response:
        wanted = decode(_create, await request.read())
        in_range("group_min", wanted.group_min, 1, wanted.size)
        name = GroupId(wanted.group_id or f"g-{secrets.token_hex(8)}")
        spec = dataclasses.replace(session_spec(wanted.session), group_id=name, group_size=wanted.size)
        least = wanted.size if wanted.group_min is None else wanted.group_min
        group = await self._groups.create(spec, group_min=least, resample_max=wanted.resample_max)
        return web.json_response(_body(request, group))

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(_body(request, self._groups.get(_group_id(request))))

    async def abandon(self, request: web.Request) -> web.Response:
        body = await request.read()
        wanted = decode(_abandon, body) if body else AbandonRequest()
        await self._groups.abandon(_group_id(request), wanted.reason)
        return web.json_response(_body(request, self._groups.get(_group_id(request))))


def _group_id(request: web.Request) -> GroupId:
    return GroupId(request.match_info["gid"])


def _body(request: web.Request, group: Group) -> dict[str, Any]:
    state, base = group.state, f"{request.scheme}://{request.host}"
    return {
        "group_id": state.group_id,
        "state": state.phase,
        "size": state.size,
        "group_min": state.group_min,
        "resampled": state.resampled,
        "finished": list(state.finished),
        "versions": state.versions,
        "mixed": state.mixed,
        "sessions": [
            {
                "session_id": name,
                "sample_index": index,
                "base_url": f"{base}/sessions/{name}/v1",
                "api_key": group.keys[name],
            }
            for name, index in sorted(state.live.items(), key=lambda item: item[1])
        ],
    }
