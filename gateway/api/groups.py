"""The routes of groups: create, show, abandon."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.api.access import caller_of
from gateway.api.bodies import Count, answer_json, in_range, read
from gateway.api.errors import BadField
from gateway.api.sessions import AbandonRequest, CreateRequest, GroupName, base_url, session_spec
from gateway.core.access import owner_of
from gateway.core.groups import GroupPhase
from gateway.core.types import GroupId, SessionId
from gateway.sessions.group_service import GroupService
from gateway.sessions.registry import SessionRegistry
from gateway.store.groups import Group
from protos.engines import URL_NAME, URL_NAME_HINT

GROUP_SIZE_MAX = 4096


EVERY_MEMBER = CreateRequest()


class CreateGroupRequest(msgspec.Struct, forbid_unknown_fields=True):
    group_size: Annotated[
        Annotated[int, Meta(ge=1, le=GROUP_SIZE_MAX)] | None,
        Meta(description="How many sessions the group has. Required, here or as `size`."),
    ] = None
    size: Annotated[
        Annotated[int, Meta(ge=1, le=GROUP_SIZE_MAX)] | None,
        Meta(description="The older name of `group_size`, which it must equal."),
    ] = None
    group_id: Annotated[GroupName | None, Meta(description="Its name. Default: the gateway makes one.")] = None
    group_min: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Finished sessions that the group needs: with fewer it is given up. Default: all."),
    ] = None
    resample_max: Annotated[Count, Meta(description="Failed sessions of the group that are sampled again.")] = 0
    session: Annotated[CreateRequest, Meta(description="The fields of every session, as in `POST /sessions`.")] = (
        EVERY_MEMBER
    )


class Member(msgspec.Struct):
    """A live session of the group."""

    session_id: str
    sample_index: int
    base_url: str
    api_key: str
    finish_key: str


class GroupAnswer(msgspec.Struct, kw_only=True):
    """`finished`: sessions that have finished. `mixed`: they were sampled under more than one version."""

    group_id: str
    state: GroupPhase
    group_size: int
    size: int  # the same, by its older name
    group_min: int
    resampled: int
    finished: Sequence[str]
    versions: Sequence[int]
    mixed: bool
    sessions: Sequence[Member]


_create = msgspec.json.Decoder(CreateGroupRequest)
_abandon = msgspec.json.Decoder(AbandonRequest)


def add_group_routes(app: web.Application, groups: GroupService, live: SessionRegistry, public_url: str | None) -> None:
    handlers = _Handlers(groups, live, public_url)
    app.router.add_post("/groups", handlers.create)
    app.router.add_get("/groups/{gid}", handlers.show)
    app.router.add_post("/groups/{gid}/abandon", handlers.abandon)


class _Handlers:
    def __init__(self, groups: GroupService, live: SessionRegistry, public_url: str | None) -> None:
        self._groups, self._live, self._public_url = groups, live, public_url

    async def create(self, request: web.Request) -> web.Response:
        wanted = await read(request, _create)
        size = _size(wanted)
        _check_members(wanted.session)
        in_range("group_min", wanted.group_min, 1, size)
        if wanted.group_id is not None and not re.fullmatch(URL_NAME, wanted.group_id):
            raise BadField("group_id", f"{wanted.group_id!r} is no name of a group", hint=URL_NAME_HINT)
        name = GroupId(wanted.group_id or f"g-{secrets.token_hex(8)}")
        caller = caller_of(request)
        member = session_spec(wanted.session, SessionId(""), owner=owner_of(caller))
        spec = dataclasses.replace(member, group_id=name, group_size=size)
        self._live.check_rights(spec, caller)
        least = size if wanted.group_min is None else wanted.group_min
        async with self._live.reserved_group(name):
            group = await self._groups.create(spec, group_min=least, resample_max=wanted.resample_max)
        return answer_json(self._answer(request, group))

    async def show(self, request: web.Request) -> web.Response:
        return answer_json(self._answer(request, self._groups.get(_group_id(request))))

    async def abandon(self, request: web.Request) -> web.Response:
        wanted = await read(request, _abandon, default=AbandonRequest)
        await self._groups.abandon(_group_id(request), wanted.reason)
        return answer_json(self._answer(request, self._groups.get(_group_id(request))))

    def _answer(self, request: web.Request, group: Group) -> GroupAnswer:
        state = group.state
        return GroupAnswer(
            group_id=state.group_id,
            state=state.phase,
            group_size=state.size,
            size=state.size,
            group_min=state.group_min,
            resampled=state.resampled,
            finished=state.finished,
            versions=state.versions,
            mixed=state.mixed,
            sessions=[
                self._member(request, name, index, group.keys[name])
                for name, index in sorted(state.live.items(), key=lambda item: item[1])
            ],
        )

    def _member(self, request: web.Request, name: SessionId, index: int, key: str) -> Member:
        url = base_url(request, name, self._public_url)
        return Member(name, index, url, key, self._live.finish_key(name))


def _size(wanted: CreateGroupRequest) -> int:
    size = wanted.size if wanted.group_size is None else wanted.group_size
    if size is None:
        raise BadField("group_size", "`group_size` is missing", hint="how many sessions the group has, such as 8")
    if wanted.size not in (None, size):
        raise BadField("size", f"`size` is {wanted.size} and `group_size` {size}", hint="leave `size` out")
    return size


def _check_members(session: CreateRequest) -> None:
    """Refuses fields that differ between members, or belong to the group."""
    for field in ("session_id", "group_id", "sample_index", "group_size"):
        if getattr(session, field) != getattr(EVERY_MEMBER, field):
            raise BadField(
                f"session.{field}",
                f"`session` has the fields of every member, and cannot have `{field}`",
                hint="`group_id` and `group_size` stand beside `session`; members get their ids and indexes",
            )


def _group_id(request: web.Request) -> GroupId:
    return GroupId(request.match_info["gid"])
