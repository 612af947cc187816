"""The routes of sessions: create, show, finish with a reward, reward, abandon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.api.access import caller_of
from gateway.api.bodies import EXACT_MAX, AtLeastOne, Count, answer_json, in_range, read
from gateway.api.errors import BadField
from gateway.core.access import owner_of
from gateway.core.endings import Finish, Finished, How, Ratings, Tags
from gateway.core.rewards import Given
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import GroupId, History, SessionId, Split, Version, VersionPolicy
from gateway.fleet.pins import VersionPins
from gateway.runtime.clock import unix_s
from gateway.sessions.endings import Endings
from gateway.sessions.group_service import GroupService
from gateway.sessions.registry import SessionRegistry
from protos.errors import InvalidRequest
from protos.telemetry.context import TRACEPARENT, TraceContext, parse_traceparent
from protos.trajectories import VersionChange

PRIORITY_MAX = 1000
REASON_CHARS_MAX = 1000
GroupName = Annotated[str, Meta(min_length=1, max_length=256)]


class CreateRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    session_id: Annotated[str | None, Meta(description="The session's name. Default: the gateway makes one.")] = None
    group_id: Annotated[
        GroupName | None,
        Meta(description="The group that it belongs to: the samples of one prompt. Default: a group of its own."),
    ] = None
    sample_index: Annotated[Count, Meta(description="Its number in the group, from 0; members may share one.")] = 0
    group_size: Annotated[AtLeastOne, Meta(description="Finished sessions that make the group whole for a reader.")] = 1
    split: Annotated[Split, Meta(description="eval: no trainer gets it.")] = "train"
    train: Annotated[bool, Meta(description="Whether its trajectories go into the experience buffer.")] = True
    tags: Annotated[Tags, Meta(description="Texts by name, stored with each trajectory and returned with it.")] = {}
    history: Annotated[
        History,
        Meta(
            description="For templates that write history otherwise than it was sampled: record goes on from what was "
            "sampled, template from what the template writes, as a branch."
        ),
    ] = "record"
    version: Annotated[
        Count | None,
        Meta(description="The weight version that it begins on. Default: that of the engine of its first turn."),
    ] = None
    on_version_loss: Annotated[
        VersionPolicy | None,
        Meta(
            description="When no engine serves its version any more: segment goes on under another one, strict waits "
            "until it is loaded again, fail ends the session. Default: strict with a `version`, else segment."
        ),
    ] = None
    parent_session_id: Annotated[
        str | None,
        Meta(description="A live session, whose sub-agent or opponent this is. It is abandoned when that ends."),
    ] = None
    blocks_parent: Annotated[
        bool, Meta(description="Its parent waits for it as for a tool: while it lives, the parent is not idle.")
    ] = False
    min_version: Annotated[Count, Meta(description="The oldest weight version it may be on.")] = 0
    max_version: Annotated[
        Count | None,
        Meta(description="The newest weight version it may be on; no less than `min_version` and `version`."),
    ] = None
    max_turns: Annotated[
        AtLeastOne | None, Meta(description="Turns that it may have. Default: 4,096, which is the most.")
    ] = None
    expected_output_tokens: Annotated[
        AtLeastOne | None, Meta(description="Of one turn: where the gateway's guesses begin, and never a limit.")
    ] = None
    max_context_tokens: Annotated[
        Annotated[int, Meta(ge=2, le=EXACT_MAX)] | None,
        Meta(description="Tokens of a turn's prompt and answer together. Default: what the model's context holds."),
    ] = None
    deadline_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Seconds from now after which it is abandoned. Default: none."),
    ] = None
    priority: Annotated[
        int,
        Meta(
            ge=-PRIORITY_MAX,
            le=PRIORITY_MAX,
            description="Among turns that wait for an engine, those of the highest are placed first.",
        ),
    ] = 0


class RewardRequest(msgspec.Struct, forbid_unknown_fields=True):
    reward: Annotated[float | None, Meta(description="The session's.")] = None
    turns: Annotated[Ratings, Meta(description="Rewards of turns, by the id of the answer.")] = {}
    leaves: Annotated[Ratings, Meta(description="Rewards of trajectories, by the id of the last answer of each.")] = {}


class AbandonRequest(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX, description="For the log and the timeline.")] = ""


class SessionMade(msgspec.Struct):
    """`base_url` and `api_key`: for an agent's SDK; either names the session. `finish_key`: for whoever rewards it.
    Where access is controlled, `api_key` does not finish, reward or abandon it."""

    session_id: str
    base_url: str
    api_key: str
    finish_key: str


class SessionAnswer(msgspec.Struct, kw_only=True):
    """`version_pinned`: whether relays keep its version for it; null for a session that accepts others, too. `tokens`:
    all of the path to the turn that ended last, prompts included; `sampled_tokens`: what was sampled in all turns, in
    every branch. So either may be the larger."""

    session_id: str
    group_id: str
    sample_index: int
    parent_session_id: str | None
    children: Sequence[str]  # that have not ended
    state: str
    running: int
    version: int | None
    on_version_loss: VersionPolicy
    version_pinned: bool | None
    version_changes: Sequence[VersionChange]
    engine: str | None
    turns: int
    tokens: int
    sampled_tokens: int
    versions: Sequence[int]
    moves: int
    branches: int
    last_dropped: str  # the last turn that was aborted or lost, and why


class SessionEnded(msgspec.Struct):
    """A session that has ended. `result`: the answer to its finish; null for one that was abandoned."""

    session_id: str
    state: How
    result: Finished | None


class SessionPhase(msgspec.Struct):
    session_id: str
    state: str


class Abandoned(msgspec.Struct):
    """`replacement`: the session that takes its place in its group, if one does."""

    session_id: str
    state: Literal["abandoned"] = "abandoned"
    replacement: SessionMade | msgspec.UnsetType = msgspec.UNSET


_create = msgspec.json.Decoder(CreateRequest)
_finish = msgspec.json.Decoder(Finish)
_reward = msgspec.json.Decoder(RewardRequest)
_abandon = msgspec.json.Decoder(AbandonRequest)


def add_session_routes(
    app: web.Application,
    live: SessionRegistry,
    endings: Endings,
    groups: GroupService,
    pins: VersionPins,
    public_url: str | None,
) -> None:
    handlers = _Handlers(live, endings, groups, pins, public_url)
    app.router.add_post("/sessions", handlers.create)
    app.router.add_get("/sessions/{sid}", handlers.show)
    app.router.add_post("/sessions/{sid}/finish", handlers.finish)
    app.router.add_post("/finish_session", handlers.finish)
    app.router.add_post("/sessions/{sid}/reward", handlers.reward)
    app.router.add_post("/sessions/{sid}/abandon", handlers.abandon)


class _Handlers:
    def __init__(
        self,
        live: SessionRegistry,
        endings: Endings,
        groups: GroupService,
        pins: VersionPins,
        public_url: str | None,
    ) -> None:
        self._live, self._endings, self._groups, self._pins = live, endings, groups, pins
        self._public_url = public_url

    async def create(self, request: web.Request) -> web.Response:
        wanted = await read(request, _create, default=CreateRequest)
        caller = caller_of(request)
        name = SessionId(wanted.session_id or self._live.new_id())
        spec = session_spec(wanted, name, owner=owner_of(caller), trace=self._trace_of(request))
        self._live.check_rights(spec, caller)
        async with self._live.reserved(name):
            _, key = self._live.create(spec)
        await self._live.saved()
        return answer_json(self._made(request, spec.session_id, key))

    def _trace_of(self, request: web.Request) -> TraceContext | None:
        return None if self._live.tracer is None else parse_traceparent(request.headers.get(TRACEPARENT))

    async def show(self, request: web.Request) -> web.Response:
        name = _session_id(request)
        if self._live.find(name) is None and (ended := self._live.ended(name)) is not None:
            return answer_json(SessionEnded(name, ended.how, ended.told))
        return answer_json(self._summary(self._live.get(name)))

    async def finish(self, request: web.Request) -> web.Response:
        wanted = await read(request, _finish, default=Finish)
        session_id = _session_id(request)
        state = self._live.find(session_id)
        finished = await self._endings.finish(session_id, wanted)
        if finished is None:
            assert state is not None, "only a live session can wait for its reward"
            return answer_json(self._summary(state))
        return answer_json(finished)

    def _summary(self, state: SessionState) -> SessionAnswer:
        pinned = state.version in self._pins.pinned if state.insists else None
        return _summary(state, pinned, self._live.children(state.session_id))

    async def reward(self, request: web.Request) -> web.Response:
        """While the session lives, or within the window after its finish and before a trainer has it."""
        wanted = await read(request, _reward)
        session_id = _session_id(request)
        given = Given(wanted.reward, wanted.turns, wanted.leaves)
        return answer_json(SessionPhase(session_id, await self._endings.reward(session_id, given)))

    async def abandon(self, request: web.Request) -> web.Response:
        wanted = await read(request, _abandon, default=AbandonRequest)
        session_id = _session_id(request)
        group_id = self._live.get(session_id).spec.group_id
        await self._endings.abandon(session_id, wanted.reason)
        answer = Abandoned(session_id)
        if (replacement := self._groups.replacement(session_id, group_id)) is not None:
            answer.replacement = self._made(request, *replacement)
        return answer_json(answer)

    def _made(self, request: web.Request, name: SessionId, key: str) -> SessionMade:
        return SessionMade(name, base_url(request, name, self._public_url), key, self._live.finish_key(name))


def session_spec(
    wanted: CreateRequest, name: SessionId, *, owner: str = "", trace: TraceContext | None = None
) -> SessionSpec:
    in_range("min_version", wanted.min_version, 0, wanted.version)
    in_range("max_version", wanted.max_version, wanted.version or wanted.min_version, None)
    if wanted.blocks_parent and wanted.parent_session_id is None:
        raise BadField("blocks_parent", "`blocks_parent` without a parent", hint="name it with `parent_session_id`")
    return SessionSpec(
        name,
        GroupId(name if wanted.group_id is None else wanted.group_id),
        wanted.sample_index,
        wanted.group_size,
        wanted.split,
        wanted.train,
        tags=wanted.tags,
        history=wanted.history,
        version=None if wanted.version is None else Version(wanted.version),
        on_version_loss=wanted.on_version_loss or ("segment" if wanted.version is None else "strict"),
        parent_session_id=None if wanted.parent_session_id is None else SessionId(wanted.parent_session_id),
        blocks_parent=wanted.blocks_parent,
        min_version=Version(wanted.min_version),
        max_version=None if wanted.max_version is None else Version(wanted.max_version),
        max_turns=wanted.max_turns,
        expected_output_tokens=wanted.expected_output_tokens,
        max_context_tokens=wanted.max_context_tokens,
        deadline_unix_s=None if wanted.deadline_s is None else unix_s() + wanted.deadline_s,
        priority=wanted.priority,
        owner=owner,
        trace=trace,
    )


def base_url(request: web.Request, name: str, public_url: str | None) -> str:
    """For an agent's SDK. Without a `public_url` it is where this request came in; headers that a proxy adds, and a
    client may forge, are not read. The name is quoted: it may hold characters with a meaning in URLs."""
    root = f"{request.scheme}://{request.host}" if public_url is None else public_url
    return f"{root}/sessions/{quote(name, safe='')}/v1"


def reported_state(state: SessionState) -> str:
    """A session's state as it is reported to clients: its phase, or that its finish waits for the reward."""
    return state.phase if state.unrewarded is None else "unrewarded"


def _session_id(request: web.Request) -> SessionId:
    name = request.match_info.get("sid") or request.query.get("session_id")
    if not name:
        raise InvalidRequest("the request names no session", hint="POST /finish_session?session_id=ID")
    return SessionId(name)


def _summary(state: SessionState, pinned: bool | None, children: Sequence[SessionState]) -> SessionAnswer:
    return SessionAnswer(
        session_id=state.session_id,
        group_id=state.spec.group_id,
        sample_index=state.spec.sample_index,
        parent_session_id=state.spec.parent_session_id,
        children=[child.session_id for child in children],
        state=reported_state(state),
        running=len(state.running),
        version=state.version,
        on_version_loss=state.spec.on_version_loss,
        version_pinned=pinned,
        version_changes=state.version_changes,
        engine=state.engine,
        turns=state.turns,
        tokens=state.tokens,
        sampled_tokens=state.sampled_tokens,
        versions=state.sampled_versions,
        moves=state.moves,
        branches=state.branches,
        last_dropped=state.last_dropped,
    )
