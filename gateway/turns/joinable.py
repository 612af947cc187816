"""The turns that a request may join: those under way, and those that were over a short while ago.

Invariants:
- a turn that is over stays for `idempotency_window_s`, whole or with what it had, within `KEPT_TURNS_MAX` and
  `KEPT_BYTES_MAX`, prompts included (the oldest go first);
- the turns of one request without a session stay together: none goes while another runs or has its window;
- a request is compared only with the turns of its session, of its idempotency key, or of its own digest.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from gateway.core.retries import Call, Known, attention_of, choice_id, join
from gateway.core.types import SessionId, TurnId
from gateway.turns.running import RunningTurn

KEPT_TURNS_MAX = 10_000
KEPT_BYTES_MAX = 1 << 30
"""Of turns that are over: 4,000 with prompts of 32k tokens, or 10,000 with 1,300 generated ones each."""
PROMPT_TOKEN_BYTES, TOKEN_BYTES = 8, 80
"""A token: of a prompt a reference to an id that all prompts share; else an id, a logprob, and references to both."""

REFUSED_MAX = 10_000
"""Bodies that were refused before they had a turn, and have not come again; the oldest are forgotten first."""

_Bucket = tuple[str, str]


class JoinableTurns:
    def __init__(self, window_s: float) -> None:
        self.running: dict[TurnId, RunningTurn] = {}
        self._window_s = window_s
        self._over: OrderedDict[TurnId, tuple[RunningTurn, float]] = OrderedDict()
        self._over_bytes = 0
        self._bytes: dict[TurnId, int] = {}  # of each that is over, as counted: a stop string may shorten it later
        self._refused: OrderedDict[tuple[_Bucket, str], int] = OrderedDict()
        self._swept: defaultdict[SessionId | None, set[str]] = defaultdict(set)  # what live sessions asked before
        self._buckets: defaultdict[_Bucket, dict[TurnId, RunningTurn]] = defaultdict(dict)

    def begin(self, run: RunningTurn) -> None:
        turn_id = run.request.turn_id
        self._forget(turn_id)
        self.running[turn_id] = run
        self._buckets[_bucket_of(run)][turn_id] = run

    def end(self, run: RunningTurn, now: float) -> None:
        """It is over; from `now` on it is kept for the window."""
        turn_id = run.request.turn_id
        self.running.pop(turn_id, None)
        self._over[turn_id] = (run, now + self._window_s)
        self._over_bytes += (size := _size(run)) - self._bytes.pop(turn_id, 0)
        self._bytes[turn_id] = size
        self._buckets[_bucket_of(run)][turn_id] = run

    def find(self, call: Call, choices: int = 1) -> list[RunningTurn] | None:
        """The turns, one a choice, that the request joins. Raises Conflict as `core.joining.join` does."""
        bucket = self._buckets.get(_bucket(call.session_id, call.idempotency_key, call.digest), {})
        # Without a key only turns of the same body can be its own: the others of a long session are not looked at.
        any_body = call.idempotency_key is not None
        asked = [
            _known(found)
            for first, run in bucket.items()
            if run.request.choice == 0
            and (any_body or run.request.origin.digest == call.digest)
            and (found := _choices(bucket, first, choices)) is not None
        ]
        others = bool(self._refused.get(_refused(call))) or call.digest in self._swept.get(call.session_id, ())
        turn_id = join(call, asked, others=others)
        return None if turn_id is None else _choices(bucket, turn_id, choices)

    def refused(self, call: Call) -> None:
        """A request was refused before it had a turn: when it comes again, no other's turn is its own."""
        name = _refused(call)
        self._refused[name] = self._refused.pop(name, 0) + 1
        while len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)

    def came_again(self, call: Call) -> None:
        """It joined nothing, and gets a turn of its own."""
        name = _refused(call)
        if call.retried and (left := self._refused.pop(name, 0) - 1) > 0:
            self._refused[name] = left

    def of_session(self, session_id: SessionId) -> list[RunningTurn]:
        return list(self._buckets.get(("session", session_id), {}).values())

    def forget_session(self, session_id: SessionId) -> None:
        for run in self.of_session(session_id):
            self._forget(run.request.turn_id)
        self._swept.pop(session_id, None)

    def sweep(self, now: float) -> Iterator[RunningTurn]:
        """Drops and tells the turns whose window is over, or that are too many."""
        size, num = self._over_bytes, len(self._over)
        gone: list[RunningTurn] = []
        for run, until in self._over.values():
            crowded = num - len(gone) > KEPT_TURNS_MAX or size > KEPT_BYTES_MAX
            if until > now and not crowded:
                break
            if run.session.spec.ephemeral and self._needed(run, now, crowded=crowded):
                continue
            gone.append(run)
            size -= self._bytes[run.request.turn_id]
        for run in gone:
            self._forget(run.request.turn_id)
            if (session_id := _named(run)) is not None:
                self._swept[session_id].add(run.request.origin.digest)
            yield run

    def _needed(self, run: RunningTurn, now: float, *, crowded: bool) -> bool:
        """Another choice of its request, without a session, runs or has its window."""
        others = [
            other
            for other in self._buckets[_bucket_of(run)].values()
            if other.request.session_id == run.request.session_id and other is not run
        ]
        return any(
            other.request.turn_id in self.running
            or (not crowded and self._over.get(other.request.turn_id, (None, 0.0))[1] > now)
            for other in others
        )

    def _forget(self, turn_id: TurnId) -> None:
        run, _ = self._over.pop(turn_id, (None, 0.0))
        if run is None:
            return
        self._over_bytes -= self._bytes.pop(turn_id)
        bucket = _bucket_of(run)
        self._buckets[bucket].pop(turn_id, None)
        if not self._buckets[bucket]:
            del self._buckets[bucket]


def _size(run: RunningTurn) -> int:
    return len(run.request.prompt_ids) * PROMPT_TOKEN_BYTES + len(run.record.token_ids) * TOKEN_BYTES


def _named(run: RunningTurn) -> SessionId | None:
    return None if run.session.spec.ephemeral else run.request.session_id


def _bucket_of(run: RunningTurn) -> _Bucket:
    origin = run.request.origin
    return _bucket(_named(run), origin.idempotency_key, origin.digest)


def _bucket(session_id: SessionId | None, key: str | None, digest: str) -> _Bucket:
    if session_id is not None:
        return ("session", session_id)
    return ("digest", digest) if key is None else ("key", key)


def _refused(call: Call) -> tuple[_Bucket, str]:
    return _bucket(call.session_id, call.idempotency_key, call.digest), call.digest


def _choices(bucket: Mapping[TurnId, RunningTurn], first: TurnId, choices: int) -> list[RunningTurn] | None:
    """All of one request's; None when one of them is not there."""
    found = [bucket.get(choice_id(first, choice)) for choice in range(choices)]
    runs = [run for run in found if run is not None]
    return runs if len(runs) == choices else None


def _known(choices: Sequence[RunningTurn]) -> Known:
    """A request's turns as one."""
    first = choices[0]
    origin = first.request.origin
    attention = attention_of([run.audience.attention for run in choices])
    attempt = max(run.attempt for run in choices)
    return Known(first.request.turn_id, origin.digest, _named(first), origin.idempotency_key, attention, attempt)
