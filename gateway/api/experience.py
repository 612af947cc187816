"""For trainers: `POST /experience/sample` leases finished trajectories, `POST /experience/ack` uses them up.

`POST /experience/release` returns them unused; else that happens when the lease ends, or by `POST /experience/reclaim`
of a reader that was started again. `POST /experience/evict` removes sessions that nobody is to train on.
`GET /experience/rows` shows what waits, without tokens: a reader that chooses by itself samples `session_ids`.
`GET /experience/rows/{number}`: one of them whole, under no lease, in the formats of a sample. `POST /experience/peek`:
what a sample would get now, under no lease, and without a say in the admission of new sessions.
`GET /experience/statistics`: what was.

Trajectories go out packed where the client accepts it (`application/vnd.laminar.packed`, see `protos.packed`): the rows
as they are stored. Else they are unpacked, and go out as msgpack (`application/msgpack`) or JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.api.bodies import Count, answer_json, answer_pieces, json_pieces, msgpack_pieces, read
from gateway.api.errors import BadField
from gateway.core.experience import holder
from gateway.core.selection import Bound, Strategy, check_wanted
from gateway.core.types import NO_VERSION, Version
from gateway.experience.buffer import (
    AT_ONCE_TOKENS,
    LEASE_S,
    WAIT_S_MAX,
    BufferStatistics,
    ExperienceBuffer,
    Sampled,
)
from gateway.experience.record import SampledStatistics
from gateway.fleet.fleet import Fleet
from gateway.sessions.trainer import Trainer
from protos import packed
from protos.errors import NotFound, VersionUnknown
from protos.foreign_text import quoted
from protos.packed import Offer
from protos.trajectories import Trajectory

MSGPACK = "application/msgpack"
TRAJECTORIES_MAX = 4096
"""In one answer: at a few KB to a few MB each, more would be better read in pieces."""
USES_MAX = 1000
ROWS_AT_ONCE = 64
"""Rows in one answer, each with up to 64 tags of 4 KB; more are encoded beside the event loop."""
DIGITS_MAX = 15
READER_MAX = 256
"""Characters of a reader's name."""
LEASE_NAME_MAX = 128
LEASE_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{LEASE_NAME_MAX}}}", re.ASCII)
OTHERS_MAX = 8
"""Models that are named in an error."""
PIECE_BYTES = 1 << 18
"""Of a batch, sent at once."""
PEEKED_MAX = 256
"""In one answer of a peek, which is read row by row."""
Some = Annotated[int, Meta(ge=1, le=TRAJECTORIES_MAX)]
Peeked = Annotated[int, Meta(ge=1, le=PEEKED_MAX)]


class SampleRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either `trajectories`, or `groups` of `group_size`, or the sessions `session_ids`."""

    reader: Annotated[
        str, Meta(min_length=1, max_length=READER_MAX, description="The reader's name: its leases belong to it.")
    ]
    trainer_version: Annotated[
        Count,
        Meta(
            description="The newest version that the trainer published; 0: none. One that no relay announces within "
            "5 s gets 409, `version_unknown`."
        ),
    ]
    trajectories: Annotated[Some | None, Meta(description="How many trajectories.")] = None
    groups: Annotated[Some | None, Meta(description="How many whole groups.")] = None
    group_size: Annotated[Some | None, Meta(description="With `groups`: sessions of each.")] = None
    session_ids: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=TRAJECTORIES_MAX)] | None,
        Meta(
            description="Sessions that this reader finished itself. Such a request declares no batch: it bounds no "
            "admission of new sessions."
        ),
    ] = None
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_S_MAX, description="Seconds to wait until there are so many.")] = 0.0
    staleness_max: Annotated[
        Count | None,
        Meta(
            description="Versions that a trajectory may be behind `trainer_version`, or the newest if that is more. "
            "What is staler is not in this answer, and stays for others. Default: the gateway's bound."
        ),
    ] = None
    version_min: Annotated[
        Count,
        Meta(
            description="What has a token of an older version is not in this answer: a reader leaves an old run's out."
        ),
    ] = 0
    lease_s: Annotated[
        float, Meta(ge=0.001, le=86_400, description="Seconds after which the trajectories return to the buffer.")
    ] = LEASE_S
    drop_equal_rewards: Annotated[
        bool, Meta(description="Groups whose members all got the same reward are dropped for good.")
    ] = False
    strategy: Annotated[Strategy, Meta(description="The order in which trajectories are handed out.")] = "fifo"
    num_ranks: Annotated[
        int,
        Meta(
            ge=1,
            le=TRAJECTORIES_MAX,
            description="Ranks that share a batch: this request is one's share, and is answered whole or not at all.",
        ),
    ] = 1
    rank: Annotated[Count, Meta(description="Whose share it is: its lease is reclaimed by the same rank.")] = 0
    uses_max: Annotated[
        int,
        Meta(ge=1, le=USES_MAX, description="Trajectories that were used less often than this are handed out."),
    ] = 1


class PeekRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either `trajectories`, or `groups` of `group_size`, or the sessions `session_ids`."""

    trajectories: Annotated[Peeked | None, Meta(description="How many trajectories.")] = None
    groups: Annotated[Peeked | None, Meta(description="How many whole groups.")] = None
    group_size: Annotated[Peeked | None, Meta(description="With `groups`: sessions of each.")] = None
    session_ids: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=PEEKED_MAX)] | None, Meta(description="These sessions.")
    ] = None
    staleness_max: Annotated[
        Count | None,
        Meta(description="Versions that a trajectory may be behind the newest. Default: the gateway's bound."),
    ] = None
    strategy: Annotated[Strategy, Meta(description="The order in which trajectories are handed out.")] = "fifo"
    uses_max: Annotated[
        int, Meta(ge=1, le=USES_MAX, description="Trajectories that were used less often than this.")
    ] = 1


class AckRequest(msgspec.Struct, forbid_unknown_fields=True):
    lease_id: Annotated[str, Meta(description="The lease that a sample returned.")]


class ReclaimRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What this rank of an earlier life of the reader had leased, and those of its ranks with the same remainder by
    `num_ranks`."""

    reader: Annotated[str, Meta(min_length=1, max_length=READER_MAX, description="The reader's name.")]
    num_ranks: Annotated[
        int, Meta(ge=1, le=TRAJECTORIES_MAX, description="Ranks that the reader has in this life.")
    ] = 1
    rank: Annotated[Count, Meta(description="This rank's number, from 0.")] = 0


class EvictRequest(msgspec.Struct, forbid_unknown_fields=True):
    session_ids: Annotated[
        list[str], Meta(min_length=1, max_length=TRAJECTORIES_MAX, description="The sessions to remove.")
    ]


class EvictAnswer(msgspec.Struct):
    """`leased`: of the sessions, those that a reader has, which stay. `missing`: those that are not in the buffer."""

    evicted: int
    leased: int
    missing: int


class SampleAnswer(msgspec.Struct):
    """`lease_id`: empty where there is no trajectory, and of a peek. `why`: in numbers, why there is none."""

    lease_id: str
    why: str
    trajectories: Sequence[Trajectory]


class AckAnswer(msgspec.Struct):
    acknowledged: int


class ReleaseAnswer(msgspec.Struct):
    returned: int


class RowsAnswer(msgspec.Struct):
    """`next_after`: to pass as `after` for those behind; null at the end. `closed_groups`: of the rows' groups, those
    that ended with fewer members than their size, with how many. `vocabulary`: the digest of the tokenizer's."""

    rows: Sequence[Offer]
    next_after: int | None
    closed_groups: dict[str, int]
    model: str
    vocabulary: str


class StalenessStatistics(msgspec.Struct):
    """By how many versions it was behind: tokens when generated, trajectories at their finish and when sampled."""

    generation: dict[int, int]
    finish: dict[int, int]
    use: dict[int, int]


class ExperienceStatistics(msgspec.Struct):
    """`sampled`: of the last trajectories that readers got. `newest_version`: that relays announced; 0: none.
    `newest_run`: the run that published it; empty while no relay holds it."""

    buffer: BufferStatistics
    staleness: StalenessStatistics
    sampled: SampledStatistics
    newest_version: int
    newest_run: str


