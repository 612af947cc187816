"""What the dashboard shows, as tables: read from the gateway's parts, which it changes nothing of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import msgspec

from gateway.api.admin import receipt_report
from gateway.api.ui.feed import Event
from gateway.core.feed import Table, Tables
from gateway.core.phases import SessionRow, session_row
from gateway.core.sessions import SessionState
from gateway.experience import ExperienceBuffer
from gateway.fleet.fleet import Fleet
from gateway.operate.status import GatewayStatus
from gateway.repack.loop import Repacker
from gateway.runtime.clock import unix_s
from gateway.runtime.supervisor import rpc_result
from gateway.sessions.trainer import Trainer
from gateway.sessions.turn_service import TurnService
from gateway.store import Timeline
from gateway.store.timeline import TimelineEvent
from paramserver.client.relay import RelayStatus
from protos.errors import LaminarError

STEP_SESSIONS = 1024
"""Sessions read without a pause: some two milliseconds, in which no stream of the gateway goes on."""
REPORT_S = 0.5
"""Between two reports of the status: sessions are read more often."""
RELAYS_S = 2.0
"""Between two requests to a relay, each with this as its deadline."""
RELAYS_MAX = 64
RECEIPTS_SHOWN = 30
MOVES_SHOWN = 20
"""Of one receipt."""
EVENTS_SHOWN = 200
EVENTS_READ = 5000
"""Newest events among which those of the fleet are looked for."""
OF_SESSIONS = frozenset({"segment", "session"})
"""Kinds of events that the rows of sessions show."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What is read."""

    status: GatewayStatus
    fleet: Fleet
    sessions: TurnService
    trainer: Trainer
    repacker: Repacker
    buffer: ExperienceBuffer
    timeline: Timeline


class Reading:
    """Implements `feed.Source`. Owner of what relays reported last."""

    def __init__(self, parts: Parts, model: str) -> None:
        self._parts, self._model = parts, model
        self._relays: dict[str, Any] = {}
        self._reported_at = float("-inf")
        self._report: dict[str, Table] = {}

    async def read(self) -> Tables:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_S:
            self._reported_at, self._report = now, self._read_report()
        return {**self._report, "relays": dict(self._relays), "sessions": await self._read_sessions()}

    def _read_report(self) -> dict[str, Table]:
        """The status, with a row for each of its fields, and each engine a row of a table of its own."""
        fields = plain(self._parts.status.report())
        engines = {engine["name"]: engine for engine in fields.pop("engines")}
        fields["sampled"] = plain(self._parts.buffer.sampled_statistics())
        newest = islice(reversed(self._parts.repacker.book.receipts), RECEIPTS_SHOWN)
        return {
            "gateway": fields,
            "engines": engines,
            "rewards": self._parts.trainer.rewards.points(),
            "receipts": {str(one.number): _shortened(plain(receipt_report(one))) for one in newest},
        }

    async def _read_sessions(self) -> dict[str, SessionRow]:
        found: dict[str, SessionRow] = {}
        live = list(self._parts.sessions.live)
        for begin in range(0, len(live), STEP_SESSIONS):
            now = unix_s()
            for state in live[begin : begin + STEP_SESSIONS]:
                found[state.session_id] = self._row(state, now)
            await asyncio.sleep(0)
        return found

    def _row(self, state: SessionState, now_unix_s: float) -> SessionRow:
        if not state.running:
            return session_row(state, (), idle=self._parts.trainer.kept_by(state, now_unix_s) is None)
        running = self._parts.sessions.running
        turns = [running[turn_id] for turn_id in state.running if turn_id in running]
        return session_row(state, [(turn.record, turn.engine) for turn in turns])

    def events(self, after: int) -> tuple[int, Sequence[Event]]:
        newest = self._parts.timeline.newest(after, EVENTS_READ)
        found = [event for event in newest if event.kind not in OF_SESSIONS][-EVENTS_SHOWN:]
        return newest[-1].seq if newest else after, [_flat(event) for event in found]

    async def follow(self) -> None:
        """Queries the relays for their status, again and again."""
        self._reported_at, self._relays = float("-inf"), {}  # what was read for those who watched before is old
        while True:
            addresses = self._parts.fleet.relays.addresses()[:RELAYS_MAX]
            rows = await asyncio.gather(*map(self._query_relay, addresses))
            self._relays = dict(zip(addresses, rows, strict=True))
            await asyncio.sleep(RELAYS_S)

    async def _query_relay(self, address: str) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(RELAYS_S):
                status = await rpc_result(self._parts.fleet.relays.client(address).status())
        except KeyError:
            return {"error": "no engine is beside it any more"}
        except TimeoutError:
            return {"error": f"no response within {RELAYS_S:g} s"}
        except LaminarError as e:
            return {"error": str(e)}
        return relay_row(status, self._model)


def plain(report: Any) -> Any:
    """A copy in JSON's own types: a part may change what it reported."""
    return msgspec.to_builtins(report, str_keys=True)


def relay_row(status: RelayStatus, model: str) -> Mapping[str, Any]:
    """What is shown of a relay, and of the gateway's model there."""
    found = next((one for one in status.models if one.model == model), None)
    return {
        **{name: getattr(status, name) for name in ("relay", "transport", "draining", "trouble", "registry_reachable")},
        **{name: getattr(status, name) for name in ("pool_bytes", "used_bytes", "quarantined_bytes", "cut_off")},
        "transfers": [asdict(one) for one in status.transfers if one.model == model],
        "pins": [{"version": pin.version, "holder": pin.holder} for pin in status.pins if pin.model == model],
        "model": None if found is None else {k: v for k, v in asdict(found).items() if k not in ("sealed", "model")},
    }


def _shortened(receipt: dict[str, Any]) -> dict[str, Any]:
    moves = receipt["moves"]
    outcomes: dict[str, int] = {}
    for move in moves:
        outcomes[move["outcome"]] = outcomes.get(move["outcome"], 0) + 1
    return {**receipt, "num_moves": len(moves), "outcomes": outcomes, "moves": moves[:MOVES_SHOWN]}


def _flat(event: TimelineEvent) -> Event:
    """An event without the list of its moves, which may be thousands."""
    flat = event.flat()
    return {**flat, "moves": len(flat["moves"])} if isinstance(flat.get("moves"), list) else flat
