"""Versions of strict sessions are pinned at relays: leases, bounded, renewed, and said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.config import EngineSpec
from gateway.core.endings import Finish
from gateway.core.fleet.config import FleetConfig
from gateway.core.types import EngineName, Version
from gateway.fleet.pins import FALLBACK_HOLDER, TTL_S
from paramserver.client import Lease, RelayClient
from protos.errors import OutOfCapacity, Unavailable
from tests.support.fake_relay import FakeRelay, relay
from tests.support.gateway_shell import Shell, read, shell
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_sessions.test_versions import serve

pytestmark = pytest.mark.slow  # leases are renewed and run out by the clock


@asynccontextmanager
async def one_engine(directory: Path, **fleet: Any) -> AsyncIterator[tuple[Shell, FakeRelay, ScriptedEngine]]:
    settings = FleetConfig(version_hold_s=0.0, **fleet)
    async with (
        relay() as (holder, address),
        ScriptedEngine("e0") as e0,
        shell(directory, e0, relay=address, fleet=settings, queue_timeout_s=0.3) as found,
    ):
        await serve(found, holder, 1, e0)
        yield found, holder, e0


async def test_a_strict_sessions_version_is_pinned_for_the_fleet_until_it_ends(tmp_path: Path) -> None:
    async with one_engine(tmp_path) as (found, holder, e0):
        strict, other = found.session(on_version_loss="strict"), found.session()
        await read(found.run(other))
        await read(found.run(strict))
        await until(lambda: holder.leases == ["gateway/sessions@1x2"], "its pin, for two copies")
        await serve(found, holder, 2, e0)
        await found.endings.abandon(other.session_id, "over")
        await found.fleet.pins.update(time.monotonic())
        assert holder.leases == ["gateway/sessions@1x2"], "one engine serves version 2 now, and the pin stays"
        await found.endings.finish_rewarded(strict.session_id, Finish(reward=1.0))
        await until(lambda: holder.leases == [], "nobody needs it any more")


async def test_no_strict_session_begins_beyond_the_bound_and_is_told_why(tmp_path: Path) -> None:
    async with one_engine(tmp_path, pinned_versions_max=1) as (found, holder, e0):
        await read(found.run(found.session(on_version_loss="strict")))
        await serve(found, holder, 2, e0)
        with pytest.raises(OutOfCapacity, match="insist on versions 1 already, and at most 1 are kept for them"):
            found.session(version=Version(2), on_version_loss="strict")
        with pytest.raises(OutOfCapacity, match=r"within 0\.3 s: sessions insist on versions 1 already"):
            await read(found.run(found.session(on_version_loss="strict")))
        await read(found.run(found.session()))
        found.session(version=Version(1), on_version_loss="strict")


async def test_a_pin_that_was_taken_away_is_made_again_and_the_timeline_says_so(tmp_path: Path) -> None:
    async with one_engine(tmp_path) as (found, holder, _):
        await read(found.run(found.session(on_version_loss="strict")))
        await until(lambda: bool(found.fleet.pins.pinned), "its pin")
        holder.leases.clear()
        await found.fleet.pins.update(time.monotonic() + TTL_S / 2)
        assert holder.leases == ["gateway/sessions@1x2"]
        holder.leases.clear()
        holder.retire(1)
        await until(lambda: not found.fleet.relays.holders(Version(1)), "the relay told that it is gone")
        await found.fleet.pins.update(time.monotonic() + TTL_S)
        assert found.fleet.pins.pinned == {}
        told = [e.fields["state"] for e in found.timeline.read()[1] if e.kind == "pin"]
        assert told == ["pinned", "lost", "pinned", "lost"]


async def test_a_restarted_gateway_pins_the_versions_of_its_sessions(tmp_path: Path) -> None:
    async with relay() as (holder, address), ScriptedEngine("e0") as e0:
        fleet = FleetConfig(version_hold_s=0.0)
        async with shell(tmp_path, e0, relay=address, fleet=fleet) as found:
            await serve(found, holder, 1, e0)
            await read(found.run(found.session("s", on_version_loss="strict")))
            await until(lambda: bool(found.fleet.pins.pinned), "its pin")
        assert holder.leases == ["gateway/sessions@1x2"], "for the next life"
        holder.leases.clear()
        async with shell(tmp_path, e0, relay=address, fleet=fleet) as found:
            await until(lambda: holder.leases == ["gateway/sessions@1x2"], "its pin again")


async def test_a_relay_that_is_let_go_in_the_middle_of_a_pin_ends_nothing_else(tmp_path: Path) -> None:
    """As when its last engine is taken out; with another engine beside the same relay the version is pinned again."""
    async with one_engine(tmp_path) as (found, holder, e0):
        await read(found.run(found.session(on_version_loss="strict")))
        await until(lambda: bool(found.fleet.pins.pinned), "its pin")
        holder.leases.clear()
        holder.answering.clear()
        looking = asyncio.create_task(found.fleet.pins.update(time.monotonic() + TTL_S))
        await until(lambda: holder.asked, "a call under way")
        await found.fleet.remove(EngineName("e0"))
        await looking
        assert found.fleet.pins.pinned == {}
        holder.answering.set()
        found.fleet.add(EngineSpec("e0", "vllm", e0.url, f"127.0.0.1:{holder.port}"))
        await until(lambda: bool(found.fleet.pins.pinned), "its pin again")


async def test_what_goes_wrong_with_one_version_holds_up_no_other_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with one_engine(tmp_path) as (found, holder, e0):
        acquire, broken = RelayClient.acquire, True

        async def acquires(client: RelayClient, model: str, version: int | None = None, **how: Any) -> Lease:
            if broken and version == 1 and how["holder"] == "gateway/sessions":
                raise KeyError("nobody thought of it")
            return await acquire(client, model, version, **how)

        monkeypatch.setattr(RelayClient, "acquire", acquires)
        await read(found.run(found.session(on_version_loss="strict")))
        await serve(found, holder, 2, e0)
        await read(found.run(found.session(on_version_loss="strict")))
        await until(lambda: holder.leases == ["gateway/sessions@2x2"], "the pin of version 2")
        broken = False
        await until(lambda: len(holder.leases) == 2, "the pin of version 1")
    assert caplog.text.count("is not pinned or released as it should be") == 1


async def test_a_relay_that_stops_answering_is_one_warning_and_stands_in_the_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever each attempt says: a name has several addresses, and the attempts name them in turn."""
    asked, acquire = 0, RelayClient.acquire

    async def fails(client: RelayClient, model: str, version: int | None = None, **how: Any) -> Lease:
        nonlocal asked
        if how["holder"] != FALLBACK_HOLDER:
            return await acquire(client, model, version, **how)
        asked += 1
        raise Unavailable(f"no relay answers at {client.address}: attempt {asked}")

    async with one_engine(tmp_path) as (found, holder, e0):
        assert found.fleet.relays.unreachable() == []
        monkeypatch.setattr(RelayClient, "acquire", fails)
        await serve(found, holder, 2, e0)
        await until(lambda: asked > 2, "it was tried again")
        address = f"127.0.0.1:{holder.port}"
        await holder.stop()
        await until(lambda: found.fleet.relays.unreachable() == [address], "it is known to be gone")
    said = [r for r in caplog.records if r.name == "gateway.fleet.pins"]
    assert len([r for r in said if "is not pinned or released yet" in r.getMessage()]) == 1
    assert not any(r.exc_info for r in said), "no stack for a relay that does not answer"
