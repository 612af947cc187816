"""A turn that is asked to leave the engine it streams from, for another one or for any."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.core.types import EngineName


@dataclass(slots=True)
class Leaving:
    """The turn is to leave its engine: for `destination`, or (None) for wherever there is a place.

    `arrived`: seconds without tokens, once the first came from elsewhere; None when it came to nothing.
    """

    destination: EngineName | None
    asked_at: float
    arrived: asyncio.Future[float | None]

    def came_to_nothing(self) -> None:
        if not self.arrived.done():
            self.arrived.set_result(None)


class Left(Exception):
    """The turn left its engine because it was asked to."""

    def __init__(self, leaving: Leaving) -> None:
        super().__init__(leaving.destination)
        self.leaving = leaving
