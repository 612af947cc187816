"""Versions whose publish has not had its outcome yet, or ended without one.

Invariants:
- each publish has an entry of its own, by model and step: several of one publisher may wait side by side;
- an entry is there before anything can be lost: a caller who is interrupted leaves it. It goes with the outcome;
- a publish drops what ended in doubt of other steps: nobody will publish those again. So at most the publishes that
  run now have one, and those of one step more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from protos.errors import InDoubt, LaminarError
from protos.laminar.v1 import relay_pb2 as pb


class TicketData(msgspec.Struct, frozen=True):
    """What a ticket is made of: a process that did not publish the version can follow it, too."""

    model: str
    version: int
    run: str
    step: int
    store_id: str
    revision: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Doubt:
    """A version whose outcome is not known."""

    ticket: TicketData
    commit: pb.CommitRequest | None = None  # to be sent again; None: it was taken, or another process sent it

    @property
    def key(self) -> tuple[str, int]:
        return self.ticket.model, self.ticket.step


class Doubts:
    """Those of one relay's client."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Doubt] = {}
        self._running: set[Doubt] = set()

    def of(self, model: str, step: int) -> Doubt | None:
        return self._found.get((model, step))

    def newest(self, model: str) -> Doubt | None:
        return next((doubt for doubt in reversed(self._found.values()) if doubt.ticket.model == model), None)

    def add(self, doubt: Doubt) -> None:
        self._found[doubt.key] = doubt

    def end(self, doubt: Doubt) -> None:
        """Its outcome is known. Another publish may have an entry of the same step meanwhile, which stays."""
        if self._found.get(doubt.key) is doubt:
            del self._found[doubt.key]

    @contextlib.contextmanager
    def while_unknown(self, doubt: Doubt, *outcomes: type[LaminarError]) -> Iterator[None]:
        """A doubt until this ends without an error, or with one of `outcomes`; else it stays one."""
        self.add(doubt)
        self._running.add(doubt)
        try:
            yield
        except outcomes as error:
            if not isinstance(error, InDoubt):
                self.end(doubt)
            raise
        else:
            self.end(doubt)
        finally:
            self._running.discard(doubt)

    def drop_ended(self, model: str, but: int) -> list[Doubt]:
        """Those whose publish has ended, of every step of the model but one; they are dropped."""
        ended = [one for one in self._found.values() if one.ticket.model == model and one not in self._running]
        dropped = [one for one in ended if one.ticket.step != but]
        for one in dropped:
            self.end(one)
        return dropped
