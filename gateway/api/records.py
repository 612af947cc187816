"""`GET /sessions/{sid}/trajectories`: what is recorded of a session, for people, until a trainer has used it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
from aiohttp import web

from gateway.api.bodies import answer_pieces, json_pieces
from gateway.api.errors import BadField
from gateway.api.sessions import reported_state
from gateway.core.sessions import SessionState
from gateway.core.types import SessionId
from gateway.experience import ExperienceBuffer
from gateway.experience.buffer import AT_ONCE_TOKENS
from gateway.runtime.clock import unix_s
from gateway.sessions.registry import SessionRegistry
from gateway.tokens import Codec
from protos.errors import NotFound
from protos.trajectories import Trajectory


class Span(msgspec.Struct):
    """The token ids from `start` to `end`, exclusive: the part of a turn's prompt that is new in it, or what was
    `sampled` in it."""

    turn: int
    sampled: bool
    start: int
    end: int
    text: str


class Recorded(msgspec.Struct):
    """`tokens`: the text of each token by itself, bytes that are no text as `\\\\xNN`; empty unless requested."""

    trajectory: Trajectory
    spans: Sequence[Span]
    tokens: Sequence[str]


class RecordedSession(msgspec.Struct):
    """`trajectories`: one for each leaf. While the session is live their reward is 0, their status its state, and
    running turns are left out."""

    session_id: str
    state: str
    trajectories: Sequence[Recorded]


def add_record_routes(app: web.Application, live: SessionRegistry, buffer: ExperienceBuffer, codec: Codec) -> None:
    handlers = _Handlers(live, buffer, codec)
    app.router.add_get("/sessions/{sid}/trajectories", handlers.show)


class _Handlers:
    def __init__(self, live: SessionRegistry, buffer: ExperienceBuffer, codec: Codec) -> None:
        self._live, self._buffer, self._codec = live, buffer, codec

    async def show(self, request: web.Request) -> web.StreamResponse:
        session_id, tokens = SessionId(request.match_info["sid"]), _wants_tokens(request)
        found = self._live.find(session_id)
        if found is not None:
            # A snapshot: turns may end while it is sent.
            found = dataclasses.replace(found, tree=found.tree.snapshot())
            state, trajectories = reported_state(found), _so_far(found)
            long = found.tree.path_tokens > AT_ONCE_TOKENS
        else:
            ended = self._live.ended(session_id)
            if ended is None or ended.how != "finished":
                self._live.get(session_id)  # raises: it was abandoned, or there is none
                raise NotFound(f"no session {session_id!r}")
            state, trajectories = ended.how, await self._buffer.look(session_id)
            long = True
        recorded = (self._recorded(trajectory, tokens) for trajectory in trajectories)
        return await answer_pieces(
            request, json_pieces(RecordedSession(session_id, state, []), "trajectories", recorded), long=long
        )

    def _recorded(self, trajectory: Trajectory, tokens: bool) -> Recorded:
        ids = trajectory.token_ids
        spans = [
            Span(turn, sampled, start, end, self._codec.decode(ids[start:end]))
            for turn, sampled, start, end in spans_of(trajectory)
        ]
        texts = [self._codec.token_bytes(i).decode(errors="backslashreplace") for i in ids] if tokens else []
        return Recorded(trajectory, spans, texts)


def _so_far(state: SessionState) -> Iterator[Trajectory]:
    return state.trajectories(0.0, reported_state(state), {}, unix_s()) if state.turns else iter(())


def spans_of(trajectory: Trajectory) -> Iterator[tuple[int, bool, int, int]]:
    """Turn, whether it was sampled, start and end: of every token once, in order. A turn's segments are one span.

    Turns are counted here: a segment's own number also counts the answers that its first prompt came with.
    """
    position = 0
    sampled: dict[int, tuple[int, int]] = {}
    for segment in trajectory.segments:
        begin, _ = sampled.get(segment.turn, (segment.start, 0))
        sampled[segment.turn] = begin, segment.end
    for turn, (start, end) in enumerate(sampled.values()):
        if start > position:
            yield turn, False, position, start
        yield turn, True, start, end
        position = end
    if position < len(trajectory.token_ids):
        yield len(sampled), False, position, len(trajectory.token_ids)


def _wants_tokens(request: web.Request) -> bool:
    text = request.query.get("tokens", "false")
    if text not in ("true", "false"):
        raise BadField("tokens", f"tokens={text!r} is neither true nor false")
    return text == "true"
