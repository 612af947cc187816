"""The reader of one turn: its tokens to what a response shows, which is text, tool calls, logprobs and spans.

Invariants:
- pieces keep the order of tokens; the ids of all pieces are the turn's record, cut where a stop string completed, or
  was found to be in no call;
- reading a turn again gives the same, the ids of its tool calls included;
- text may lag behind ids (torn characters, possible stop strings, unparsed calls), never lead them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.api.calls import schema
from gateway.core.types import FinishReason, TokenDelta, TopLogprob, TurnId
from gateway.ports import TurnHandle
from gateway.tokens import AnswerParser, Detokenizer, ToolCall
from gateway.tokens.answers import AnswerDelta
from protos.trajectories import Segment, VersionChange


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The part of an answer that one delta adds. Only the last piece has a `finish_reason`."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None
    finish_reason: FinishReason | None = None


Show = Callable[[Piece], Awaitable[object] | None]
"""Takes a piece; returns an awaitable if the next piece has to wait for it, else None."""


@dataclass(slots=True)
class Answer:
    """A turn's answer so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    spans: list[schema.Span] = field(default_factory=list)  # of generated tokens
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None  # the stop string that ended it
    over: bool = False  # nothing more is read: a stop string came, or its one call
    segments: Sequence[Segment] = ()  # once it has ended
    version_changes: Sequence[VersionChange] = ()
    _spanned: tuple[int, str] | None = None  # version and engine of the last span

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def message(self) -> schema.Message:
        """The assistant's message of a chat."""
        text = self.text
        message = schema.Message("assistant", text if text or not self.calls else None)
        if self.reasonings:
            message.reasoning_content = "".join(self.reasonings)
        if self.calls:
            message.tool_calls = [
                schema.Call(call.id, "function", schema.CalledFunction(call.name, call.arguments))
                for call in self.calls
            ]
        return message

    def end(self, turn: TurnHandle) -> None:
        self.segments, self.version_changes = turn.segments, turn.version_changes

    def take(self, piece: Piece, delta: TokenDelta) -> None:
        start = len(self.token_ids)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.top_logprobs is not None:
            self.top_logprobs += piece.top_logprobs
        if piece.text:
            self.texts.append(piece.text)
        if piece.reasoning:
            self.reasonings.append(piece.reasoning)
        if piece.calls:
            self.calls += piece.calls
        if piece.token_ids:
            self._extend_span(delta, start)
        self.finish_reason = piece.finish_reason

    def _extend_span(self, delta: TokenDelta, start: int) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and self._spanned == (delta.version, delta.engine):
            last.end = len(self.token_ids)
        else:
            self._spanned = (delta.version, delta.engine)
            self.spans.append(schema.Span(str(delta.version), start, len(self.token_ids), delta.engine))


def _digest(turn_id: TurnId | None, number: int) -> str:
    return hashlib.blake2b(f"{turn_id}:{number}".encode(), digest_size=12).hexdigest()


@dataclass(slots=True)
class Reader:
    """Reads one turn: its ids to text, the text to reasoning, content and tool calls."""

    decoder: Detokenizer
    parser: AnswerParser
    stop_token_ids: Sequence[int] = ()
    turn_id: TurnId | None = None
    min_tokens: int = 0
    """Tokens before which no stop string counts."""

    async def read(self, turn: TurnHandle, answer: Answer, show: Show | None) -> None:
        """Reads the turn to its end, or to a stop string, into `answer`; passes each piece to `show`, if any.

        A stop token that ended the turn stays in the ids and is not shown, like an end-of-sequence token.
        """

        text_alone = self.parser.plain

        def take(delta: TokenDelta) -> Awaitable[object] | None:
            if answer.over:
                return None  # what follows its stop string
            if text_alone and delta.finish_reason is None:
                text = self.decoder.feed(delta.token_ids)
                piece = Piece(text, "", (), delta.token_ids, delta.logprobs, delta.top_logprobs)
            else:
                piece = self._piece(delta, answer)
            answer.take(piece, delta)
            if answer.over:
                return stop(piece)
            return None if show is None else show(piece)

        async def stop(piece: Piece) -> None:
            await turn.finish_early(len(answer.token_ids))
            held = None if show is None else show(piece)
            if held is not None:
                await held

        await turn.read(take, at_end=show is None and not self.parser.ends_early)

    def _piece(self, delta: TokenDelta, answer: Answer) -> Piece:
        finish, token_ids = delta.finish_reason, delta.token_ids
        special = self.decoder.special
        silent = (
            finish == "stop" and token_ids[-1:] and (token_ids[-1] in self.stop_token_ids or token_ids[-1] in special)
        )
        shown = token_ids[:-1] if silent else token_ids
        if self.parser.ends_early or not special.isdisjoint(shown):
            found, used = self._by_token(shown, len(answer.token_ids), finish is not None)
            used = used if found[-1:] and found[-1].over and used < len(shown) else len(token_ids)
        else:
            text = self.decoder.feed(shown) if finish is None else self.decoder.feed(shown) + self.decoder.flush()
            found, used = [self.parser.feed(text, last=finish is not None)], len(token_ids)
        if found and found[-1].over:
            answer.over, finish, answer.stop_reason = True, "stop", found[-1].stopped_by
        calls = tuple(call for each in found for call in each.calls)
        top = None if delta.top_logprobs is None else delta.top_logprobs[:used]
        return Piece(
            "".join([each.text for each in found]),
            "".join([each.reasoning for each in found]),
            self._named(calls, len(answer.calls)) if calls else (),
            token_ids[:used],
            delta.logprobs[:used],
            top,
            finish,
        )

    def _by_token(self, token_ids: Sequence[int], before: int, last: bool) -> tuple[list[AnswerDelta], int]:
        """What each token adds, up to that with which the answer is over, and their number."""
        found: list[AnswerDelta] = []
        for position, token_id in enumerate(token_ids, 1):
            checked = before + position > self.min_tokens
            found.append(self.parser.feed(self.decoder.feed((token_id,)), checked=checked))
            if found[-1].over:
                return found, position
        if last:
            checked = before + len(token_ids) >= self.min_tokens
            found.append(self.parser.feed(self.decoder.flush(), checked=checked, last=True))
        return found, len(token_ids)

    def _named(self, calls: Sequence[ToolCall], num_before: int) -> tuple[ToolCall, ...]:
        """The calls with ids that are the same whenever the turn is read."""
        return tuple(
            dataclasses.replace(call, id=self.parser.call_id(_digest(self.turn_id, number)))
            for number, call in enumerate(calls, num_before)
        )
