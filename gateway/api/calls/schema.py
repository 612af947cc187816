"""The parts of an answer that every API shows, or keeps: the recorded message is a chat's, whichever API it came by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from protos.trajectories import Segment, VersionChange


class Span(msgspec.Struct):
    """Tokens `start` to `end` of the answer, `end` exclusive: their weight version and engine."""

    version: str
    start: int
    end: int
    engine: str


class Provenance(msgspec.Struct):
    """How the answer came about."""

    session_id: str
    history: str
    moves: int
    segments: Sequence[Segment]
    version_changes: Sequence[VersionChange]


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class Call(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(msgspec.Struct):
    """`content` is null where only calls were made."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: Sequence[Call] | UnsetType = UNSET