@dataclass(frozen=True, slots=True)
class ExperienceDeps:
    """`staleness_max` is the gateway's bound, for readers that name none. `model`, `vocabulary`: of the token ids."""

    buffer: ExperienceBuffer
    trainer: Trainer
    fleet: Fleet
    staleness_max: int
    model: str = ""
    vocabulary: str = ""


def add_experience_routes(app: web.Application, deps: ExperienceDeps) -> None:
    handlers = _Handlers(deps)
    app.router.add_post("/experience/sample", handlers.sample)
    app.router.add_post("/experience/peek", handlers.peek)
    app.router.add_post("/experience/ack", handlers.ack)
    app.router.add_post("/experience/release", handlers.release)
    app.router.add_post("/experience/reclaim", handlers.reclaim)
    app.router.add_post("/experience/evict", handlers.evict)
    app.router.add_get("/experience/rows", handlers.rows)
    app.router.add_get("/experience/rows/{number}", handlers.row)
    app.router.add_get("/experience/statistics", handlers.statistics)


class _Handlers:
    def __init__(self, deps: ExperienceDeps) -> None:
        self._deps = deps

    async def sample(self, request: web.Request) -> web.StreamResponse:
        wanted = _checked(await read(request, _sample))
        lease_id = _lease_name(request.query)
        version, doubt = await self._version(wanted)
        if wanted.session_ids is None:
            self._deps.trainer.requested(
                (wanted.trajectories or (wanted.groups or 0) * (wanted.group_size or 0)) * wanted.num_ranks,
                wanted.trainer_version,
                wanted.staleness_max,
                reader=wanted.reader,
                group_size=wanted.group_size if wanted.groups is not None else None,
                waits=wanted.wait_s > 0,
                by_token=wanted.strategy == "staleness_bounded",
            )
        else:
            self._deps.trainer.published(wanted.trainer_version)
        self._deps.fleet.decide_soon()  # another bound may admit sessions that wait
        bound = self._deps.staleness_max if wanted.staleness_max is None else wanted.staleness_max
        if wanted.version_min:
            bound = min(bound, version - wanted.version_min)
        sampled = await self._deps.buffer.sample(
            holder(wanted.reader, wanted.rank),
            trainer_version=version,
            trajectories=wanted.trajectories,
            groups=wanted.groups,
            group_size=wanted.group_size,
            session_ids=wanted.session_ids,
            wait_s=wanted.wait_s,
            staleness_max=bound,
            lease_s=wanted.lease_s,
            drop_equal_rewards=wanted.drop_equal_rewards,
            strategy=wanted.strategy,
            uses_max=wanted.uses_max,
            whole=wanted.num_ranks > 1,
            lease_id=lease_id,
            own=self._deps.trainer.own_bound,
        )
        self._deps.trainer.took(version, sampled.entries)
        nothing = f"it gets nothing: {sampled.why}" if sampled.stale else ""
        self._deps.trainer.note(wanted.reader, "; ".join(filter(None, (doubt, nothing))))
        accept = request.headers.get("Accept", "")
        send = _send_packed if packed.MEDIA_TYPE in accept else _send_unpacked
        try:
            return await send(request, sampled)
        except (ConnectionError, asyncio.CancelledError):
            # The reader left before it had all of it, so it cannot use the batch.
            with contextlib.suppress(NotFound):
                await self._deps.buffer.release(sampled.lease_id)
            raise

    async def _version(self, wanted: SampleRequest) -> tuple[int, str]:
        """The version by which staleness is measured in this answer, and what is doubtful about what the reader says.
        Raises VersionUnknown where relays know of no such version."""
        said, fleet, bound = wanted.trainer_version, self._deps.fleet, self._deps.staleness_max
        heard = await fleet.announcements.heard_of(Version(said))
        newest = fleet.state.newest
        if heard.verdict == "unknown":
            error = _unknown(said, newest, self._deps.model, heard.others)
            self._deps.trainer.note(wanted.reader, str(error))
            raise error
        refused = fleet.relays.refused()
        none_believed = bool(refused) and refused.keys() >= set(fleet.relays.addresses())
        if heard.verdict == "nobody" and none_believed and said not in (NO_VERSION, newest):
            error = _of_refused(said, newest, *next(iter(refused.items())))
            self._deps.trainer.note(wanted.reader, str(error))
            raise error
        doubts = []
        served = max((engine.version for engine in fleet.state.engines.values()), default=NO_VERSION)
        if heard.verdict == "nobody" and said > max(newest, served):
            relays = "no relay that is believed answers" if fleet.relays.addresses() else "this gateway has no relay"
            doubts.append(
                f"it says version {said}, which no relay announced ({relays}): it decides what this reader gets, and "
                "nothing else"
            )
        if newest and wanted.staleness_max is not None and wanted.staleness_max > bound:
            doubts.append(
                f"it takes what is {wanted.staleness_max} versions behind, and this gateway evicts beyond {bound} "
                "(--staleness-max)"
            )
        return max(said, newest), "; ".join(doubts)

    async def peek(self, request: web.Request) -> web.StreamResponse:
        wanted = await read(request, _peek)
        number = (wanted.groups or 0) * (wanted.group_size or 0)
        if number > PEEKED_MAX:
            raise BadField("groups", f"a peek at {number} trajectories", hint=f"at most {PEEKED_MAX}")
        bound = self._deps.staleness_max if wanted.staleness_max is None else wanted.staleness_max
        found = await self._deps.buffer.peek(
            Bound(self._deps.fleet.state.newest, bound, by_token=wanted.strategy == "staleness_bounded"),
            trajectories=wanted.trajectories,
            groups=wanted.groups,
            group_size=wanted.group_size,
            session_ids=wanted.session_ids,
            strategy=wanted.strategy,
            uses_max=wanted.uses_max,
        )
        return await _answered(request, found)

    async def ack(self, request: web.Request) -> web.Response:
        used = await self._deps.buffer.ack((await read(request, _ack)).lease_id)
        return answer_json(AckAnswer(used))

    async def release(self, request: web.Request) -> web.Response:
        returned = await self._deps.buffer.release((await read(request, _ack)).lease_id)
        return answer_json(ReleaseAnswer(returned))

    async def reclaim(self, request: web.Request) -> web.Response:
        wanted = await read(request, _reclaim)
        _check_rank(wanted.rank, wanted.num_ranks)
        returned = await self._deps.buffer.reclaim(wanted.reader, wanted.rank, wanted.num_ranks)
        return answer_json(ReleaseAnswer(returned))

    async def evict(self, request: web.Request) -> web.Response:
        done = await self._deps.buffer.evict((await read(request, _evict)).session_ids)
        return answer_json(EvictAnswer(done.evicted, done.leased, done.missing))

    async def rows(self, request: web.Request) -> web.StreamResponse:
        limit = min(_number("limit", request.query, TRAJECTORIES_MAX), TRAJECTORIES_MAX)
        leased = _number("leased", request.query, 0) > 0
        found = self._deps.buffer.offers(_number("after", request.query, 0), limit, leased=leased)
        _, closed = self._deps.buffer.groups()
        answer = RowsAnswer(
            [],
            found[-1].seq if found and len(found) == limit else None,
            {offer.group_id: closed[offer.group_id] for offer in found if offer.group_id in closed},
            self._deps.model,
            self._deps.vocabulary,
        )
        return await answer_pieces(request, json_pieces(answer, "rows", found), long=len(found) > ROWS_AT_ONCE)

    async def row(self, request: web.Request) -> web.StreamResponse:
        return await _answered(
            request, Sampled(rows=[await self._deps.buffer.read(_number("number", request.match_info, 0))])
        )

    async def statistics(self, request: web.Request) -> web.Response:
        buffer, behind = self._deps.buffer, self._deps.trainer.staleness
        staleness = StalenessStatistics(behind.generation, behind.finish, behind.use)
        newest = self._deps.fleet.state.newest
        return answer_json(
            ExperienceStatistics(
                buffer.statistics(),
                staleness,
                buffer.sampled_statistics(),
                newest,
                self._deps.fleet.relays.run_of(newest),
            )
        )


