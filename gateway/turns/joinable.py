"""The turns that a retry may join: those in flight, and those that ended a short while ago.

Invariants:
- a turn that has ended stays for `idempotency_window_s`, complete or not, within `KEPT_TURNS_MAX` and `KEPT_BYTES_MAX`,
  prompts included (the oldest go first);
- the turns of one request without a session stay together: none is forgotten while another runs or has its window;
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
"""Memory of turns that have ended: 4,000 with prompts of 32k tokens, or 10,000 with 1,300 generated ones each."""
PROMPT_TOKEN_BYTES, TOKEN_BYTES, ALTERNATIVE_BYTES = 8, 80, 140
"""Memory of a token: in a prompt a reference to a shared id; else an id, a logprob, and references to both; and of each
of its `top_logprobs`: an object with both."""

REFUSED_MAX = 10_000
"""Requests that were refused before they had a turn, and have not come again; the oldest are forgotten first."""

_Bucket = tuple[str, str]


class JoinableTurns:
    def __init__(self, window_s: float) -> None:
        self.running: dict[TurnId, RunningTurn] = {}
        self._window_s = window_s
        self._over: OrderedDict[TurnId, tuple[RunningTurn, float]] = OrderedDict()
        self._over_bytes = 0
        self._bytes: dict[TurnId, int] = {}  # as counted at its end: a stop string may shorten it later
        self._refused: OrderedDict[tuple[_Bucket, str], int] = OrderedDict()
        self._swept: defaultdict[SessionId | None, set[str]] = defaultdict(set)  # digests of forgotten turns
        self._first: dict[SessionId, RunningTurn] = {}  # of a session that an unnamed call made: that call's turn
        self._buckets: defaultdict[_Bucket, dict[TurnId, RunningTurn]] = defaultdict(dict)

    def begin(self, turn: RunningTurn) -> None:
        turn_id = turn.request.turn_id
        self._forget(turn_id)
        self.running[turn_id] = turn
        self._keep(turn)

    def end(self, turn: RunningTurn, now: float) -> None:
        """The turn has ended; from `now` on it is kept for the window."""
        turn_id = turn.request.turn_id
        self.running.pop(turn_id, None)
        self._over[turn_id] = (turn, now + self._window_s)
        self._over_bytes += (size := _size(turn)) - self._bytes.pop(turn_id, 0)
        self._bytes[turn_id] = size
        self._keep(turn)

    def _keep(self, turn: RunningTurn) -> None:
        self._buckets[_bucket_of(turn)][turn.request.turn_id] = turn
        if turn.session.spec.unnamed and turn.request.origin.unnamed:
            self._first[turn.request.session_id] = turn

    def find(self, call: Call, choices: int = 1) -> list[RunningTurn] | None:
        """The turns, one a choice, that the request joins. Raises Conflict as `core.retries.join` does."""
        bucket = self._buckets.get(_bucket(call.session_id, call.idempotency_key, call.digest), {})
        # Without a key only turns of the same body can be its own: the others of a long session are skipped.
        any_body = call.idempotency_key is not None
        earlier = [
            _known(found)
            for first, turn in bucket.items()
            if turn.request.choice == 0
            and (any_body or turn.request.origin.digest == call.digest)
            # A key that was used for another number of answers was used for another request, which `join` refuses.
            and (found := _choices(bucket, first, choices) or ([turn] if any_body else None)) is not None
        ]
        others = bool(self._refused.get(_refused(call))) or call.digest in self._swept.get(call.session_id, ())
        turn_id = join(call, earlier, others=others)
        return None if turn_id is None else _choices(bucket, turn_id, choices)

    def refused(self, call: Call) -> None:
        """The request was refused before it had a turn: when it comes again, no other request's turn is its own."""
        name = _refused(call)
        self._refused[name] = self._refused.pop(name, 0) + 1
        while len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)

    def came_again(self, call: Call) -> None:
        """The request joined nothing, and gets a turn of its own."""
        name = _refused(call)
        if call.retried and (left := self._refused.pop(name, 0) - 1) > 0:
            self._refused[name] = left

    def of_session(self, session_id: SessionId) -> list[RunningTurn]:
        first = self._first.get(session_id)
        return [*([] if first is None else [first]), *self._buckets.get(("session", session_id), {}).values()]

    def forget_session(self, session_id: SessionId) -> None:
        for turn in self.of_session(session_id):
            self._forget(turn.request.turn_id)
        self._swept.pop(session_id, None)

    def sweep(self, now: float) -> Iterator[RunningTurn]:
        """Forgets turns whose window is over, or that are too many, and yields them."""
        size, num = self._over_bytes, len(self._over)
        gone: list[RunningTurn] = []
        for turn, until in self._over.values():
            crowded = num - len(gone) > KEPT_TURNS_MAX or size > KEPT_BYTES_MAX
            if until > now and not crowded:
                break
            if turn.session.spec.ephemeral and self._needed(turn, now, crowded=crowded):
                continue
            gone.append(turn)
            size -= self._bytes[turn.request.turn_id]
        for turn in gone:
            self._forget(turn.request.turn_id)
            if (session_id := _named(turn)) is not None:
                self._swept[session_id].add(turn.request.origin.digest)
            yield turn

    def _needed(self, turn: RunningTurn, now: float, *, crowded: bool) -> bool:
        """Another choice of the same request, without a session, runs or has its window."""
        others = [
            other
            for other in self._buckets[_bucket_of(turn)].values()
            if other.request.session_id == turn.request.session_id and other is not turn
        ]
        return any(
            other.request.turn_id in self.running
            or (not crowded and self._over.get(other.request.turn_id, (None, 0.0))[1] > now)
            for other in others
        )

    def _forget(self, turn_id: TurnId) -> None:
        turn, _ = self._over.pop(turn_id, (None, 0.0))
        if turn is None:
            return
        self._over_bytes -= self._bytes.pop(turn_id)
        if self._first.get(turn.request.session_id) is turn:
            del self._first[turn.request.session_id]
        bucket = _bucket_of(turn)
        self._buckets[bucket].pop(turn_id, None)
        if not self._buckets[bucket]:
            del self._buckets[bucket]


