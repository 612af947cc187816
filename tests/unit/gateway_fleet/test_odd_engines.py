"""Engines that misbehave: each costs itself alone, and the gateway serves on with the others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gateway.app import Gateway
from gateway.core import faults
from gateway.core.fleet import refresh
from gateway.core.types import EngineName
from gateway.engines.base import EngineReport
from gateway.engines.connections import TETHER_READ_BYTES, until_broken
from gateway.engines.http import CONTROL_BYTES_MAX
from gateway.engines.vllm import VllmEngine
from gateway.fleet import fleet
from gateway.fleet.fleet import Fleet
from gateway.fleet.handle import EngineHandle
from gateway.fleet.watcher import EngineWatcher
from gateway.operate.status_view import warnings_of
from gateway.runtime import supervisor
from gateway.turns import driver
from paramserver.client import Lease, RelayClient
from protos.errors import TurnLost
from tests.support.fake_relay import relay
from tests.support.gateway_shell import check_at_rest, check_whole, read, shell
from tests.support.scripted_engine import Answer, Cut, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get

pytestmark = pytest.mark.slow  # each waits for several looks at an engine

STARTED = "process_start_time_seconds 1.0\n"
DEEP = '{"x":' + "[" * 100_000 + "]" * 100_000 + "}"
ODD: dict[str, dict[str, Answer]] = {
    "not UTF-8": {"/metrics": STARTED.encode() + b'x{y="\xff"} 1\n'},
    "no number": {"/metrics": f"{STARTED}vllm:num_requests_running NaN\n"},
    "infinite": {"/metrics": f"{STARTED}vllm:num_requests_waiting +Inf\n"},
    "usage of NaN": {"/metrics": f"{STARTED}vllm:kv_cache_usage_perc NaN\n"},
    "negative": {"/metrics": f"{STARTED}vllm:num_requests_running -3\n"},
    "infinite blocks": {"/metrics": f'{STARTED}vllm:cache_config_info{{num_gpu_blocks="inf",block_size="16"}} 1\n'},
    "deep": {"/v1/models": DEEP},
    "boundless context": {"/v1/models": '{"data": [{"id": "policy", "max_model_len": 1180591620717411303424}]}'},
    "negative context": {"/v1/models": '{"data": [{"id": "policy", "max_model_len": -1}]}'},
    "endless": {"/metrics": b"#" * (CONTROL_BYTES_MAX + 1)},
    "boundless label": {"/weight_info": '{"weight_version": "' + "v" * 5000 + '"}'},
}
TALK_BYTES = 4 << 20
COMPLETION = {"model": "policy", "prompt": [5, 6], "max_tokens": 4}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RETRY_S", 0.01)


def state_of(found: Gateway, name: str) -> str:
    return found.fleet.state.engines[EngineName(name)].status


async def check_serves(found: Gateway, http: aiohttp.ClientSession) -> Any:
    """The gateway answers turns and every page; its status."""
    async with http.post("/v1/completions", json=COMPLETION) as answer:
        assert answer.status == 200, await answer.text()
    async with http.get("/metrics") as metrics:
        assert metrics.status == 200
    async with http.get("/healthz") as health:
        assert health.status == 200
    return {engine["name"]: engine for engine in (await get(http, "/status"))["engines"]}


@pytest.mark.parametrize("how", ODD)
async def test_an_engine_that_answers_oddly_is_the_only_one_to_suffer(tmp_path: Path, how: str) -> None:
    e0, odd = ScriptedEngine("e0"), ScriptedEngine("odd", answers=dict(ODD[how]))
    async with e0, odd, gateway(tmp_path, e0, odd, poll_interval_s=0.05) as (found, http):
        await until(lambda: state_of(found, "e0") == "serving", "the sound one")
        told = (await check_serves(found, http))["odd"]
        assert told["state"] != "serving"
        assert told["last_error"], "and it says why"
        odd.answers.clear()
        await until(lambda: state_of(found, "odd") == "serving", "the other, once it answers as it should")
        odd.answers.update(ODD[how])
        if "/metrics" in ODD[how] and "cache_config" not in str(ODD[how]):  # which every look reads
            await until(lambda: state_of(found, "odd") == "dead", "it is odd again")
        await check_serves(found, http)


@pytest.mark.parametrize("label", ["²", "٣", "9" * 19, "1e3", "-1", ""])
async def test_a_label_that_names_no_version_is_the_one_it_was_started_with(tmp_path: Path, label: str) -> None:
    e0, odd = ScriptedEngine("e0"), ScriptedEngine("odd", answers={"/weight_info": f'{{"weight_version": "{label}"}}'})
    async with e0, odd, gateway(tmp_path, e0, odd) as (found, http):
        await until(lambda: state_of(found, "odd") == "serving", "it holds version 0")
        assert (await check_serves(found, http))["odd"]["version"] == 0


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "xn--" + "é" * 60, "a..b", "." + "a" * 300])
async def test_a_host_that_cannot_be_is_refused_where_it_is_named(tmp_path: Path, host: str) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        for check in (True, False):
            wanted = {"name": "odd", "url": f"http://{host}:8000", "check": check}
            async with http.post("/admin/engines", json=wanted) as answer:
                assert answer.status == 400, await answer.text()
                assert "is not the address of an engine" in (await answer.json())["error"]["message"]
        assert list(await check_serves(found, http)) == ["e0"]


@pytest.mark.parametrize("rest", ["/admin?x=", "?", "#part"])
async def test_nothing_stands_behind_the_path_of_an_engines_address(tmp_path: Path, rest: str) -> None:
    """The routes of an engine are appended to it: else whoever names an engine would choose what is requested."""
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1, gateway(tmp_path, e0) as (found, http):
        async with http.post("/admin/engines", json={"name": "e1", "url": e1.url + rest}) as answer:
            assert answer.status == 400, await answer.text()
        assert list(await check_serves(found, http)) == ["e0"]


async def test_a_host_that_no_resolver_takes_is_an_engine_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the door let through."""
    monkeypatch.setattr("gateway.api.admin.is_address", lambda url: True)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, poll_interval_s=0.05) as (found, http):
        wanted = {"name": "odd", "url": f"http://{'a' * 64}.example:8000", "check": False}
        async with http.post("/admin/engines", json=wanted) as answer:
            assert answer.status == 201, await answer.text()
        await until(lambda: found.fleet.state.engines[EngineName("odd")].last_error, "what is wrong with it")
        told = await check_serves(found, http)
        assert (told["odd"]["state"], told["e0"]["state"]) == ("dead", "serving")
        async with http.post("/admin/engines", json={**wanted, "name": "checked", "check": True}) as answer:
            assert answer.status in (409, 503), await answer.text()
        async with http.delete("/admin/engines/odd") as answer:
            assert answer.status == 200


