"""The dashboard in a real browser: it shows what `/status` says, moves as it moves, and can be used by everybody."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from tests.support import processes
from tests.support.browser import Page
from tests.support.keys import controlled, key_of
from tests.support.scripted_engine import MODEL, ScriptedEngine, in_thread, until
from tests.support.words import tokenizer
from tests.unit.gateway_api.test_status import gateway, get

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(300)]

LIVE = "document.body.dataset.feed === 'live' && document.querySelector('#buffer dd')"
"""The panels are drawn in turns, from the tiles on."""
MARKUP = "<script>alert(1)<script><img|src=x|onerror=alert(1)>"
"""A name that a session may have, and that would do harm as markup."""


async def open_dashboard(tab: Page, url: str) -> None:
    await tab.goto(f"{url}/ui")
    await tab.until(LIVE, "the first picture")


async def show(tab: Page, session: str) -> None:
    """Opens a session below."""
    await tab.evaluate("document.querySelector('#session-id').focus()")
    await tab.type(session)
    await tab.key("Enter")


async def call(http: aiohttp.ClientSession, path: str, body: Any = None) -> Any:
    async with http.post(path, json=body) as answer:
        assert answer.status in (200, 201), await answer.text()
        return await answer.json()


def turn_of(http: aiohttp.ClientSession, session: str, prompt: list[int], max_tokens: int = 6) -> asyncio.Task[Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
    return asyncio.create_task(call(http, f"/sessions/{session}/v1/completions", body))


def tile(title: str, part: str = ".figure") -> str:
    found = f"[...document.querySelectorAll('.tile')].find((one) => one.firstChild.textContent === {title!r})"
    return f"{found}.querySelector({part!r}).textContent"


def legend(phase: str) -> str:
    found = f"[...document.querySelectorAll('#legend li')].find((one) => one.textContent.startsWith({phase!r}))"
    return f"{found}.querySelector('b').textContent"


async def test_it_shows_what_status_says_and_moves_as_it_moves(tab: Page, tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=2, version="3"), ScriptedEngine("e1", version="3")
    async with e0, e1, gateway(tmp_path, e0) as (found, http):
        await call(http, "/sessions", {"session_id": "s1"})
        await open_dashboard(tab, found.url)
        status = await get(http, "/status")
        assert status["model"] in await tab.text("#model")
        assert await tab.evaluate(tile("Live sessions")) == "1"
        assert await tab.evaluate(tile("Engines serving")) == "1"
        row = (await tab.text("#engines tr")).split()
        assert row[:2] == ["e0", "serving"]
        assert "Nothing waits." in await tab.text("#waits")
        turn = turn_of(http, "s1", [5, 6, 7])
        await tab.until(f"{legend('Decode')} === '1'", "a turn that decodes")
        assert await tab.evaluate(legend("Tool")) == "0"
        e0.go.set()
        await turn
        await tab.until(f"{legend('Decode')} === '0' && {legend('Tool')} === '1'", "its end")
        await call(http, "/sessions/s1/finish", {"reward": 1.0})
        await tab.until(f"{tile('Experience buffer')} === '1'", "its trajectory")
        assert (await get(http, "/status"))["buffer"]["trajectories"] == 1
        await call(http, "/admin/engines", {"name": "e1", "url": e1.url, "kind": "vllm"})
        await tab.until(f"{tile('Engines serving')} === '2'", "another engine")
        await e1.die()
        await tab.until("document.querySelector('#waits').innerText.includes('e1')", "what is wrong with it")
        await tab.until("document.querySelector('#engines tr').innerText.includes('dead')", "the dead one first")
        await tab.until("document.querySelector('#events').innerText.includes('dead')", "the event")


async def test_a_session_is_shown_token_by_token_and_names_are_text(tab: Page, tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (found, http):
        await call(http, "/sessions", {"session_id": MARKUP})
        answer = await turn_of(http, quote(MARKUP, safe=""), [5, 6, 7])
        await open_dashboard(tab, found.url)
        await show(tab, MARKUP)
        await tab.until("document.querySelectorAll('.token').length === 9", "three given and six sampled tokens")
        assert await tab.evaluate("document.querySelectorAll('.token.v0').length") == 6
        record = await get(http, f"/sessions/{quote(MARKUP, safe='')}/trajectories?tokens=true")
        shown = await tab.evaluate("[...document.querySelectorAll('.token')].map((one) => one.textContent)")
        assert shown == [text.replace("\n", "⏎\n") for text in record["trajectories"][0]["tokens"]]
        lines = "[...document.querySelectorAll('#session .legend [class^=doubt]')].map((one) => one.textContent)"
        assert await tab.evaluate(lines) == [f"probability below {share} %" for share in (37, 14, 5)]
        await tab.evaluate("document.querySelector('.transcript').focus()")
        for _ in range(4):
            await tab.key("ArrowRight")
        about = await tab.text("#token-about")
        assert f"id {answer['choices'][0]['token_ids'][0]}" in about
        assert "version 3" in about
        await tab.click("#as-text")
        await tab.until("document.querySelector('.token') === null", "the text alone")
        assert await tab.evaluate("document.querySelectorAll('main script, main [onerror]').length") == 0


async def test_it_survives_a_gateway_that_is_killed_and_says_so(tab: Page, tmp_path: Path, port: int) -> None:
    with in_thread(ScriptedEngine("e0", version="3")) as engine:
        command = ["gateway", "serve", f"--port={port}", f"--model={MODEL}", f"--engine=e0=vllm={engine}"]
        command += [f"--tokenizer={tokenizer(tmp_path / 'model')}", f"--data={tmp_path / 'data'}"]
        first = processes.start("gateway", command, tmp_path)
        async with aiohttp.ClientSession(first.ready["url"]) as http:
            await call(http, "/sessions", {"session_id": "kept"})
        await open_dashboard(tab, first.ready["url"])
        await tab.until(f"{tile('Live sessions')} === '1'", "the session")
        first.kill()
        await tab.until("!document.querySelector('#banner').hidden", "notice of the end")
        assert "No connection to the gateway" in await tab.text("#banner")
        assert await tab.evaluate(tile("Live sessions")) == "1", "what was shown stays"
        second = processes.start("gateway", command, tmp_path)
        try:
            await tab.until("document.body.dataset.feed === 'live'", "the connection")
            await tab.until(
                "document.querySelector('#banner').innerText.includes('restarted')", "that it was restarted"
            )
            async with aiohttp.ClientSession(second.ready["url"]) as http:
                await call(http, "/sessions", {"session_id": "new"})
            await tab.until(f"{tile('Live sessions')} === '2'", "what follows")
        finally:
            assert second.stop() == 0, second.log()


async def test_with_keys_it_asks_for_one_keeps_it_in_the_tab_and_out_of_urls(tab: Page, tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, controlled(tmp_path, e0) as (found, client):
        await client.expect(200, "alice", "POST", "/sessions", {"session_id": "mine"})
        await tab.goto(f"{found.url}/ui")
        await tab.until("document.querySelector('#key-form')?.hidden === false", "the question")
        assert await tab.evaluate("document.activeElement.id") == "key-input"
        await tab.type("x" * 24)
        await tab.key("Enter")
        await tab.until("document.querySelector('#key-message').textContent", "that it is wrong")
        assert "not known" in await tab.text("#key-message")
        await tab.type(key_of("alice"))
        await tab.key("Enter")
        await tab.until("document.querySelector('#key-message').textContent.includes('reader')", "which role it takes")
        await tab.type(key_of("reader"))
        await tab.key("Enter")
        await tab.until(LIVE, "the first picture")
        assert await tab.evaluate("document.querySelector('#key-form').hidden")
        await show(tab, "mine")
        await tab.until("document.querySelector('#session').innerText.includes('No turn has ended yet')", "the session")
        urls = json.dumps(await tab.evaluate("performance.getEntriesByType('resource').map((one) => one.name)"))
        assert key_of("reader") not in urls + await tab.evaluate("location.href + document.cookie")
        assert await tab.evaluate("localStorage.length") == 0
        await open_dashboard(tab, found.url)
        await tab.click("#forget-key")
        await tab.until("document.querySelector('#key-form')?.hidden === false", "the question again")
        assert await tab.evaluate("sessionStorage.length") == 0


async def test_the_timeline_is_used_by_keys_alone(tab: Page, tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", hold_at=2, version="3")
    async with e0, gateway(tmp_path, e0) as (found, http):
        turns = []
        for name in ("s1", "s2", "s3"):
            await call(http, "/sessions", {"session_id": name})
            turns.append(turn_of(http, name, [5, 6, 7]))
        await until(lambda: e0.said_tokens == 6, "three turns")
        await open_dashboard(tab, found.url)
        await tab.until(f"{legend('Decode')} === '3'", "three turns that decode")
        await tab.key("Tab")
        assert await tab.evaluate("document.activeElement.className") == "skip"
        reached = []
        for _ in range(40):
            await tab.key("Tab")
            reached.append(await tab.evaluate("document.activeElement.id || document.activeElement.textContent"))
            if reached[-1] == "timeline":
                break
        assert reached[-1] == "timeline", reached
        assert [name for name in reached if name in ("view-fit", "rows-less", "rows-more", "span", "pause")] == [
            *("view-fit", "rows-less", "rows-more", "span", "pause")
        ]
        await tab.key("ArrowDown")
        status = await tab.until("document.querySelector('#timeline-status').textContent", "a chosen session")
        assert status.startswith("s1: decode on e0"), status
        await tab.key("ArrowDown")
        await tab.until("document.querySelector('#timeline-status').textContent.startsWith('s2')", "the next")
        await tab.key("]")
        assert await tab.evaluate("document.querySelector('#span').value") == "300"
        await tab.key(" ")
        assert await tab.evaluate("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
        await tab.key("Enter")
        await tab.until("document.querySelector('#session-id').value === 's2'", "the session in the inspector")
        assert await tab.evaluate("document.activeElement.id") == "session-heading"
        e0.go.set()
        await asyncio.gather(*turns)


async def finish(http: aiohttp.ClientSession, session: str, reward: float) -> None:
    await call(http, "/sessions", {"session_id": session})
    await turn_of(http, session, [5, 6, 7])
    await call(http, f"/sessions/{session}/finish", {"reward": reward})


async def test_the_mean_reward_of_finished_sessions_is_a_curve_and_a_table(tab: Page, tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (found, http):
        await open_dashboard(tab, found.url)
        assert "No session for training has finished" in await tab.text("#reward-about")
        await finish(http, "s1", 0.25)
        rewards = found.parts.trainer.rewards
        [first] = rewards.points().values()
        rewards.add(first.t_unix_s, 0.75)  # of the same point, however long a session takes here
        await tab.until(
            "document.querySelector('#reward-about').innerText.startsWith('0.5 on the mean of the last 2 sessions')",
            "the mean",
        )
        for reward in (-1.0, 2.0):  # of other points
            rewards.add(100.0 + reward * 10, reward)
        await tab.until("document.querySelector('.rewards polyline').points.length === 3", "a curve")
        await tab.evaluate("document.querySelector('#reward details').open = true")
        await tab.until("document.querySelectorAll('#reward tbody tr').length === 3", "its table")
        table = "[...document.querySelectorAll('#reward tbody tr')].map((row) => row.cells[1].textContent)"
        assert await tab.evaluate(table) == ["0.5", "2", "-1"], "the newest first"
        assert await tab.evaluate("document.querySelector('.rewards').getAttribute('role')") == "img"


async def test_what_is_dead_looks_dead(tab: Page, tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", version="3"), ScriptedEngine("e1", version="3")
    async with e0, e1, gateway(tmp_path, e0, e1, idle_after_s=0.0) as (found, http):
        await call(http, "/sessions", {"session_id": "left"})
        await turn_of(http, "left", [5, 6, 7])
        await open_dashboard(tab, found.url)
        await tab.until(f"{legend('Idle')} === '1'", "the session that nobody uses")
        assert await tab.evaluate(legend("Tool")) == "0"
        assert await tab.evaluate(tile("Live sessions", ".alarm")) == "1 idle"
        await tab.until("document.querySelector('#versions').innerText.includes('2 engines')", "both engines")
        await e1.die()
        await tab.until(f"{tile('Engines serving', '.alarm')} === '1 dead'", "the dead engine")
        await tab.until("document.querySelector('#engines tr').className === 'dead'", "the dead one first")
        row = await tab.evaluate(
            "[...document.querySelector('#engines tr').cells].slice(3).map((one) => one.innerText)"
        )
        assert row == ["–", "–", "–"], "neither intake, nor turns, nor KV"
        await tab.until("document.querySelector('#versions').innerText.includes('1 engine,')", "that it serves none")
        assert "Down" in await tab.text("#legend")
        colour = "getComputedStyle(document.querySelector('.swatch.%s')).backgroundColor"
        assert await tab.evaluate(colour % "down") != await tab.evaluate(colour % "version")


async def test_work_that_was_lost_is_not_in_small_print(tab: Page, tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0, experience_max=1) as (found, http):
        await open_dashboard(tab, found.url)
        assert await tab.evaluate(tile("Experience buffer", ".alarm")) == ""
        await finish(http, "s1", 1.0)
        await finish(http, "s2", 1.0)
        await tab.until(f"{tile('Experience buffer', '.alarm')} === '1 evicted unused'", "the loss")
        lost = await tab.until("document.querySelector('#buffer .wait.bad')?.innerText", "the loss, with its reason")
        assert lost.startswith("1 evicted unused, for room"), lost


async def test_the_tiles_and_the_legend_are_of_one_moment(tab: Page, tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (found, http):
        await open_dashboard(tab, found.url)
        both = f"{tile('Live sessions')} + ' of ' + [...document.querySelectorAll('#legend b')]"
        both += ".reduce((sum, one) => sum + Number(one.textContent), 0)"
        await tab.evaluate(
            f"(window.seen = new Set(), new MutationObserver(() => window.seen.add({both})).observe("
            "document.querySelector('main'), {subtree: true, childList: true, characterData: true}), true)"
        )
        for number in range(12):
            await call(http, "/sessions", {"session_id": f"s{number}"})
            await tab.until(f"{legend('Tool')} === '{number + 1}'", "another session")
        seen = await tab.evaluate("[...window.seen]")
        assert len(seen) >= 12
        assert [one for one in seen if len(set(one.split(" of "))) != 1] == []


async def test_a_panel_that_fails_is_said_and_stops_no_other(tab: Page, tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (found, http):
        await open_dashboard(tab, found.url)
        await tab.evaluate("Number.prototype.toPrecision = () => { throw new Error('made to fail') }, true")
        await finish(http, "s1", 1.0)
        await tab.until("document.querySelector('#banner').innerText.includes('made to fail')", "notice of it")
        await call(http, "/sessions", {"session_id": "s2"})
        await tab.until(f"{tile('Live sessions')} === '1'", "the others go on")
        tab.complaints.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["laptop", "phone"])
async def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(
    tab: Page, tmp_path: Path, scheme: str, width: int, height: int
) -> None:
    gone = ScriptedEngine("gone", url="http://127.0.0.1:9")
    await tab.size(width, height, mobile=width < 600)
    await tab.scheme(scheme)
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0, gone) as (found, http):
        await call(http, "/sessions", {"session_id": "s1"})
        await turn_of(http, "s1", [5, 6, 7])
        await open_dashboard(tab, found.url)
        await finish(http, "s0", 0.5)
        await show(tab, "s1")
        await tab.until("document.querySelector('.token')", "the transcript")
        await tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert await tab.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        assert await tab.violations() == []
        await tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = false")
        assert await tab.violations() == []


async def test_axe_finds_nothing_where_a_key_is_asked_for_and_without_a_gateway(tab: Page, tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0) as (found, _):
        await tab.goto(f"{found.url}/ui")
        await tab.until("document.querySelector('#key-form')?.hidden === false", "the question")
        assert await tab.violations() == []
        await tab.type(key_of("reader"))
        await tab.key("Enter")
        await tab.until(LIVE, "the first picture")
    await tab.until("!document.querySelector('#banner').hidden", "notice of the end")
    assert await tab.violations() == []
