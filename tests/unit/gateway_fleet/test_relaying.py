"""Calls relayed as text through a whole gateway: what is relayed, by whom it is answered, and how it breaks off."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from gateway.api.calls import events
from gateway.api.openai.text_proxy import _RelayedAnswer
from gateway.app import Gateway, start
from gateway.config import EngineSpec
from gateway.core import faults
from gateway.core.fleet.config import FleetConfig
from gateway.core.types import EngineName
from gateway.fleet import text_proxy
from tests.support.fake_relay import relay
from tests.support.scripted_engine import MODEL, Cut, ScriptedEngine, pass_time, until
from tests.support.text_engine import CHAT, COMPLETION, TextEngine, asked_of, said_in, words
from tests.unit.gateway_api.test_status import config

pytestmark = pytest.mark.slow  # each starts engines of its own

NUM = 6
COMMENT = b": keep-alive\n\n"
ENGINE, VERSION = "X-Laminar-Engine", "X-Laminar-Weight-Version"


@contextlib.asynccontextmanager
async def gateway(
    directory: Path, *engines: ScriptedEngine, kind: str = "vllm", relay: str | None = None, **settings: Any
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway that relays text over `engines`, all of which serve."""
    specs = tuple(EngineSpec(e.name, kind, e.url, relay) for e in engines)
    settings = {"relay_text": True, "poll_interval_s": 0.05, "queue_timeout_s": 5.0, "probe": False, **settings}
    made = dataclasses.replace(config(directory), engines=specs, **settings)
    found = await start(made)
    try:
        async with aiohttp.ClientSession(found.url) as http:
            states = found.fleet.state.sorted_engines
            await until(lambda: all(e.status == "serving" for e in states()), "every engine serving")
            yield found, http
    finally:
        await found.close(drain_timeout_s=1.0)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": NUM, **more}


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        content: str = json.loads(self.body)["choices"][0]["message"]["content"]
        return content

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


async def ask(http: aiohttp.ClientSession, body: Any, path: str = CHAT, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(path, data=data, headers={"Content-Type": "application/json", **named}) as answer:
        return Answer(answer.status, dict(answer.headers), await answer.read())


def check_at_rest(found: Gateway) -> None:
    """Nothing runs anywhere, and sessions and pool know of nothing."""
    assert [list(e.turns) for e in found.fleet.state.sorted_engines() if e.turns] == []
    assert found.parts.text_proxy is not None
    assert found.parts.text_proxy.statistics().running == 0
    assert found.sessions.counters.turns_started == 0


async def test_the_engine_gets_the_body_and_the_client_the_answer_byte_by_byte(tmp_path: Path) -> None:
    body = b'{"max_tokens" : 6, "some_field_of_the_engine": [1, "\xc3\xa9"],  "model":"policy", "messages":[ ]}'
    async with TextEngine("e0", version="7") as e0, gateway(tmp_path, e0) as (found, http):
        whole = await ask(http, body)
        assert (whole.status, whole.headers[ENGINE], whole.headers[VERSION]) == (200, "e0", "7")
        assert whole.body == await raw(e0, CHAT, body)
        assert e0.texts[0].body == json.loads(body)
        streamed = await ask(http, (asked := body.replace(b'"max', b'"stream":true,"max')))
        assert (streamed.status, streamed.headers[ENGINE], streamed.headers[VERSION]) == (200, "e0", "7")
        assert streamed.headers["Content-Type"].startswith("text/event-stream")
        assert streamed.body == await raw(e0, CHAT, asked)
        assert said_in(streamed.body) == (words("e0", "7", NUM), ["[DONE]"])
        completion = {"model": MODEL, "prompt": "once", "max_tokens": 3}
        assert (await ask(http, completion, COMPLETION)).text == " ".join(words("e0", "7", 3))
        assert "X-Session-ID" not in whole.headers, "it is no session"
        check_at_rest(found)


async def raw(engine: ScriptedEngine, path: str, body: bytes) -> bytes:
    """What the engine itself answers."""
    async with aiohttp.ClientSession() as http, http.post(engine.url + path, data=body) as answer:
        return await answer.read()


@pytest.mark.parametrize("piece", [1, 7])
async def test_a_stream_is_the_same_in_whatever_pieces_it_comes(tmp_path: Path, piece: int) -> None:
    async with TextEngine("e0", piece=piece) as e0, gateway(tmp_path, e0) as (_, http):
        assert said_in((await ask(http, chat(stream=True))).body) == (words("e0", "0", NUM), ["[DONE]"])


NEEDS_TOKENS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/sessions/s1", {}, {}),
    ("/s/s1", {}, {}),
    ("", {}, {"X-Session-ID": "s1"}),
    ("", {}, {"x-smg-routing-key": "s1"}),
    ("", {}, {"Idempotency-Key": "k"}),
    ("", {"session_id": "s1"}, {}),
    ("", {"user": "s1"}, {}),
    ("", {"metadata": {"session_id": "s1"}}, {}),
    ("", {"return_token_ids": True}, {}),
    ("", {"return_weight_versions": True}, {}),
]


