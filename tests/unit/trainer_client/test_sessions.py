"""Sessions of agents through a real gateway: finished once, abandoned by an exception, whatever answers are lost."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protos.errors import Conflict, InvalidRequest, LaminarError, Misdirected, OutOfCapacity, Unavailable, WrongServer
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.unit.gateway_api.test_status import gateway
from trainer_client import AsyncExperienceReader, AsyncPromptPool, AsyncSessions, Sessions, Trajectory
from trainer_client.gateway_http import Presence, Retry
from trainer_client.rewards import NoNumber
from trainer_client.sessions import AsyncSession, Made, Pause, Post, Session


@dataclass
class Scene:
    url: str

    async def play(self, work: Callable[[Sessions], Any]) -> Any:
        """What `work` returns, in a thread, of a client that is closed then."""

        def played() -> Any:
            with Sessions(self.url, MODEL) as sessions:
                return work(sessions)

        return await asyncio.to_thread(played)

    async def state(self, session_id: str) -> str:
        async with httpx.AsyncClient() as http:
            found: str = (await http.get(f"{self.url}/sessions/{session_id}")).json()["state"]
        return found

    async def trajectory(self) -> Trajectory:
        """The only one."""
        async with AsyncExperienceReader(self.url) as reader:
            [found] = (await reader.sample(trajectories=9, wait_s=0)).trajectories
        return found


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, _):
        yield Scene(found.url)


async def test_a_finished_session_is_one_trajectory(scene: Scene) -> None:
    def work(sessions: Sessions) -> None:
        with sessions.open(group_id="g", tags={"task": "sum"}) as session:
            session.openai.completions.create(model=MODEL, prompt=[5], max_tokens=2)
            session.finish(True, metrics={"tries": 1}, status="truncated")

    await scene.play(work)
    found = await scene.trajectory()
    assert (found.group_id, found.reward, found.status, found.metrics) == ("g", 1.0, "truncated", {"tries": 1.0})
    assert sum(found.loss_mask) == 2


async def test_asyncio_does_the_same(scene: Scene) -> None:
    async with AsyncSessions(scene.url) as sessions:
        async with sessions.open(group_id="g") as session:
            await session.openai.completions.create(model=MODEL, prompt=[5], max_tokens=2)
            await session.finish(0.5)
        with pytest.raises(ZeroDivisionError):
            async with sessions.open(session_id="broken"):
                raise ZeroDivisionError("no agent")
        async with sessions.open(session_id="forgotten"):
            pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), sessions.open(session_id="cancelled"):
                await asyncio.Event().wait()
    assert (await scene.trajectory()).reward == 0.5
    assert {await scene.state(name) for name in ("broken", "forgotten", "cancelled")} == {"abandoned"}


async def test_a_block_that_ends_without_a_finish_abandons_its_session_and_says_so(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def work(sessions: Sessions) -> None:
        with sessions.open(session_id="forgotten"):
            pass
        with pytest.raises(ZeroDivisionError), sessions.open(session_id="broken"):
            raise ZeroDivisionError("no agent")
        with pytest.raises(NoNumber, match="the agent of session s0 gave nan as the reward"):  # noqa: SIM117
            with sessions.open(session_id="s0") as session:
                session.finish(float("nan"))
        with pytest.raises(NoNumber, match="the agent of session s1 gave None as the reward"):  # noqa: SIM117
            with sessions.open(session_id="s1") as session:
                session.finish(None)  # type: ignore[arg-type]

    await scene.play(work)
    assert {await scene.state(name) for name in ("forgotten", "broken", "s0", "s1")} == {"abandoned"}
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["session forgotten is abandoned: its block ended without finish(reward)"]


class Loses(Sessions):
    """Loses the answer to each request once: it is carried out, and sent again."""

    def __init__(self, url: str) -> None:
        super().__init__(url, MODEL)
        self.lost: dict[str, Any] = {}

    def _done(self, step: Post | Pause) -> Any:
        if isinstance(step, Pause):
            return None
        answer = super()._done(step)
        if step.path not in self.lost:
            self.lost[step.path] = answer
            raise Unavailable("the answer was lost")
        return answer


async def test_what_was_carried_out_and_not_answered_has_no_second_effect(scene: Scene) -> None:
    def work() -> tuple[str, set[str], set[str]]:
        with Loses(scene.url) as sessions:
            with sessions.open(group_id="g") as session:
                session.complete([5], max_tokens=2)
                session.finish(1.0)
            abandoned = sessions.open()
            abandoned.abandon("no agent")
            assert len(sessions.lost) == 5, "the open, the call, the finish, and both abandons"
            _, members = sessions.open_group(2)
            unanswered = [sessions.lost["/sessions"], *sessions.lost["/groups"]["sessions"]]
            ended = {abandoned.session_id, *(made["session_id"] for made in unanswered)}
            return session.session_id, ended, {member.session_id for member in members}

    played, ended, members = await asyncio.to_thread(work)
    found = await scene.trajectory()
    assert (found.session_id, found.group_id, found.reward, found.turns) == (played, "g", 1.0, 1)
    assert {await scene.state(name) for name in ended} == {"abandoned"}
    assert {await scene.state(name) for name in members} == {"live"}


class Drops(Sessions):
    """Loses its first request on the way to the gateway."""

    dropped = False

    def _done(self, step: Post | Pause) -> Any:
        if isinstance(step, Post) and not self.dropped:
            self.dropped = True
            raise Unavailable("nobody answered")
        return super()._done(step)


@pytest.mark.parametrize("key", [None, "sk-agent"])
async def test_a_session_of_somebody_else_is_neither_taken_nor_ended(scene: Scene, key: str | None) -> None:
    def work(sessions: Sessions) -> None:
        with sessions.open(session_id="s0") as session:
            with pytest.raises(Conflict, match="already a session 's0'") as plain:
                sessions.open(session_id="s0")
            assert "earlier try" not in str(plain.value)
            with (
                Drops(scene.url, MODEL, api_key=key) as other,
                pytest.raises(Conflict, match=r"already a session 's0'.*an earlier try .* may have made it"),
            ):
                other.open(session_id="s0")
            session.complete([5], max_tokens=2)
            session.finish(1.0)

    await scene.play(work)
    assert (await scene.trajectory()).session_id == "s0"


async def test_a_session_ends_also_where_only_agents_reach_its_base_url(tmp_path: Path) -> None:
    completion = {"model": MODEL, "prompt": [5], "max_tokens": 2}
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path, e0, public_url="http://127.0.0.1:9") as (found, http),
    ):
        scene = Scene(found.url)

        def play() -> str:
            with Sessions(found.url, MODEL, patience_s=1.0) as sessions:
                with sessions.open(session_id="s0") as session:
                    httpx.post(f"{found.url}/sessions/s0/v1/completions", json=completion)
                    session.finish(1.0)
                with sessions.open(session_id="s1"):
                    pass
                return session.base_url

        assert (await asyncio.to_thread(play)).startswith("http://127.0.0.1:9/")
        async with AsyncSessions(found.url, patience_s=1.0) as sessions:
            async with sessions.open(session_id="s2") as session:
                await http.post("/sessions/s2/v1/completions", json=completion)
                await session.finish(1.0)
            async with sessions.open(session_id="s3"):
                pass
        assert [await scene.state(f"s{i}") for i in range(4)] == ["finished", "abandoned", "finished", "abandoned"]


class Scripted(Sessions):
    """Has these answers, and sends nothing."""

    def __init__(self, url: str, *answers: dict[str, Any] | LaminarError) -> None:
        super().__init__(url, MODEL)
        self.answers = iter(answers)
        self.sent: list[str] = []
        self.names: list[str | None] = []  # of groups, in their bodies

    def _done(self, step: Post | Pause) -> Any:
        if isinstance(step, Pause):
            return None
        self.sent.append(step.gateway + step.path)
        self.names.append(step.body.get("group_id"))
        answer = next(self.answers)
        if isinstance(answer, LaminarError):
            raise answer
        return answer


def test_one_bad_answer_loses_no_reward_at_a_gateway_that_is_known() -> None:
    a, b = "http://a:8080", "http://b:8080"
    made = {"session_id": "s0", "base_url": "http://agents-only/sessions/s0/v1", "api_key": ""}
    bad = WrongServer("a page of a proxy")
    with Scripted(a, made, bad, Misdirected("not here", url=b), bad, {}) as sessions:
        sessions.open(session_id="s0").finish(1.0)
        assert sessions.sent == [f"{a}/sessions", *[f"{a}/sessions/s0/finish"] * 2, *[f"{b}/sessions/s0/finish"] * 2]


def test_a_group_gets_another_name_after_a_try_that_was_not_answered() -> None:
    url, made, lost = "http://a:8080", {"group_id": "g", "sessions": []}, Unavailable("the answer was lost")
    with Scripted(url, OutOfCapacity("full"), lost, made, {}) as sessions:
        sessions.open_group(2)
        full, first, second, _ = sessions.names
        assert full == first != second, "the next try would be sent to the gateway that has the first, and may be away"
        assert sessions.sent[3:] == [f"{url}/groups/{first}/abandon"]
    with (
        Scripted(url, lost, Conflict("there was already a group 'g'")) as sessions,
        pytest.raises(
            Conflict, match=r"an earlier try .* may have made it: look at it with GET /groups/g, and abandon"
        ),
    ):
        sessions.open_group(2, group_id="g")


class Unanswered(Sessions):
    """What it makes is made, and never answered."""

    def __init__(self) -> None:
        super().__init__("http://a:8080", MODEL, patience_s=1.0)
        self.made: list[str] = []
        self.ended: list[str] = []

    def _done(self, step: Post | Pause) -> Any:
        if isinstance(step, Pause):
            return None
        if step.path.endswith("/abandon"):
            self.ended.append(step.path.split("/")[2])
            return {}
        name = step.body["session_id"]
        if name in self.made:
            raise Conflict(f"there is already {name}")
        self.made.append(name)
        raise Unavailable("a proxy answered 504")


def test_what_is_never_answered_is_made_for_as_long_as_the_patience() -> None:
    with Unanswered() as sessions:
        with pytest.raises(Unavailable, match="a proxy answered 504"):
            sessions.open()
        assert 2 <= len(sessions.made) <= 4
        assert sessions.ended == sessions.made[:-1]


def test_a_conflict_that_is_not_the_names_own_is_raised() -> None:
    lost, full = Unavailable("the answer was lost"), Conflict("the group has all its samples")
    with Scripted("http://a:8080", lost, full, {}, full) as sessions, pytest.raises(Conflict, match="all its samples"):
        sessions.open(group_id="g")


async def test_why_a_group_is_abandoned_may_be_a_long_text(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    def work(sessions: Sessions) -> set[str]:
        group_id, members = sessions.open_group(2)
        sessions.abandon_group(group_id, "x" * 3000)
        return {member.session_id for member in members}

    members = await scene.play(work)
    assert {await scene.state(name) for name in members} == {"abandoned"}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_an_openai_base_url_names_its_gateway(scene: Scene) -> None:
    url = f"{scene.url}/v1/"
    async with AsyncExperienceReader(url) as reader, AsyncPromptPool(url) as pool, AsyncSessions(url) as sessions:
        assert not await reader.sample(trajectories=1, wait_s=0)
        assert (await pool.status()).tasks == 0
        async with sessions.open():
            pass


async def test_openai_is_named_where_it_is_missing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)

    def work(sessions: Sessions) -> str:
        with sessions.open() as session:
            with pytest.raises(InvalidRequest, match=r"needs the package `openai`.*pip install openai"):
                _ = session.openai
            return session.base_url

    assert "/v1" in await scene.play(work)


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_that_is_cut_is_asked_for_again(chunked: bool) -> None:
    made = b'{"session_id": "s0", "base_url": "http://127.0.0.1:9/sessions/s0/v1", "api_key": ""}'
    body = b"54\r\n" + made + b"\r\n0\r\n\r\n" if chunked else made
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 84"
    whole = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + length + b"\r\n\r\n" + body
    asked: list[bytes] = []

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split()[1])
        writer.write(whole if len(asked) % 2 == 0 else whole[:-20])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def play() -> None:
        with Sessions(url, MODEL) as sessions, sessions.open() as session:
            session.finish(1.0)

    async with server, AsyncSessions(url) as sessions:
        await asyncio.to_thread(play)
        async with sessions.open() as session:
            await session.finish(1.0)
    assert asked == [b"/sessions", b"/sessions", b"/sessions/s0/finish", b"/sessions/s0/finish"] * 2


FULL = b'{"error": {"message": "no engine took the turn", "code": "out_of_capacity"}}'
WRONG = b'{"error": {"message": "no model", "code": "not_found"}}'


async def test_the_log_says_why_openais_client_waits(caplog: pytest.LogCaptureFixture) -> None:
    tries = 0

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        await reader.readuntil(b"\r\n\r\n")
        status, body = (b"404", WRONG) if tries % 3 == 0 else (b"429", FULL)
        length = str(len(body)).encode()
        writer.write(b"HTTP/1.1 " + status + b" -\r\nRetry-After-Ms: 1\r\nContent-Length: " + length)
        writer.write(b"\r\nConnection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    made = Made("s0", f"{url}/sessions/s0/v1", "key")

    def call() -> None:
        with Sessions(url, MODEL) as client, pytest.raises(openai.NotFoundError):
            Session(made, client, {}).openai.completions.create(model=MODEL, prompt="x")

    async with server, AsyncSessions(url) as client:
        await asyncio.to_thread(call)
        with pytest.raises(openai.NotFoundError):
            await AsyncSession(made, client).openai.completions.create(model=MODEL, prompt="x")
    told = f"the gateway at {url} has no room, and is asked again: no engine took the turn"
    assert tries == 6
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [told] * 2


def test_the_patience_begins_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    retry, began = Retry(Presence("the gateway"), 1.0), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 3600)
    assert retry.pause_s(Unavailable("it was killed while a long request waited")) < 1
    monkeypatch.setattr(time, "monotonic", lambda: began + 3602)
    with pytest.raises(Unavailable):
        retry.pause_s(Unavailable("it is away"))


OTHERS = {
    "another web server": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello", "something else"),
    "an engine": (b'HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\n\r\n{"detail":"Not Found"}', "answered 404"),
    "a relay": (b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0@\0", "speaks no HTTP/1.1"),  # SETTINGS of HTTP/2
}


@pytest.mark.parametrize("other", OTHERS)
async def test_a_server_that_is_no_gateway_is_named_at_once(other: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, why = OTHERS[other]

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    named = rf"{url}.*{why}.*is another server listening there"

    def opens() -> None:
        with Sessions(url, MODEL) as client, pytest.raises(WrongServer, match=named):
            client.open()

    async with server, AsyncSessions(url) as sessions, AsyncExperienceReader(url) as reader:
        with pytest.raises(WrongServer, match=named):
            async with sessions.open():
                raise AssertionError("nothing was opened")
        await asyncio.to_thread(opens)
        with pytest.raises(WrongServer, match=named):
            await reader.sample(trajectories=1)
        with pytest.raises(WrongServer, match=rf"{url}.*is another server listening there"):
            await reader.peek(trajectories=1)
    assert not caplog.records, "nothing is sent again"