def _size(turn: RunningTurn) -> int:
    record = turn.record
    sampled = len(record.token_ids) * TOKEN_BYTES + sum(map(len, record.top_logprobs)) * ALTERNATIVE_BYTES
    return len(turn.request.prompt_ids) * PROMPT_TOKEN_BYTES + sampled


def _named(turn: RunningTurn) -> SessionId | None:
    """The session that the turn's request named."""
    spec = turn.session.spec
    return None if spec.ephemeral or (spec.unnamed and turn.request.origin.unnamed) else turn.request.session_id


def _bucket_of(turn: RunningTurn) -> _Bucket:
    origin = turn.request.origin
    return _bucket(_named(turn), origin.idempotency_key, origin.digest)


def _bucket(session_id: SessionId | None, key: str | None, digest: str) -> _Bucket:
    if session_id is not None:
        return ("session", session_id)
    return ("digest", digest) if key is None else ("key", key)


def _refused(call: Call) -> tuple[_Bucket, str]:
    return _bucket(call.session_id, call.idempotency_key, call.digest), call.digest


def _choices(bucket: Mapping[TurnId, RunningTurn], first: TurnId, choices: int) -> list[RunningTurn] | None:
    """All of one request's; None when one of them is not there."""
    found = [bucket.get(choice_id(first, choice)) for choice in range(choices)]
    turns = [turn for turn in found if turn is not None]
    return turns if len(turns) == choices else None


def _known(choices: Sequence[RunningTurn]) -> Known:
    """A request's turns as one."""
    first = choices[0]
    origin = first.request.origin
    attention = attention_of([turn.audience.attention for turn in choices])
    attempt = max(turn.attempt for turn in choices)
    return Known(first.request.turn_id, origin.digest, _named(first), origin.idempotency_key, attention, attempt)
