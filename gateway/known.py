"""The turns that a request may join: those under way, and those that were over a short while ago.

Invariants:
- a turn that is over stays for `idempotency_window_s`, whole or with what it had, within `KEPT_TURNS_MAX` and
  `KEPT_TOKENS_MAX` (the oldest go first);
- a request is compared only with the turns of its session, of its idempotency key, or of its own digest.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from gateway.core.joining import Call, Known, join
from gateway.core.types import SessionId, TurnId
from gateway.turns import Run

KEPT_TURNS_MAX = 10_000
KEPT_TOKENS_MAX = 20_000_000
"""Generated tokens of turns that are over: about 1.5 GB at worst, with their logprobs."""

_Bucket = tuple[str, str]


class KnownTurns:
    def __init__(self, window_s: float) -> None:
        self.running: dict[TurnId, Run] = {}
        self._window_s = window_s
        self._over: OrderedDict[TurnId, tuple[Run, float]] = OrderedDict()
        self._over_tokens = 0
        self._buckets: defaultdict[_Bucket, dict[TurnId, Run]] = defaultdict(dict)

    def begin(self, run: Run) -> None:
        turn_id = run.request.turn_id
        self._forget(turn_id)
        self.running[turn_id] = run
        self._buckets[_bucket_of(run)][turn_id] = run

    def end(self, run: Run, now: float) -> None:
        """It is over; from `now` on it is kept for the window."""
        turn_id = run.request.turn_id
        self.running.pop(turn_id, None)
        self._over[turn_id] = (run, now + self._window_s)
        self._over_tokens += len(run.record.token_ids)
        self._buckets[_bucket_of(run)][turn_id] = run

    def find(self, call: Call, choice: int = 0) -> Run | None:
        """The turn that this choice of the request joins. Raises Conflict as `core.joining.join` does."""
        bucket = self._buckets.get(_bucket(call.session_id, call.idempotency_key, call.digest), {})
        turn_id = join(call, [_known(run) for run in bucket.values() if run.request.choice == choice])
        return None if turn_id is None else bucket[turn_id]

    def of_session(self, session_id: SessionId) -> list[Run]:
        return list(self._buckets.get(("session", session_id), {}).values())

    def forget_session(self, session_id: SessionId) -> None:
        for run in self.of_session(session_id):
            self._forget(run.request.turn_id)

    def sweep(self, now: float) -> Iterator[Run]:
        """Drops and tells the turns whose window is over, or that are too many."""
        while self._over:
            turn_id, (run, until) = next(iter(self._over.items()))
            crowded = len(self._over) > KEPT_TURNS_MAX or self._over_tokens > KEPT_TOKENS_MAX
            if until > now and not crowded:
                return
            self._forget(turn_id)
            yield run

    def _forget(self, turn_id: TurnId) -> None:
        run, _ = self._over.pop(turn_id, (None, 0.0))
        if run is None:
            return
        self._over_tokens -= len(run.record.token_ids)
        bucket = _bucket_of(run)
        self._buckets[bucket].pop(turn_id, None)
        if not self._buckets[bucket]:
            del self._buckets[bucket]


def _named(run: Run) -> SessionId | None:
    return None if run.session.spec.ephemeral else run.request.session_id


def _bucket_of(run: Run) -> _Bucket:
    origin = run.request.origin
    return _bucket(_named(run), origin.idempotency_key, origin.digest)


def _bucket(session_id: SessionId | None, key: str | None, digest: str) -> _Bucket:
    if session_id is not None:
        return ("session", session_id)
    return ("digest", digest) if key is None else ("key", key)


def _known(run: Run) -> Known:
    origin = run.request.origin
    return Known(run.request.turn_id, origin.digest, _named(run), origin.idempotency_key, run.audience.attention)