@pytest.mark.parametrize(("prefix", "fields", "headers"), NEEDS_TOKENS, ids=str)
async def test_what_names_a_session_or_asks_for_tokens_takes_the_token_path(
    tmp_path: Path, prefix: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    async with TextEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": NUM, **fields}
        answer = await ask(http, body, prefix + COMPLETION, **headers)
        assert answer.status == 200, answer.body
        assert "X-Session-ID" in answer.headers
        assert ENGINE not in answer.headers
        assert "logprobs" in e0.requests[0].body, "the gateway's own request"
        assert found.sessions.counters.turns_started == 1


async def test_a_user_who_names_no_session_is_relayed(tmp_path: Path) -> None:
    async with TextEngine("e0") as e0, gateway(tmp_path, e0, session_from_user=False) as (_, http):
        assert (await ask(http, chat(user="u"))).headers[ENGINE] == "e0"
        named = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": NUM, "user": "u", "session_id": "s"}
        assert (await ask(http, named, COMPLETION)).headers["X-Session-ID"] == "s"


async def test_a_sessions_key_takes_the_token_path_and_any_other_key_does_not(tmp_path: Path) -> None:
    async with TextEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        async with http.post("/sessions", json={}) as made:
            key = (await made.json())["api_key"]
        ids = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": NUM}
        assert "X-Session-ID" in (await ask(http, ids, COMPLETION, Authorization=f"Bearer {key}")).headers
        assert "X-Session-ID" in (await ask(http, ids, COMPLETION, **{"X-Api-Key": key})).headers
        assert (await ask(http, chat(), Authorization="Bearer sk-any")).headers[ENGINE] == "e0"


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "policy", "stream": "x"}', b'{"model": "other"}', b"\xff"])
async def test_what_is_wrong_is_told_as_ever(tmp_path: Path, body: bytes) -> None:
    async with TextEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        answer = await ask(http, body)
        assert answer.status in (400, 404)
        assert answer.error["message"]
        assert asked_of(e0) == [0]


async def test_it_is_off_unless_the_operator_wants_it(tmp_path: Path) -> None:
    async with TextEngine("e0") as e0, gateway(tmp_path, e0, relay_text=False) as (found, http):
        ids = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": NUM}
        assert "X-Session-ID" in (await ask(http, ids, COMPLETION)).headers
        assert found.parts.text_proxy is None


async def test_what_the_engine_refuses_is_the_clients_to_hear_and_nobody_elses(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", always=Cut("400")) as e0,
        TextEngine("e1", always=Cut("400")) as e1,
        gateway(tmp_path, e0, e1) as (found, http),
    ):
        for streamed in (False, True):
            answer = await ask(http, chat(stream=streamed))
            assert (answer.status, answer.error["message"]) == (400, "scripted to answer 400")
        assert sum(asked_of(e0, e1)) == 2
        check_at_rest(found)


BEFORE: list[Cut] = [Cut("500"), Cut("503"), Cut("reset"), Cut("closed"), Cut("death")]