async def test_what_nobody_foresaw_is_the_engines_state_too_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in its adapter: that engine cannot be used, is looked at again, and serves once it answers."""
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    looks, broken = 0, True

    async def metrics(adapter: VllmEngine) -> EngineReport:
        nonlocal looks
        if adapter.url == e1.url and broken:
            looks += 1
            raise ZeroDivisionError("nobody thought of it")
        return await report(adapter)

    report = VllmEngine.report
    monkeypatch.setattr(VllmEngine, "report", metrics)
    async with e0, e1, gateway(tmp_path, e0, e1, poll_interval_s=0.05) as (found, http):
        told = await check_serves(found, http)
        assert "nobody thought of it" in told["e1"]["last_error"]
        await until(lambda: looks > 4, "more looks that fail")
        broken = False
        await until(lambda: state_of(found, "e1") == "serving", "the look that succeeds")
    said = [r for r in caplog.records if r.levelname == "ERROR" and "nobody thought of it" in r.getMessage()]
    assert len(said) == 1
    assert said[0].exc_info is not None, "with its cause"


async def test_a_look_that_fails_in_the_gateway_itself_costs_no_other_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, broken = EngineWatcher._describe, True

    async def meet(watching: EngineWatcher, member: EngineHandle, *rest: Any, **restarted: bool) -> None:
        if broken and member.spec.name == "e1":
            raise AssertionError("nobody thought of it")
        await met(watching, member, *rest, **restarted)

    monkeypatch.setattr(EngineWatcher, "_describe", meet)
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with e0, e1, gateway(tmp_path, e0, e1, poll_interval_s=0.05) as (found, http):
        assert "nobody thought of it" in (await check_serves(found, http))["e1"]["last_error"]
        broken = False
        await until(lambda: state_of(found, "e1") == "serving", "e1")


async def test_a_load_that_fails_as_nobody_foresaw_fences_its_engine_alone_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "RETRY_S", 0.01)
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    keep, failures = RelayClient.keep_pinned, 0

    def keeps(client: RelayClient, lease: Lease) -> Any:
        nonlocal failures
        if failures == 0:
            failures += 1
            raise KeyError("nobody thought of it")
        return keep(client, lease)

    monkeypatch.setattr(RelayClient, "keep_pinned", keeps)
    async with relay() as (holder, address), e0, e1, shell(tmp_path, e0, e1, relay=address) as found:
        holder.publish(1)
        await until(lambda: (e0.version, e1.version) == ("1", "1"), "version 1 on both")
        await until(lambda: {found.status(e0), found.status(e1)} == {"serving"}, "both")
        assert (failures, found.fleet.statistics().refresh_failures) == (1, 1)
        run = found.run()
        check_whole(run, await read(run))


async def test_a_decision_that_fails_stops_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet's tick: an assertion in a decision is said, and ages and holds run out all the same."""
    monkeypatch.setattr(fleet, "TICK_S", 0.01)
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        changed, calls = Fleet.reconcile, 0

        def changes(self: Fleet) -> None:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise AssertionError("nobody thought of it")
            changed(self)

        monkeypatch.setattr(Fleet, "reconcile", changes)
        await until(lambda: calls > 4, "the clock to run on")
        run = found.run()
        check_whole(run, await read(run))


