"""Groups over HTTP: made whole, looked at, abandoned."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.api.answers import answer_json
from gateway.api.numbers import Count
from gateway.api.openai_requests import decode, in_range
from gateway.api.sessions import AbandonRequest, CreateRequest, session_spec
from gateway.core.groups import GroupPhase
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


class Member(msgspec.Struct):
    """A live session of the group."""

    session_id: str
    sample_index: int
    base_url: str
    api_key: str


class GroupAnswer(msgspec.Struct, kw_only=True):
    """`finished`: sessions that have. `mixed`: under more than one version."""

    group_id: str
    state: GroupPhase
    size: int
    group_min: int
    resampled: int
    finished: Sequence[str]
    versions: Sequence[int]
    mixed: bool
    sessions: Sequence[Member]


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
        return answer_json(_told(request, group))

    async def show(self, request: web.Request) -> web.Response:
        return answer_json(_told(request, self._groups.get(_group_id(request))))

    async def abandon(self, request: web.Request) -> web.Response:
        body = await request.read()
        wanted = decode(_abandon, body) if body else AbandonRequest()
        await self._groups.abandon(_group_id(request), wanted.reason)
        return answer_json(_told(request, self._groups.get(_group_id(request))))


def _group_id(request: web.Request) -> GroupId:
    return GroupId(request.match_info["gid"])


def _told(request: web.Request, group: Group) -> GroupAnswer:
    state, base = group.state, f"{request.scheme}://{request.host}"
    return GroupAnswer(
        group_id=state.group_id,
        state=state.phase,
        size=state.size,
        group_min=state.group_min,
        resampled=state.resampled,
        finished=state.finished,
        versions=state.versions,
        mixed=state.mixed,
        sessions=[
            Member(name, index, f"{base}/sessions/{name}/v1", group.keys[name])
            for name, index in sorted(state.live.items(), key=lambda item: item[1])
        ],
    )