@pytest.mark.parametrize("cut", BEFORE, ids=lambda cut: cut.kind)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_that_fails_before_its_first_byte_is_made_good_by_another(
    tmp_path: Path, cut: Cut, streamed: bool
) -> None:
    async with (
        TextEngine("e0", cuts=deque([cut])) as e0,
        TextEngine("e1") as e1,
        gateway(tmp_path, e0, e1) as (found, http),
    ):
        answer = await ask(http, chat(stream=streamed))
        assert (answer.status, answer.headers[ENGINE]) == (200, "e1")
        assert said_in(answer.body)[0] == words("e1", "0", NUM) if streamed else answer.text.startswith("e1-v0-0 ")
        assert asked_of(e0, e1) == [1, 1]
        check_at_rest(found)
        assert found.parts.text_proxy is not None
        assert (found.parts.text_proxy.statistics().retried, found.parts.text_proxy.statistics().failed) == (1, 0)


async def test_a_whole_answer_that_broke_off_was_seen_by_nobody_and_is_asked_for_again(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", cuts=deque([Cut("reset", 1)])) as e0,
        TextEngine("e1") as e1,
        gateway(tmp_path, e0, e1) as (_, http),
    ):
        assert (await ask(http, chat())).text == " ".join(words("e1", "0", NUM))


async def test_a_request_that_breaks_engines_does_not_break_them_all(tmp_path: Path) -> None:
    engines = [TextEngine(f"e{i}", always=Cut("500")) for i in range(5)]
    async with contextlib.AsyncExitStack() as stack:
        for one in engines:
            await stack.enter_async_context(one)
        _, http = await stack.enter_async_context(gateway(tmp_path, *engines))
        answer = await ask(http, chat())
        assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")
        assert "scripted to answer 500" in answer.error["message"]
        assert sorted(asked_of(*engines)) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("does", "serves_on"),
    [([Cut("500")], False), ([Cut("500"), None], True), ([Cut("503")], True)],
    ids=["each fails", "some end well", "it has no room"],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_that_fails_request_after_request_gets_none_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: list[Cut | None], serves_on: bool, streamed: bool
) -> None:
    monkeypatch.setattr(faults, "OUT_S", 3600.0)
    cuts = itertools.cycle(does)
    e0, e1 = TextEngine("e0", draw=lambda: next(cuts)), TextEngine("e1")
    async with e0, e1, gateway(tmp_path, e0, e1) as (found, http):
        state = found.fleet.state.engines[EngineName("e0")]
        while len(e0.texts) < faults.FAULTS_MAX:
            assert (await ask(http, chat(stream=streamed))).status == 200
        for _ in range(8):
            assert (await ask(http, chat(stream=streamed))).status == 200
        assert ("scripted to answer 500" in state.suspicion) is not serves_on
        assert (len(e0.texts) > faults.FAULTS_MAX) is serves_on


@pytest.mark.parametrize("streamed", [False, True])
async def test_where_no_engine_has_room_the_client_hears_so(tmp_path: Path, streamed: bool) -> None:
    e0 = TextEngine("e0", draw=lambda: Cut("503"))
    async with e0, gateway(tmp_path, e0) as (_, http):
        answer = await ask(http, chat(stream=streamed))
    assert (answer.status, float(answer.headers["Retry-After"]) >= 1) == (429, True)
    message = answer.error["message"]
    assert message.startswith("3 tries failed, the last on e0: ")
    assert "answered 503" in message


async def test_a_stream_that_breaks_off_says_so_and_is_not_asked_for_again(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", cuts=deque([Cut("reset", 3)])) as e0,
        TextEngine("e1") as e1,
        gateway(tmp_path, e0, e1) as (found, http),
    ):
        sent = b""

        async def read(_: int) -> None:
            await until(lambda: sent.count(b"\n\n") == 3, "what came before, lest the reset take it along")

        e0.before_cut = read
        async with http.post(CHAT, json=chat(stream=True)) as answer:
            async for piece in answer.content.iter_any():
                sent += piece
        said, [told] = said_in(sent)
        assert said == words("e0", "0", 3)
        assert told["error"]["code"] == "stream_cut", "and no [DONE]"
        assert asked_of(e0, e1) == [1, 0]
        check_at_rest(found)
        assert found.parts.text_proxy is not None
        assert found.parts.text_proxy.statistics().failed == 1


