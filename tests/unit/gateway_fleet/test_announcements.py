"""Whether a relay has announced what a trainer says it published, in virtual time over relays in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.core.types import NO_VERSION, Version
from gateway.fleet.announcements import WAIT_S, Announcements, Heard, Looked
from tests.sim.virtual import Clock, Process

WATCH_LATE_S = 2.0


class Relays:
    """One relay: `publish` is seen by a look once the version is sealed, and by the watch when that comes, or never."""

    def __init__(self) -> None:
        self.watched = self.sealed = NO_VERSION
        self.exists = self.answers = self.looks = self.reaches_registry = True
        self.announcements = Announcements(self, lambda: self.watched)

    def addresses(self) -> list[str]:
        return ["relay"] if self.exists else []

    def answering(self) -> list[str]:
        return ["relay"] if self.exists and self.answers else []

    async def look(self) -> Looked:
        await asyncio.sleep(0.001)
        certain = self.reaches_registry
        return Looked(self.sealed, ["polciy"], certain) if self.looks else Looked(certain=certain)

    def watch(self, version: Version) -> None:
        self.watched = max(self.watched, version)
        self.announcements.changed()

    def seal(self, version: Version) -> None:
        self.sealed = max(self.sealed, version)


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    clock = Clock()
    process = Process(clock, random.Random(1), "gateway")
    done = process.create_task(scene())
    clock.run(1e6)
    process.kill()
    done.result()


def test_a_version_is_published_and_sampled_at_once_a_thousand_times_while_the_watch_is_late_or_cut() -> None:
    async def scene() -> None:
        relays, chance, loop = Relays(), random.Random(7), asyncio.get_running_loop()
        for number in range(1, 1001):
            version, watch = Version(number), chance.choice(("at once", "late", "cut"))
            loop.call_later(chance.uniform(0.0, 3.0), relays.seal, version)
            relays.looks = watch == "cut" or chance.random() < 0.5
            if watch != "cut":
                loop.call_later(WATCH_LATE_S if watch == "late" else 0.0, relays.watch, version)
            began = loop.time()
            assert await relays.announcements.heard_of(version) == Heard("announced"), (number, watch)
            assert loop.time() - began < WAIT_S

    play(scene)


def test_what_no_relay_announces_is_unknown_after_the_wait_and_taken_while_none_answers() -> None:
    async def scene() -> None:
        relays, loop = Relays(), asyncio.get_running_loop()
        relays.watch(Version(13))
        began = loop.time()
        assert await relays.announcements.heard_of(Version(24)) == Heard("unknown", ["polciy"])
        assert WAIT_S <= loop.time() - began < WAIT_S + 1
        relays.reaches_registry = False
        assert await relays.announcements.heard_of(Version(24)) == Heard("nobody"), "its registry may know of it"
        relays.answers, began = False, loop.time()
        for version in (24, 13, 0):
            assert await relays.announcements.heard_of(Version(version)) == Heard("nobody")
        assert loop.time() == began

    play(scene)


def test_a_gateway_that_has_just_started_waits_for_the_first_answer() -> None:
    async def scene() -> None:
        relays, loop = Relays(), asyncio.get_running_loop()

        def answer() -> None:
            relays.answers = True
            relays.watch(Version(13))

        relays.answers = False
        loop.call_later(2.0, answer)
        assert await relays.announcements.heard_of(Version(0)) == Heard("announced")
        relays = Relays()
        relays.answers, began = False, loop.time()
        assert await relays.announcements.heard_of(Version(0)) == Heard("nobody")
        assert WAIT_S <= loop.time() - began < WAIT_S + 1
        relays = Relays()
        relays.exists = False
        assert await relays.announcements.heard_of(Version(24)) == Heard("nobody")

    play(scene)
