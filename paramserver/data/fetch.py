"""Brings one version into one place: several stripes, each taking the next wanted chunk from a source that answers.

Invariants:
- every byte counts only after its chunk's digest matched;
- a source that breaks, falls silent, refuses or sends wrong bytes is bypassed for a while, not for ever;
  the rest is requested from the next one up, from the byte where the last one stopped;
- stripes spread over the sources of one tier, different chunks from each;
- the byte loop holds no policy: `TransferState` decides what to request, `sources` and `Bypasses` from whom.

Bypass is local and needs no agreement. A relay whose upstream died or hangs goes on with the relay before that one, for
which it is one more peer; the relays behind it notice nothing. The dead relay is removed from the plan when its lease
ends, and plans hold for new versions only, so nobody's order changes under a version that is on its way. A source that
was only slow to answer is tried again after a while, at the same place in the order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from paramserver.core.bypass import Bypasses
from paramserver.core.records import ChunkMap, digest
from paramserver.core.transfer import ActiveTime, TransferState, Want
from paramserver.data.frames import HEARTBEAT_S, Greeting
from paramserver.data.transport import Arrived, Begun, Breakable, Dial, Link, Source
from protos.errors import Corrupt, LaminarError, OutOfCapacity, Unavailable

log = logging.getLogger(__name__)

WINDOW = 4  # requests outstanding per stripe: keeps the pipe full over a round trip, wastes little on a break
STRIPES_MAX = 8


class Sink(Protocol):
    """Where chunks go: a snapshot in the pool, or files that `pull` writes."""

    chunks: ChunkMap

    def place(self, index: int) -> memoryview: ...
    def present(self, index: int, chunk_digest: bytes) -> None: ...
    def missing(self) -> list[int]: ...


Tiers = Sequence[Sequence[Source]]
"""Sources, best first; those of one tier are equally good."""


class Fetch:
    """One version on its way into `sink`. `run` blocks; `cancel` may come from any thread."""

    def __init__(
        self,
        sink: Sink,
        greeting: Greeting,
        sources: Callable[[], Tiers],
        dial: Dial,
        *,
        num_stripes: int = 2,
        patience_s: float | None = None,
    ) -> None:
        self._sink = sink
        self._greeting = greeting
        self._sources = sources
        self._dial = dial
        self._patience_s = patience_s
        missing = set(sink.missing())
        self._state = TransferState(sink.chunks, [i for i in range(sink.chunks.num_chunks) if i not in missing])
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._bypasses = Bypasses()
        self._cancelled = threading.Event()
        self._links: set[Breakable] = set()  # in use, or being made
        self._failure: BaseException | None = None
        self._last_error: LaminarError | None = None
        self._progress_at = time.monotonic()
        self._active = ActiveTime()
        self._active_bytes = 0
        self.upstream = ""
        self.rtt_s = 0.0
        self.transport = ""
        self.num_stripes = num_stripes

    @property
    def bytes_done(self) -> int:
        """Bytes in place, those not yet verified included."""
        with self._mutex:
            return self._state.bytes_here

    @property
    def idle_s(self) -> float:
        """Seconds since the last byte came."""
        return time.monotonic() - self._progress_at

    @property
    def rate_bytes_s(self) -> float:
        """How fast bytes came, over all stripes, while there were some to come, verification included; 0: none came."""
        with self._mutex:
            seconds = self._active.seconds
            return self._active_bytes / seconds if seconds else 0.0

    def bypassed(self) -> set[str]:
        """Sources bypassed now."""
        with self._mutex:
            return self._bypasses.at(time.monotonic())

    @property
    def num_bypasses(self) -> int:
        return self._bypasses.num_failures

    def cancel(self) -> None:
        """A link may wait for a publisher who is slow, for bytes that trickle, or for its welcome: each is broken off.
        One that is still connecting, or opening, ends within seconds by itself."""
        self._cancelled.set()
        with self._changed:
            for link in self._links:
                link.break_off()
            self._changed.notify_all()

    def run(self) -> bool:
        """True when every chunk is present and verified, False when cancelled. Unavailable past `patience_s`."""
        tiers = self._sources()
        num_stripes = min(max(self.num_stripes, len(tiers[0]) if tiers else 0), STRIPES_MAX)
        self.num_stripes = min(num_stripes, max(1, self._sink.chunks.num_chunks))
        stripes = [threading.Thread(target=self._guarded, args=(n,), daemon=True) for n in range(self.num_stripes)]
        started = []
        try:
            for thread in stripes:
                thread.start()
                started.append(thread)
        except BaseException:  # no thread to be had: the others must not write to memory that is given back now
            self.cancel()
            raise
        finally:
            for thread in started:
                thread.join()
        if self._failure is not None:
            raise self._failure
        return self._state.complete

    def _guarded(self, number: int) -> None:
        try:
            self._stripe(number)
        except BaseException as error:  # noqa: BLE001
            self._failure = error  # `run` raises it, in the thread that waits for this one
            self.cancel()

    def _over(self) -> bool:
        return self._state.complete or self._cancelled.is_set()

    def _stripe(self, number: int) -> None:
        stripe = f"stripe-{number}"
        while not self._over():
            source = self._pick(number)
            if source is None:
                self._check_patience()
                self._cancelled.wait(HEARTBEAT_S)
                continue
            try:
                self._use(source, stripe)
            except LaminarError as error:
                self._last_error = error
                self._bypass(source, stripe, error)

    def _use(self, source: Source, stripe: str) -> None:
        with self._breaking_off() as begun:
            link = self._link(source, begun)
            try:
                begun(link)
                self.upstream, self.rtt_s, self.transport = source.name, link.rtt_s, link.transport
                self._pull(link, stripe)
            finally:
                link.close()

    @contextlib.contextmanager
    def _breaking_off(self) -> Iterator[Begun]:
        """What is told to it is broken off once the fetch is cancelled."""
        mine: set[Breakable] = set()

        def begun(link: Breakable) -> None:
            mine.add(link)
            with self._mutex:
                self._links.add(link)
                if self._cancelled.is_set():  # `cancel` has been here already
                    link.break_off()

        try:
            yield begun
        finally:
            with self._mutex:
                self._links -= mine

    def _link(self, source: Source, begun: Begun) -> Link:
        """A link to the source. Whatever goes wrong in making it costs this source alone."""
        try:
            return self._dial(source, self._greeting, begun)
        except LaminarError:
            raise
        except Exception as error:
            raise Unavailable(f"no link to {source.name}: {type(error).__name__}: {error}") from error

    def _pull(self, link: Link, stripe: str) -> None:
        """Keeps up to WINDOW requests on the link until nothing is wanted any more."""
        outstanding = 0
        while not self._over():
            while outstanding < WINDOW:
                with self._mutex:
                    want = self._state.take(stripe)
                if want is None:
                    break
                link.request(want)
                outstanding += 1
            if outstanding == 0:
                link.alive()
                with self._changed:  # another stripe may yet break and give its chunks back
                    self._changed.wait_for(self._over, HEARTBEAT_S)
                continue
            arrived = link.receive(self._sink.place, self._received)
            again = self._verify(arrived)
            if again is not None:
                log.warning("chunk %d came with a wrong digest; %s is to check its own", again.index, self.upstream)
                link.request(again)
                continue
            outstanding -= 1
            self._note_active(arrived)

    def _received(self, index: int, upto_byte: int) -> None:
        with self._mutex:
            self._state.received(index, upto_byte)
        self._progress_at = time.monotonic()
        if self._cancelled.is_set():
            raise Unavailable("the transfer was cancelled")

    def _verify(self, arrived: Arrived) -> Want | None:
        """Checks a chunk; a request to repeat at the same sender when it is wrong. Corrupt the second time.

        A mismatch has two causes: bytes damaged on the way, or bad memory at the sender. The second request makes the
        sender hash its own chunk first, and withdraw as a holder when that is bad. A sender whose memory is good sends
        the chunk again; when it is wrong once more, the link is at fault.
        """
        index, expected = arrived.index, arrived.digest
        found = arrived.found if arrived.found is not None else digest(self._sink.place(index))
        if found != expected:
            with self._changed:
                again = self._state.recheck(index)
                if again is not None:
                    return again
                self._state.mismatched(index)
            raise Corrupt(f"chunk {index} came with a wrong digest")
        self._sink.present(index, expected)
        with self._changed:
            self._state.verified(index)
            self._changed.notify_all()
        return None

    def _note_active(self, arrived: Arrived) -> None:
        with self._mutex:
            self._active_bytes += arrived.num_bytes
            self._active.add(arrived.began_at, time.monotonic())

    def _pick(self, number: int) -> Source | None:
        with self._mutex:
            return self._bypasses.pick(self._sources(), number, time.monotonic())

    def _bypass(self, source: Source, stripe: str, error: LaminarError) -> None:
        if self._over():
            return
        with self._changed:
            back = self._state.broken(stripe)
            self._changed.notify_all()
            if isinstance(error, OutOfCapacity):
                self._bypasses.busy(source.name, time.monotonic())
                return
            self._bypasses.failed(source.name, time.monotonic())
        where = ", ".join(f"chunk {want.index} from byte {want.from_byte}" for want in back)
        log.info("bypassing %s: %s; fetching %s elsewhere", source.name, error, where or "nothing that was in flight")

    def _check_patience(self) -> None:
        if self._patience_s is not None and time.monotonic() - self._progress_at > self._patience_s:
            last = self._last_error
            raise Unavailable(f"no byte came for {self._patience_s} s; last: {last}") from last