@pytest.mark.parametrize("piece", [1 << 20, 1])
async def test_a_stream_that_ends_without_its_end_was_cut(tmp_path: Path, piece: int) -> None:
    async with (
        TextEngine("e0", cuts=deque([Cut("eof"), Cut("eof", 2)]), piece=piece) as e0,
        TextEngine("e1") as e1,
        gateway(tmp_path, e0, e1) as (found, http),
    ):
        assert said_in((await ask(http, chat(stream=True))).body) == (words("e1", "0", NUM), ["[DONE]"])
        await until(lambda: not found.fleet.state.engines[EngineName("e0")].suspected, "trust in e0")
        found.fleet.state.engines[EngineName("e1")].suspected = True
        said, [told] = said_in((await ask(http, chat(stream=True))).body)
        assert (said, told["error"]["code"]) == (words("e0", "0", 2), "stream_cut")
        check_at_rest(found)


async def test_a_stream_that_breaks_off_within_an_event_breaks_off_for_the_client(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", cuts=deque([Cut("closed", 2)]), torn_by=9) as e0,
        gateway(tmp_path, e0) as (found, http),
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(http, chat(stream=True))
        await until(lambda: not found.parts.text_proxy or not found.parts.text_proxy.statistics().running, "its end")
        check_at_rest(found)


async def test_a_stream_that_hangs_is_cut_and_one_that_is_whole_may_take_its_time(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", cuts=deque([Cut("hang", 2)])) as e0,
        gateway(tmp_path, e0, stall_timeout_s=60.0) as (found, http),
    ):
        asking = asyncio.create_task(ask(http, chat(stream=True)))
        await until(lambda: e0.said_words == 2, "all that is said")
        await found.fleet.handles[EngineName("e0")].adapter.limits()  # what was said is read before
        pass_time(60.0)
        said, [told] = said_in((await asking).body.replace(COMMENT, b""))
        assert (said, told["error"]["code"]) == (words("e0", "0", 2), "stream_cut")
        e0.hold_text_at = 0
        waiting = asyncio.create_task(ask(http, chat()))
        await until(lambda: asked_of(e0) == [2], "the request")
        pass_time(61.0)  # longer than any stream may be silent
        await found.fleet.handles[EngineName("e0")].adapter.limits()
        assert not waiting.done()
        e0.go.set()
        assert (await waiting).text == " ".join(words("e0", "0", NUM))
        check_at_rest(found)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is broken soon."""
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)


async def begun(answer: aiohttp.ClientResponse, keep_alive: bytes) -> bytes:
    """What came of an answer that is kept alive, twice."""
    found = b""
    while found.count(keep_alive) < 2:
        found += await asyncio.wait_for(answer.content.readany(), 60)
    return found


@pytest.mark.usefixtures("soon")
async def test_a_whole_answer_that_takes_long_is_kept_alive_with_spaces(tmp_path: Path) -> None:
    async with TextEngine("e0", version="7", hold_text_at=0) as e0, gateway(tmp_path, e0) as (found, http):
        async with http.post(CHAT, json=chat()) as answer:
            assert (answer.status, answer.headers[VERSION], ENGINE in answer.headers) == (200, "7", False)
            assert answer.content_type == "application/json"
            spaces = await begun(answer, b" ")
            e0.go.set()
            body = spaces + await answer.read()
        assert body.lstrip(b" ") == await raw(e0, CHAT, json.dumps(chat()).encode())
        assert set(spaces) == set(b" ")
        check_at_rest(found)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("at", [0, 2])
async def test_a_stream_that_is_silent_is_kept_alive_between_its_events(tmp_path: Path, at: int) -> None:
    async with TextEngine("e0", version="7", hold_text_at=at) as e0, gateway(tmp_path, e0) as (found, http):
        async with http.post(CHAT, json=chat(stream=True)) as answer:
            assert (answer.status, answer.headers[VERSION]) == (200, "7")
            assert answer.content_type == "text/event-stream"
            sent = await begun(answer, COMMENT)
            e0.go.set()
            sent += await answer.read()
        assert sent.replace(COMMENT, b"") == await raw(e0, CHAT, json.dumps(chat(stream=True)).encode())
        events = sent.split(b"\n\n")
        assert {event[:6] for event in events} == {b"data: ", b": keep", b""}, "each of them whole"
        assert events[at] == COMMENT.strip()
        check_at_rest(found)


@pytest.mark.usefixtures("soon")
async def test_a_stream_that_is_silent_within_an_event_is_not_broken_into(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", hold_text_at=2, torn_by=9) as e0,
        TextEngine("e1", hold_text_at=2) as e1,
        gateway(tmp_path, e0, e1) as (_, http),
        http.post(CHAT, json=chat(stream=True)) as torn,
    ):
        await until(lambda: e0.said_words == 2, "half an event")
        async with http.post(CHAT, json=chat(stream=True)) as other:
            await begun(other, COMMENT)
        e0.go.set()
        assert said_in(await torn.read()) == (words("e0", "0", NUM), ["[DONE]"]), "and no comment"


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_kept_alive_goes_on_under_its_version_only(tmp_path: Path, streamed: bool) -> None:
    async with (
        TextEngine("e0", version="7", cuts=deque([Cut("500")]), hold_text_at=0) as e0,
        TextEngine("e1", version="8") as e1,
        TextEngine("e2", version="7") as e2,
        gateway(tmp_path, e0, e1, e2, fleet=FleetConfig(max_running=1)) as (found, http),
    ):
        states = found.fleet.state.engines
        for name in ("e1", "e2"):
            states[EngineName(name)].suspected = True
        async with http.post(CHAT, json=chat(stream=streamed)) as answer:
            await begun(answer, COMMENT if streamed else b" ")
            for name in ("e1", "e2"):
                states[EngineName(name)].suspected = False
            e0.go.set()
            body = await answer.read()
            assert answer.headers[VERSION] == "7"
        said = said_in(body.replace(COMMENT, b""))[0] if streamed else Answer(200, {}, body).text.split()
        assert (said, asked_of(e1, e2)) == (words("e2", "7", NUM), [0, 1])
        check_at_rest(found)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("kind", "tries"), [("500", text_proxy.TRIES_MAX), ("400", 1)])
async def test_an_error_after_the_head_is_never_a_good_answer(tmp_path: Path, kind: str, tries: int) -> None:
    """Also where an engine of another version is there."""
    async with (
        TextEngine("e0", version="7", always=Cut(kind), hold_text_at=0) as e0,
        TextEngine("e1", version="8") as e1,
        gateway(tmp_path, e0, e1) as (found, http),
    ):
        other = found.fleet.state.engines[EngineName("e1")]
        for streamed in (False, True):
            e0.go.clear()
            await until(lambda: not found.fleet.state.engines[EngineName("e0")].suspected, "trust in e0")
            other.suspected = True
            async with http.post(CHAT, json=chat(stream=streamed)) as answer:
                await begun(answer, COMMENT if streamed else b" ")
                other.suspected = False
                e0.go.set()
                if not streamed:
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()
                    continue
                [told] = said_in((await answer.read()).replace(COMMENT, b""))[1]
            assert f"scripted to answer {kind}" in told["error"]["message"]
        assert asked_of(e0, e1) == [2 * tries, 0]
        check_at_rest(found)


async def test_a_client_that_leaves_ends_it_upstream(tmp_path: Path) -> None:
    async with TextEngine("e0", hold_text_at=2) as e0, gateway(tmp_path, e0) as (found, http):
        async with http.post(CHAT, json=chat(stream=True)) as answer:
            assert await answer.content.read(1)
        await until(lambda: e0.texts[0].left, "the engine's hearing of it")
        waiting = asyncio.create_task(ask(http, chat()))
        await until(lambda: len(e0.texts) == 2, "the second request")
        waiting.cancel()
        await until(lambda: e0.texts[1].left, "the engine's hearing of it")
        check_at_rest(found)


async def test_an_engine_that_dies_unheard_is_noticed_by_looks_at_it(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", hold_text_at=0) as e0,
        TextEngine("e1") as e1,
        gateway(tmp_path, e0, e1) as (found, http),
    ):
        waiting = asyncio.create_task(ask(http, chat()))
        await until(lambda: asked_of(e0) == [1], "the request")
        e0.started_unix_s += 1  # another incarnation answers there, and the old one's connections are still open
        found.fleet.suspect(EngineName("e0"))
        assert (await waiting).headers[ENGINE] == "e1"
        check_at_rest(found)


async def test_a_refresh_waits_for_relayed_requests_and_new_ones_go_elsewhere(tmp_path: Path) -> None:
    async with (
        relay() as (publisher, address),
        TextEngine("e0", hold_text_at=1) as e0,
        TextEngine("e1", hold_text_at=1) as e1,
    ):
        publisher.publish(1)
        async with gateway(tmp_path, e0, e1, relay=address, fleet=FleetConfig(drain_max_s=60.0)) as (found, http):
            e0_state, e1_state = found.fleet.state.sorted_engines()
            await until(lambda: e0_state.version == e1_state.version == 1, "version 1", 60)
            running = asyncio.create_task(ask(http, chat(stream=True)))
            await until(lambda: asked_of(e0) == [1], "a stream on e0")
            publisher.publish(2)
            await until(lambda: e1_state.version == 2, "the refresh of the empty engine", 60)
            assert (e0_state.version, e0_state.intake_open) == (1, False)
            e1.go.set()
            second = await ask(http, chat(stream=True))
            assert (second.headers[ENGINE], second.headers[VERSION]) == ("e1", "2")
            assert [load.relayed for load in e0_state.turns.values()] == [True]
            e0.go.set()
            first = await running
            assert (first.headers[ENGINE], first.headers[VERSION]) == ("e0", "1")
            assert said_in(first.body) == (words("e0", "1", NUM), ["[DONE]"])
            await until(lambda: e0_state.version == 2, "the refresh after it", 60)
            check_at_rest(found)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_load_that_waits_for_nobody_breaks_streams_off_and_asks_others_for_whole_answers(
    tmp_path: Path, streamed: bool
) -> None:
    async with relay() as (publisher, address), TextEngine("e0", hold_text_at=1) as e0:
        publisher.publish(1)
        async with gateway(tmp_path, e0, relay=address, fleet=FleetConfig(mode="inflight")) as (found, http):
            [state] = found.fleet.state.sorted_engines()
            await until(lambda: state.version == 1, "version 1", 60)
            running = asyncio.create_task(ask(http, chat(stream=streamed)))
            await until(lambda: asked_of(e0) == [1] and (not streamed or e0.said_words > 0), "a request under way")
            publisher.publish(2)
            await until(lambda: state.version == 2, "the refresh", 60)
            e0.go.set()
            answer = await running
            if streamed:
                assert said_in(answer.body)[1][0]["error"]["code"] == "stream_cut"
            else:
                assert (answer.status, answer.headers[VERSION]) == (200, "2")
            check_at_rest(found)


async def test_a_planner_sees_them_as_turns_that_stay(tmp_path: Path) -> None:
    async with TextEngine("e0", hold_text_at=1) as e0, gateway(tmp_path, e0) as (found, http):
        running = asyncio.create_task(ask(http, chat(stream=True)))
        await until(lambda: asked_of(e0) == [1], "a stream")
        [state] = found.fleet.state.sorted_engines()
        [load] = await found.parts.repacker.loads(state)
        assert (load.stays, load.turn_id) == (True, next(iter(state.turns)))
        e0.go.set()
        await running


async def test_draining_lets_them_end_and_takes_no_more(tmp_path: Path) -> None:
    async with TextEngine("e0", hold_text_at=1) as e0, gateway(tmp_path, e0) as (found, http):
        running = asyncio.create_task(ask(http, chat(stream=True)))
        kept_alive = await ask(http, {**chat(), "model": "other"})
        assert kept_alive.status == 404
        await until(lambda: asked_of(e0) == [1], "a stream")
        closing = asyncio.create_task(found.close(drain_timeout_s=10.0))
        assert found.parts.text_proxy is not None
        await until(lambda: found.parts.text_proxy is not None and found.parts.text_proxy.draining, "draining")
        refused = await ask(http, chat())  # over the connection that is open still
        assert (refused.status, refused.headers["x-should-retry"]) == (503, "true")
        assert not closing.done()
        e0.go.set()
        assert said_in((await running).body) == (words("e0", "0", NUM), ["[DONE]"])
        await closing


async def test_they_wait_for_a_place_as_turns_do(tmp_path: Path) -> None:
    async with (
        TextEngine("e0", hold_text_at=0) as e0,
        gateway(tmp_path, e0, fleet=FleetConfig(max_running=1), queue_max=1) as (found, http),
    ):
        tasks = [asyncio.create_task(ask(http, chat())) for _ in range(3)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        [full] = [await task for task in done]
        assert full.status == 429
        assert int(full.headers["Retry-After"]) >= 1
        await until(lambda: asked_of(e0) == [1], "the one that has the place")
        e0.go.set()
        assert sorted([(await task).status for task in tasks]) == [200, 200, 429]
        check_at_rest(found)


async def test_engines_that_take_no_chat_are_told_of(tmp_path: Path) -> None:
    async with TextEngine("e0") as e0, gateway(tmp_path, e0, kind="embedded") as (_, http):
        answer = await ask(http, chat())
        assert answer.status == 503
        assert "embedded" in answer.error["message"]
        assert "vllm" in answer.error["message"]
        completion = {"model": MODEL, "prompt": "once", "max_tokens": 2}
        assert (await ask(http, completion, COMPLETION)).text == " ".join(words("e0", "0", 2))


async def test_an_answer_beyond_the_bound_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_proxy, "ANSWER_BYTES_MAX", 1000)
    async with TextEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        assert (await ask(http, chat())).status == 200
        answer = await ask(http, chat(max_tokens=1000))
        assert answer.status == 503
        assert "MiB" in answer.error["message"]


async def test_status_and_metrics_count_them(tmp_path: Path) -> None:
    async with TextEngine("e0", cuts=deque([Cut("500"), Cut("reset", 2)])) as e0, gateway(tmp_path, e0) as (_, http):
        assert (await ask(http, chat())).status == 200, "asked again of the only engine there is"
        await ask(http, chat(stream=True))
        async with http.get("/status") as answer:
            told = (await answer.json())["relayed_text"]
        async with http.get("/metrics") as answer:
            metrics = await answer.text()
    # what broke off had begun: it was relayed, and failed
    assert told["failed"] + told["retried"] == 2
    assert "laminar_gateway_text_relayed_total" in metrics


async def test_a_client_that_stops_reading_gives_its_engine_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is recorded: who does not read loses the rest, and the place is another's."""
    monkeypatch.setattr(text_proxy, "UNREAD_MAX_S", 0.1)
    e0 = TextEngine("e0")
    async with e0, gateway(tmp_path, e0) as (found, _):
        parts = urlsplit(found.url)
        assert parts.hostname is not None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 12)
        body = json.dumps(chat(stream=True, max_tokens=400_000)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readexactly(20)
        assert found.parts.text_proxy is not None
        await until(lambda: found.parts.text_proxy.statistics().running == 0, "its leaving the engine", 60)  # type: ignore[union-attr]
        assert e0.said_words < 400_000, "not because it was over"
        check_at_rest(found)
        writer.close()


async def test_a_client_that_cannot_be_kept_alive_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails for one of them shows in that response alone."""
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)
    fill, broken = _RelayedAnswer._fill, 0

    async def fills(client: _RelayedAnswer) -> None:
        nonlocal broken
        if client.streamed:
            broken += 1
            raise KeyError("nobody thought of it")
        await fill(client)

    monkeypatch.setattr(_RelayedAnswer, "_fill", fills)
    e0 = TextEngine("e0", hold_text_at=0)
    async with e0, gateway(tmp_path, e0) as (found, http):
        asked = [asyncio.create_task(ask(http, chat(stream=stream))) for stream in (True, False)]
        await until(lambda: broken, "the client that fails")
        assert found.parts.text_proxy is not None
        running = found.parts.text_proxy._running
        await until(lambda: [u.client.version for u in running.values()].count(0) == 1, "the other kept alive")
        e0.go.set()
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
        assert broken == 1, "it is not tried again"
        check_at_rest(found)
    assert caplog.text.count("nobody thought of it") >= 1


async def test_the_key_of_a_session_that_has_ended_is_not_relayed(tmp_path: Path) -> None:
    """Nothing of the call would be recorded where its client believes it to be."""
    async with TextEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        async with http.post("/sessions", json={"session_id": "s"}) as made:
            key = (await made.json())["api_key"]
        async with http.post("/sessions/s/abandon") as gone:
            assert gone.status == 200
        async with http.post(CHAT, json=chat(), headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 404
            assert "no live session has this API key" in (await answer.json())["error"]["message"]
        assert not e0.requests
