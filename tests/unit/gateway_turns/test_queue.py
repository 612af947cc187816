"""Who goes before whom in the queue for engines: sessions that have begun, prompts that need much room, contexts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.state import TurnLoad
from gateway.core.placing.scheduler import Demand, Placement, place
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, SessionId, TurnId
from gateway.fleet import places
from protos.errors import OutOfCapacity
from tests.support.gateway_shell import Shell, check_whole, read, shell
from tests.support.scripted_engine import BLOCK_TOKENS, BLOCKS, ScriptedEngine, until

E0 = EngineName("e0")
KV_TOKENS = BLOCKS * BLOCK_TOKENS
TOGETHER = 100


@contextlib.asynccontextmanager
async def waiting(
    found: Shell, session: SessionState, tokens: int = 3, name: str = ""
) -> AsyncIterator[asyncio.Task[Placement]]:
    """A turn in the queue; it leaves it at the end."""
    before = found.fleet.statistics().queued
    demand = Demand(session, tokens, turn_id=TurnId(name or f"turn-{session.session_id}"))
    task = asyncio.create_task(found.fleet.places.place(demand, resumed=False, timeout_s=60.0))
    await until(lambda: found.fleet.statistics().queued > before or task.done(), "a queued turn")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def occupy(found: Shell, tokens: int, name: str = "first") -> None:
    found.fleet.places.enter(E0, TurnLoad(TurnId(name), SessionId("other"), tokens, tokens))


async def test_a_session_that_has_begun_goes_before_new_ones_and_has_a_place_in_the_queue(tmp_path: Path) -> None:
    one = FleetConfig(max_running=1)
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, fleet=one, queue_max=2) as found:
        live = found.session("live")
        await read(found.run(live))
        occupy(found, 3)
        async with contextlib.AsyncExitStack() as stack:
            new = [await stack.enter_async_context(waiting(found, found.session(f"new{i}"))) for i in range(2)]
            with pytest.raises(OutOfCapacity, match="2 turns wait for an engine already"):
                await found.fleet.places.place(Demand(found.session("third"), 3), resumed=False, timeout_s=60.0)
            going_on = await stack.enter_async_context(waiting(found, live))
            assert not going_on.done(), "new ones that wait refuse it nothing"
            found.fleet.places.leave(E0, TurnId("first"))
            assert (await going_on).engine == "e0"
            assert [task.done() for task in new] == [False, False]
            found.fleet.places.leave(E0, TurnId("turn-live"))
            assert (await new[0]).engine == "e0"


async def test_a_session_that_has_begun_waits_for_nobody_on_an_idle_engine(tmp_path: Path) -> None:
    """New ones wait for the trainer; a turn of a live session does not queue behind them."""
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, queue_max=3) as found:
        live = found.session("live")
        await read(found.run(live))
        found.trainer.requested(1, 0, 0)
        async with contextlib.AsyncExitStack() as stack:
            new = [await stack.enter_async_context(waiting(found, found.session(f"new{i}"))) for i in range(3)]
            run = found.run(live)
            check_whole(run, await read(run))
            assert [task.done() for task in new] == [False] * 3


async def test_a_prompt_that_needs_much_room_is_not_overtaken_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        live = found.session("live")
        await read(found.run(live))
        occupy(found, KV_TOKENS // 2)
        async with waiting(found, found.session("large"), KV_TOKENS // 2) as large:
            async with waiting(found, found.session("early"), 3) as early:
                await until(early.done, "it may go before for a while")
            monkeypatch.setattr(places, "RESERVE_AFTER_S", 0.0)
            found.fleet.reconcile()
            async with waiting(found, found.session("late"), 3) as late, waiting(found, live, 3) as going_on:
                assert (await going_on).engine == "e0", "who has begun does not wait for a new one"
                assert not late.done()
                [told] = [why for why in found.fleet.statistics().waiting_for if "kept for" in why]
                assert told == "open intakes are kept for a prompt that has waited long for their room"
                found.fleet.places.leave(E0, TurnId("first"))
                assert (await large).engine == "e0"
                assert (await late).engine == "e0"


async def test_a_small_engine_that_joins_takes_only_what_fits(tmp_path: Path) -> None:
    """Longer sessions go on where they fit; nobody is refused for the sake of the smallest context."""
    small = ScriptedEngine("small", answers={"/v1/models": '{"data": [{"id": "policy", "max_model_len": 16}]}'})
    async with ScriptedEngine("e0") as e0, small, shell(tmp_path, e0, small) as found:
        states = found.fleet.state.engines
        assert {name: state.context_tokens for name, state in states.items()} == {"e0": 4096, "small": 16}
        for _ in range(4):
            run = found.run(budget=20)
            check_whole(run, await read(run), 20)
        assert (len(e0.requests), len(small.requests)) == (4, 0)
        occupy(found, 3)
        run = found.run(budget=8)
        check_whole(run, await read(run), 8)
        assert len(small.requests) == 1, "what fits is taken"


async def test_a_turn_is_not_moved_where_it_would_outgrow_the_context(tmp_path: Path) -> None:
    small = ScriptedEngine("small", answers={"/v1/models": '{"data": [{"id": "policy", "max_model_len": 16}]}'})
    async with ScriptedEngine("e0", hold_at=4) as e0, small, shell(tmp_path, e0, small) as found:
        run = found.run(budget=20)
        reading = asyncio.create_task(read(run))
        await until(lambda: len(run.record.token_ids) == 4, "tokens")
        assert run.move(EngineName("small")) is None
        e0.go.set()
        check_whole(run, await reading, 20)


async def test_who_fits_nowhere_is_told_how_long_the_contexts_are(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, queue_timeout_s=0.05) as found:
        with pytest.raises(OutOfCapacity, match="have contexts of 4096 tokens at most, and it may come to 5003"):
            await read(found.run(budget=5000))


async def test_turns_that_leave_together_are_decided_on_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All turns of an engine leave it at once when it loads under them. A look at the whole queue for each that left,
    and each that came, would cost the square of their number: with a thousand turns, seconds."""
    decided = 0

    def counted(*given: Any) -> Any:
        nonlocal decided
        decided += 1
        return place(*given)

    monkeypatch.setattr(places, "place", counted)
    limits = FleetConfig(mode="inflight", max_running=TOGETHER)
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, fleet=limits) as found:
        engine, sessions = found.fleet.state.engines[E0], [found.session(f"s{i}") for i in range(TOGETHER)]
        demands = [Demand(session, 3, turn_id=TurnId(f"turn-{session.session_id}")) for session in sessions]
        for demand in demands:
            await found.fleet.places.place(demand, resumed=False, timeout_s=60.0)
        engine.to("refreshing")
        decided = 0

        async def go_on(demand: Demand) -> Placement:
            assert demand.turn_id is not None
            found.fleet.places.leave(E0, demand.turn_id)
            return await found.fleet.places.place(demand, resumed=True, timeout_s=60.0)

        waiting_again = [asyncio.create_task(go_on(demand)) for demand in demands]
        await until(lambda: found.fleet.statistics().queued == TOGETHER, "every turn in the queue")
        engine.to("serving")
        found.fleet.reconcile()
        assert {(await task).engine for task in waiting_again} == {"e0"}
        assert found.fleet.statistics().queued == 0
        assert decided <= 4 * TOGETHER