async def test_an_event_that_nobody_foresaw_cuts_its_turn_which_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1")
    async with odd, e1, shell(tmp_path, odd, e1) as found:
        monkeypatch.setattr(odd, "_event", lambda *_: b'data: {"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n")
        runs = [found.run() for _ in range(2)]
        for run in runs:
            check_whole(run, await read(run))
        assert found.sessions.counters.turns_cut >= 1
        check_at_rest(found)


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 63])
async def test_an_id_that_no_vocabulary_has_is_a_cut(tmp_path: Path, token: int) -> None:
    odd, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with odd, e1, shell(tmp_path, odd, e1) as found:
        odd.generate = lambda prompt: [token]
        for run in [found.run() for _ in range(2)]:
            check_whole(run, await read(run))
        assert found.sessions.counters.cuts_by_reason == {"protocol": 1}
        check_at_rest(found)


@pytest.mark.parametrize("chunk", [1, 5], ids=["at the budget", "across it"])
async def test_an_engine_that_says_more_than_it_was_asked_for_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Else one that never ends would fill the record, the pool and the disk with one turn."""
    odd, e1 = ScriptedEngine("e0", chunk=chunk), ScriptedEngine("e1")
    async with odd, e1, shell(tmp_path, odd, e1) as found:
        say = odd._say
        monkeypatch.setattr(odd, "_say", lambda prompt, budget: say(prompt, 100 * budget))
        for run in [found.run() for _ in range(2)]:
            check_whole(run, await read(run))
        assert found.sessions.counters.cuts_by_reason == {"protocol": 1}
        check_at_rest(found)


NONSENSE: dict[str, Callable[[ScriptedEngine], None]] = {
    "ids beyond the vocabulary": lambda odd: setattr(odd, "generate", lambda prompt: [9999] * 50),
    "no numbers": lambda odd: setattr(odd, "_event", lambda *_: NAN),
    "broken events": lambda odd: setattr(odd, "always", Cut("malformed", 2)),
    "an error for each": lambda odd: setattr(odd, "always", Cut("500")),
    "nobody may ask it": lambda odd: setattr(odd, "_refused", statuses([401, 403])),
    "no such route": lambda odd: setattr(odd, "_refused", statuses([404])),
}
NAN = b'data: {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [null]}}]}\n\n'


def statuses(answers: Iterable[int]) -> Callable[[Cut | None], Awaitable[web.Response | None]]:
    """In place of a scripted engine's `_refused`: these statuses in turn, for ever; 200: it answers the request."""
    turns = itertools.cycle(answers)

    async def refused(_: Cut | None) -> web.Response | None:
        status = next(turns)
        return None if status == 200 else web.json_response({"error": {"message": "not now"}}, status=status)

    return refused


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_an_engine_without_room_is_asked_again_and_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """More often in a row than a turn may fail, and on more turns than take an engine out."""
    monkeypatch.setattr(driver, "CUT_BACKOFF_S", 0.001)
    times = faults.CUTS_MAX - 1
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        monkeypatch.setattr(e0, "_refused", statuses([*[status] * times, 200]))
        for _ in range(faults.FAULTS_MAX + 1):
            run = found.run()
            check_whole(run, await read(run))
        assert len(e0.requests) == (faults.FAULTS_MAX + 1) * faults.CUTS_MAX
        state = found.fleet.state.engines[EngineName("e0")]
        assert (state.suspicion, state.faults) == ("", faults.Faults())
        assert set(found.sessions.counters.cuts_by_reason) == {"no_room"}
        monkeypatch.setattr(e0, "_refused", statuses([status]))
        with pytest.raises(TurnLost, match=f"its stream was cut 20 times; the last: .*answered {status}: not now"):
            await read(found.run())
        assert state.faults == faults.Faults()
        check_at_rest(found)


