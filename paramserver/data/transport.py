"""The transport seam: how a fetch requests chunks of a holder. TCP, NIXL (RDMA), or a disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paramserver.core.transfer import Want
from paramserver.data.frames import Greeting


@dataclass(frozen=True, slots=True)
class Source:
    """A relay, or a disk, that may have the version."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """The rest of a chunk lies in place; `digest` is what the publisher computed for the whole chunk.

    `began_at`: monotonic seconds when the holder had it and began to send; `num_bytes` came since.
    `found`: the digest of the bytes in place, where the link computed it as they came; None: it did not.
    """

    index: int
    digest: bytes
    num_bytes: int
    began_at: float
    found: bytes | None = None


class Link(Protocol):
    """One stripe's connection to one holder. Raises LinkBroken, or what the holder refused with."""

    transport: str
    """The kind of transport: "tcp", "nixl", "file"."""

    rtt_s: float
    """The network's round trip, in seconds."""

    def request(self, want: Want) -> None:
        """Requests the rest of a chunk; answers come in order."""

    def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
        """The next answer, written into `place(index)`; calls `received(index, upto_byte)` with its progress."""

    def alive(self) -> None:
        """A sign of life from a side that requests nothing."""

    def break_off(self) -> None:
        """Makes `receive` raise soon, which waits for as long as the holder lives. Any thread may call it at any
        time."""

    def close(self) -> None: ...


class Breakable(Protocol):
    """What waits for a holder and can be told, by any thread and at any time, to do so no more."""

    def break_off(self) -> None: ...


Begun = Callable[[Breakable], None]
"""Told of a link before it waits for its welcome."""


def tell_nobody(_: Breakable) -> None:
    """A `Begun` for whoever has nothing to break off."""


Dial = Callable[[Source, Greeting, Begun], Link]
"""Opens a link: connects, greets, and returns when welcomed. What waits longer than a few seconds is told to `Begun`
first."""