def _lease_name(given: Mapping[str, str]) -> str:
    """Not a field of the body: a gateway that does not know the name passes over it, and names the lease itself."""
    name = given.get("lease_id", "")
    if "lease_id" in given and not LEASE_NAME.fullmatch(name):
        raise BadField(
            "lease_id", "`lease_id` is no name for a lease", hint=f"1 to {LEASE_NAME_MAX} of a-z, A-Z, 0-9, . _ and -"
        )
    return name


def _number(name: str, given: Mapping[str, str], default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise BadField(name, f"{name}={text!r} is not a number", hint=f"such as {name}={default}")
    return int(text)


async def _answered(request: web.Request, found: Sampled) -> web.StreamResponse:
    """Under no lease."""
    accept = request.headers.get("Accept", "")
    return await (_send_packed if packed.MEDIA_TYPE in accept else _send_unpacked)(request, found)


async def _send_packed(request: web.Request, sampled: Sampled) -> web.StreamResponse:
    """Sends the rows piece by piece, as fast as the reader takes them: a batch in one piece is copied twice, and stays
    in memory until all of it is sent."""
    parts = packed.batch_parts(sampled.lease_id, sampled.rows, sampled.why)
    response = web.StreamResponse()
    response.content_type, response.content_length = packed.MEDIA_TYPE, sum(len(part) for part in parts)
    await response.prepare(request)
    piece: list[bytes] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            await response.write(b"".join(piece))
            piece, size = [], 0
    await response.write_eof(b"".join(piece))
    return response


async def _send_unpacked(request: web.Request, sampled: Sampled) -> web.StreamResponse:
    """As JSON, or as msgpack: a cost for each token."""
    rows = [packed.Row(row) for row in sampled.rows]
    leaves = (leaf for row in rows for leaf in row.trajectories())
    long = sum(sum(row.lengths["token_ids"]) for row in rows) > AT_ONCE_TOKENS
    answer = SampleAnswer(sampled.lease_id, sampled.why, [])
    if MSGPACK in request.headers.get("Accept", ""):
        pieces = msgpack_pieces(answer, sum(len(row.labels) for row in rows), leaves)
        return await answer_pieces(request, pieces, long=long, content_type=MSGPACK)
    return await answer_pieces(request, json_pieces(answer, "trajectories", leaves), long=long)


_sample = msgspec.json.Decoder(SampleRequest)
_peek = msgspec.json.Decoder(PeekRequest)
_ack = msgspec.json.Decoder(AckRequest)
_reclaim = msgspec.json.Decoder(ReclaimRequest)
_evict = msgspec.json.Decoder(EvictRequest)


def _check_rank(rank: int, num_ranks: int) -> None:
    if rank >= num_ranks:
        raise BadField("rank", f"rank {rank} of {num_ranks}", hint="ranks count from 0")


def _unknown(said: int, newest: int, model: str, others: Sequence[str]) -> VersionUnknown:
    names = ", ".join(map(quoted, others[:OTHERS_MAX]))
    elsewhere = f"; relays have versions of {names}, which this gateway does not serve" if others else ""
    return VersionUnknown(
        f"no relay has announced version {said} of model {model!r}: the newest is {newest or 'none'}{elsewhere}",
        hint="pass the version that `publish` returned, not a step, and publish under this model's name; right after a "
        "publish, try again",
    )


def _of_refused(said: int, newest: int, relay: str, why: str) -> VersionUnknown:
    """Of a trainer that publishes where this gateway takes nothing from: its versions would reach no engine."""
    return VersionUnknown(
        f"version {said} is not known here, where the newest is {newest or 'none'}: versions of relay {relay} are "
        f"refused: {why}"
    )


def _checked(wanted: SampleRequest) -> SampleRequest:
    """Checks everything before the request has an effect: a refused one declares no batch."""
    check_wanted(wanted.trajectories, wanted.groups, wanted.group_size, wanted.strategy, wanted.session_ids)
    _check_rank(wanted.rank, wanted.num_ranks)
    groups, size = wanted.groups or 0, wanted.group_size or 0
    if groups * size > TRAJECTORIES_MAX:
        raise BadField(
            "groups", f"{groups} groups of {size} in one answer", hint=f"at most {TRAJECTORIES_MAX} trajectories"
        )
    if wanted.drop_equal_rewards and wanted.groups is None:
        raise BadField("drop_equal_rewards", "`drop_equal_rewards` is for groups", hint="request `groups`")
    return wanted