@pytest.mark.parametrize("how", NONSENSE)
async def test_an_engine_that_fails_turn_after_turn_gets_none_until_it_behaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(faults, "OUT_S", 3600.0)
    odd, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with odd, e1, gateway(tmp_path, odd, e1, poll_interval_s=0.02) as (found, http):
        NONSENSE[how](odd)
        state = found.fleet.state.engines[EngineName("e0")]
        while not state.suspicion:
            await check_serves(found, http)
            assert len(odd.requests) <= faults.FAULTS_MAX
        told = (await check_serves(found, http))["e0"]
        assert (told["state"], len(odd.requests)) == ("suspected", faults.FAULTS_MAX)
        assert told["last_error"] == told["reason"] == state.suspicion
        assert any("e0" in line and "turn after turn failed on it" in line for line in warnings_of(found_status(found)))
        said = [r.getMessage() for r in caplog.records if "engine e0 gets no turns" in r.getMessage()]
        assert len(said) == 1
        monkeypatch.undo()
        odd.always, odd.generate = None, None
        for name in ("_event", "_refused"):
            odd.__dict__.pop(name, None)
        state.faults.until = 0.0  # time has passed
        await until(lambda: not state.suspected, "its return")
        assert (await check_serves(found, http))["e0"]["state"] == "serving"
        assert found.sessions.counters.turns_lost == 0


def found_status(found: Gateway) -> Any:
    return msgspec.to_builtins(found.status.report(), str_keys=True)


async def test_a_turn_that_fails_everywhere_takes_no_engine_out(tmp_path: Path) -> None:
    """It may be what is wrong: whoever sends it again and again would take the fleet out."""
    e0, e1 = ScriptedEngine("e0", always=Cut("500")), ScriptedEngine("e1", always=Cut("500"))
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        with pytest.raises(
            TurnLost, match=r"6 times in a row after 0 tokens, on e0, e1; the last: .*scripted to answer"
        ):
            await read(found.run())
        assert len(e0.requests) + len(e1.requests) == faults.CUTS_IN_PLACE_MAX
        assert [e.suspicion for e in found.fleet.state.engines.values()] == ["", ""]
        check_at_rest(found)


async def test_where_every_engine_fails_the_client_hears_so_at_once(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", always=Cut("malformed")) as e0, gateway(tmp_path, e0) as (found, http):
        state = found.fleet.state.engines[EngineName("e0")]
        for number in range(faults.FAULTS_MAX):
            state.faults.times_out = 5  # it has come back some times
            async with http.post("/v1/completions", json={**COMPLETION, "prompt": [number]}) as answer:
                assert answer.status == 503, await answer.text()
                message = (await answer.json())["error"]["message"]
            last = number == faults.FAULTS_MAX - 1
            assert ("turn after turn fails on every engine" in message) == last, message
            assert "is not a completion chunk" in message
        async with http.get("/healthz") as health:
            assert health.status == 503


async def test_an_engine_that_refuses_everybody_is_warned_of_until_a_turn_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its probe needs no key, so it counts as serving again once it was out for a while."""
    monkeypatch.setattr(driver, "CUT_BACKOFF_S", 0.001)
    monkeypatch.setattr(faults, "OUT_S", 0.001)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, poll_interval_s=0.02) as (found, http):
        monkeypatch.setattr(e0, "_refused", statuses([401] * 1000))
        for number in range(faults.FAULTS_MAX):
            async with http.post("/v1/completions", json={**COMPLETION, "prompt": [number]}) as answer:
                assert answer.status == 503
        await until(lambda: found.fleet.state.engines[EngineName("e0")].takes_turns, "it is tried again")
        said = "e0 takes turns, and none has ended well since turn after turn failed on it; the last: "
        async with http.get("/healthz") as health:
            [warning] = (await health.json())["warnings"]
        assert (health.status, f"engine {said}" in warning, "answered 401" in warning) == (200, True, True)
        assert any(said in line for line in warnings_of(found_status(found)))
        monkeypatch.undo()
        e0.__dict__.pop("_refused", None)
        await check_serves(found, http)
        async with http.get("/healthz") as health:
            assert (await health.json())["warnings"] == []
        assert not any("e0" in line for line in warnings_of(found_status(found)))


async def test_whoever_meets_an_engine_of_another_model_hears_so_and_what_mends_it(tmp_path: Path) -> None:
    other = {"/v1/models": '{"data": [{"id": "tiny", "max_model_len": 64}]}'}
    async with ScriptedEngine("e0", answers=dict(other)) as e0, gateway(tmp_path, e0) as (found, http):
        told = found_status(found)
        async with http.post("/v1/completions", json=COMPLETION) as answer:
            assert answer.status == 503
            client = (await answer.json())["error"]["message"]
        async with http.get("/healthz") as health:
            assert health.status == 503
            [healthy] = (await health.json())["reasons"]
        for said in (client, healthy, told["engines"][0]["last_error"], "\n".join(warnings_of(told))):
            assert "serves ['tiny'], not 'policy'" in said
            assert "--served-model-name" in said


async def test_nothing_that_a_dead_engine_reported_last_is_shown_of_it(tmp_path: Path) -> None:
    full = "vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 3\n"
    async with ScriptedEngine("e0", extra_metrics=full) as e0, gateway(tmp_path, e0) as (found, http):
        await check_serves(found, http)
        [told] = found.status.report().engines
        assert (told.kv_usage, told.waiting, told.admitted) == (0.5, 3, 1)
        await e0.die()
        await until(lambda: state_of(found, "e0") == "dead", "its death")
        [told] = found.status.report().engines
        assert (told.kv_usage, told.waiting, told.admitted) == (0.0, 0, 0)
        assert "does not accept connections" in told.last_error


@contextlib.asynccontextmanager
async def talkative() -> AsyncIterator[str]:
    """The address of a server that says `TALK_BYTES` to whoever comes, and hangs up."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * TALK_BYTES)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_a_tether_keeps_nothing_of_what_an_engine_says_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine that talks where nobody asked fills the gateway's memory."""
    pieces: list[int] = []
    read_some = asyncio.StreamReader.read

    async def reads(reader: asyncio.StreamReader, n: int = -1) -> bytes:
        pieces.append(len(data := await read_some(reader, n)))
        return data

    monkeypatch.setattr(asyncio.StreamReader, "read", reads)
    async with talkative() as url:
        assert await asyncio.wait_for(until_broken(url), 60)
    assert sum(pieces) == TALK_BYTES, "all of it was heard"
    assert max(pieces) <= TETHER_READ_BYTES, "and dropped piece by piece"
