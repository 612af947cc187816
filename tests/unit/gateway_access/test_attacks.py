"""Requests that access control refuses, and those beside them that it lets through, over a whole gateway.

All of them are sent to one gateway. What is let through here changes nothing: its body is wrong, or it only looks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from gateway.api.routes import ROUTES
from gateway.app import Gateway
from gateway.core.access import OPERATE, OPERATIONS, SessionKey, Target, refusal
from gateway.core.types import SessionId
from protos.access.roles import ApiKey
from tests.support.keys import CALL, HOLDERS, Client, by, controlled, key_of
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Scene:
    """`mine` is a session of alice with a turn, `theirs` one of bob; `g` is a group of alice."""

    gateway: Gateway
    client: Client
    mine: Mapping[str, str]
    theirs: Mapping[str, str]

    def key(self, who: str) -> str:
        """Of a holder, or of a session: "mine acts", "theirs finishes"."""
        name, _, does = who.partition(" ")
        if does in ("acts", "finishes"):
            session = self.mine if name == "mine" else self.theirs
            return session["api_key" if does == "acts" else "finish_key"]
        return key_of(who) if who in HOLDERS else who


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    directory = tmp_path_factory.mktemp("attacks")
    async with ScriptedEngine("e0") as e0, controlled(directory, e0) as (found, client):
        mine = await client.expect(200, "alice", "POST", "/sessions", {"session_id": "mine"})
        theirs = await client.expect(200, "bob", "POST", "/sessions", {"session_id": "theirs"})
        await client.expect(200, "alice", "POST", "/sessions/mine/v1/completions", CALL)
        await client.expect(200, "alice", "POST", "/groups", {"group_id": "g", "group_size": 1})
        yield Scene(found, client, mine, theirs)


FINISH, REWARD = {"reward": 1.0}, {"turns": {}}
ENGINE = {"name": "e9", "url": "http://127.0.0.1:1", "check": False}
SAMPLE = {"reader": "thief", "trainer_version": 0, "trajectories": 1}
ATTACKS: tuple[tuple[str, str, str, Any, int], ...] = (
    # nobody
    *(
        ("", method, path, None, 401)
        for method, path in (
            ("GET", "/status"),
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("GET", "/admin/timeline"),
            ("GET", "/admin/sessions"),
            ("GET", "/ui/feed"),
            ("GET", "/sessions/mine"),
            ("GET", "/sessions/mine/trajectories"),
            ("GET", "/experience/rows"),
            ("GET", "/tasks"),
            ("POST", "/sessions"),
            ("POST", "/sessions/mine/finish"),
            ("POST", "/finish_session?session_id=mine"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/sessions/mine/v1/completions"),
            ("POST", "/s/mine/v1/messages"),
            ("DELETE", "/admin/engines/e0"),
            ("GET", "/there/is/no/such/route"),
            ("PATCH", "/status"),
        )
    ),
    ("", "GET", "/healthz", None, 200),
    ("", "GET", "/health", None, 200),
    ("", "GET", "/openapi.json", None, 200),
    ("", "GET", "/ui", None, 200),
    ("", "GET", "/ui/app.js", None, 200),
    ("", "GET", "/ui/..%2froutes.py", None, 404),
    ("", "GET", "/ui/%2e%2e/status", None, 401),
    ("", "GET", "/ui/nothing.js", None, 404),
    # a key that nobody has
    ("x" * 24, "GET", "/status", None, 401),
    ("x" * 24, "POST", "/v1/completions", CALL, 401),
    ("x" * 8000, "GET", "/status", None, 401),
    (key_of("admin")[:-1], "GET", "/status", None, 401),
    (key_of("admin") + "x", "GET", "/status", None, 401),
    (key_of("admin").upper(), "GET", "/status", None, 401),
    (f"{key_of('admin')} {key_of('admin')}", "GET", "/status", None, 401),
    ("root", "GET", "/status", None, 401),
    ("none", "GET", "/status", None, 401),
    ("sk-session-", "GET", "/v1/models", None, 401),
    ("sk-finish-", "POST", "/sessions/mine/finish", FINISH, 401),
    # an agent where administrators and trainers are
    ("alice", "POST", "/admin/engines", ENGINE, 403),
    ("alice", "DELETE", "/admin/engines/e0", None, 403),
    ("alice", "POST", "/admin/repack", None, 403),
    ("alice", "GET", "/admin/repack", None, 403),
    ("alice", "GET", "/admin/sessions", None, 403),
    ("alice", "GET", "/admin/timeline", None, 403),
    ("alice", "GET", "/status", None, 403),
    ("alice", "GET", "/metrics", None, 403),
    ("alice", "GET", "/ui/feed?frames=1", None, 403),
    ("mine acts", "GET", "/ui/feed?frames=1", None, 403),
    ("alice", "POST", "/experience/sample", SAMPLE, 403),
    ("alice", "POST", "/experience/ack", {"lease_id": "l"}, 403),
    ("alice", "POST", "/experience/evict", {"session_ids": ["mine"]}, 403),
    ("alice", "GET", "/experience/rows", None, 403),
    ("alice", "POST", "/tasks", {"tasks": []}, 403),
    ("alice", "POST", "/tasks/remove", {"drained": True}, 403),
    ("alice", "POST", "/tasks/priorities", {"priorities": {}}, 403),
    # an administrator on the port of all
    ("admin", "POST", "/admin/engines", ENGINE, 403),
    ("admin", "DELETE", "/admin/engines/e0", None, 403),
    ("admin", "POST", "/admin/repack", None, 403),
    ("admin", "GET", "/admin/repack", None, 200),
    # a trainer where administrators are
    ("trainer", "POST", "/admin/engines", ENGINE, 403),
    ("trainer", "DELETE", "/admin/engines/e0", None, 403),
    ("trainer", "POST", "/admin/repack", None, 403),
    ("trainer", "GET", "/status", None, 200),
    ("trainer", "GET", "/sessions/mine", None, 200),
    # a reader that writes
    ("reader", "GET", "/status", None, 200),
    ("reader", "GET", "/ui/feed?frames=1", None, 200),
    ("reader", "GET", "/sessions/mine", None, 200),
    ("reader", "GET", "/sessions/mine/trajectories", None, 200),
    ("reader", "GET", "/experience/rows", None, 200),
    ("reader", "POST", "/sessions", {}, 403),
    ("reader", "POST", "/v1/completions", CALL, 403),
    ("reader", "POST", "/sessions/mine/v1/completions", CALL, 403),
    ("reader", "POST", "/sessions/mine/finish", FINISH, 403),
    ("reader", "POST", "/sessions/mine/abandon", None, 403),
    ("reader", "POST", "/experience/sample", SAMPLE, 403),
    ("reader", "POST", "/tasks/lease", {"runner": "r"}, 403),
    ("reader", "POST", "/admin/repack", None, 403),
    ("reader", "GET", "/groups/g", None, 403),  # its answer has keys
    # another's session and group
    ("bob", "POST", "/sessions/mine/finish", FINISH, 403),
    ("bob", "POST", "/finish_session?session_id=mine", FINISH, 403),
    ("bob", "POST", "/sessions/mine/reward", REWARD, 403),
    ("bob", "POST", "/sessions/mine/abandon", None, 403),
    ("bob", "GET", "/sessions/mine", None, 403),
    ("bob", "GET", "/sessions/mine/trajectories", None, 403),
    ("bob", "POST", "/sessions/mine/v1/completions", CALL, 403),
    ("bob", "POST", "/s/mine/v1/completions", CALL, 403),
    ("bob", "POST", "/v1/completions", {**CALL, "session_id": "mine"}, 403),
    ("bob", "POST", "/v1/completions", {**CALL, "metadata": {"session_id": "mine"}}, 403),
    ("bob", "POST", "/v1/completions", {**CALL, "user": "mine"}, 403),
    ("bob", "POST", "/inference/v1/generate", {"model": "policy", "token_ids": [5], "session_id": "mine"}, 403),
    ("bob", "GET", "/groups/g", None, 403),
    ("bob", "POST", "/groups/g/abandon", None, 403),
    ("bob", "POST", "/sessions", {"group_id": "g"}, 403),
    ("bob", "POST", "/sessions", {"parent_session_id": "mine"}, 403),
    ("bob", "POST", "/groups", {"group_size": 1, "session": {"parent_session_id": "mine"}}, 403),
    ("bob", "POST", "/sessions/g/v1/completions", CALL, 403),  # it would make a session in the group of that name
    ("bob", "POST", "/sessions/nobodys/finish", FINISH, 404),
    ("bob", "GET", "/groups/nobodys", None, 404),
    # a session's own key
    ("mine acts", "GET", "/sessions/mine", None, 200),
    ("mine acts", "GET", "/sessions/mine/trajectories", None, 200),
    ("mine acts", "GET", "/v1/models", None, 200),
    ("mine acts", "POST", "/sessions/mine/finish", FINISH, 403),
    ("mine acts", "POST", "/finish_session?session_id=mine", FINISH, 403),
    ("mine acts", "POST", "/sessions/mine/reward", REWARD, 403),
    ("mine acts", "POST", "/sessions/mine/abandon", None, 403),
    ("mine acts", "GET", "/sessions/theirs", None, 403),
    ("mine acts", "GET", "/sessions/nobodys", None, 403),
    ("mine acts", "GET", "/sessions/theirs/v1/models", None, 403),
    ("mine acts", "POST", "/sessions/theirs/v1/completions", CALL, 403),
    ("mine acts", "POST", "/sessions/nobodys/v1/completions", CALL, 403),
    ("mine acts", "POST", "/sessions/theirs/finish", FINISH, 403),
    ("mine acts", "POST", "/sessions", {}, 403),
    ("mine acts", "GET", "/groups/g", None, 403),
    ("mine acts", "POST", "/groups", {"group_size": 1}, 403),
    ("mine acts", "POST", "/tasks/lease", {"runner": "r"}, 403),
    ("mine acts", "POST", "/experience/sample", SAMPLE, 403),
    ("mine acts", "GET", "/status", None, 403),
    ("mine acts", "POST", "/admin/engines", ENGINE, 403),
    # its finish key
    ("mine finishes", "GET", "/sessions/mine", None, 200),
    ("mine finishes", "POST", "/sessions/mine/reward", REWARD, 200),
    ("mine finishes", "POST", "/sessions/mine/v1/completions", CALL, 403),
    ("mine finishes", "POST", "/v1/completions", CALL, 401),
    ("mine finishes", "POST", "/sessions/theirs/finish", FINISH, 401),
    ("mine finishes", "POST", "/finish_session?session_id=theirs", FINISH, 401),
    ("mine finishes", "POST", "/sessions", {}, 401),
    ("mine finishes", "POST", "/groups/g/abandon", None, 401),
    ("theirs finishes", "POST", "/sessions/mine/finish", FINISH, 401),
)


@pytest.mark.parametrize(
    ("who", "method", "path", "body", "status"), ATTACKS, ids=[f"{a[0][:16]} {a[1]} {a[2]}" for a in ATTACKS]
)
async def test_attacks(scene: Scene, who: str, method: str, path: str, body: Any, status: int) -> None:
    answer = await scene.client.expect(status, scene.key(who), method, path, body)
    if status in (401, 403):
        error = answer["error"]
        assert error["message"]
        if "/v1/messages" in path:
            assert (answer["type"], error["type"], bool(answer["request_id"])) == (
                "error",
                "authentication_error" if status == 401 else "permission_error",
                True,
            )
        else:
            assert error["code"] == ("unauthenticated" if status == 401 else "forbidden")


async def test_what_was_refused_has_changed_nothing(scene: Scene) -> None:
    for name, turns in (("mine", 1), ("theirs", 0)):
        session = await scene.client.expect(200, "admin", "GET", f"/sessions/{name}")
        assert (session["state"], session["turns"]) == ("live", turns)
    status = await scene.client.expect(200, "admin", "GET", "/status")
    assert [engine["name"] for engine in status["engines"]] == ["e0"]
    assert status["counters"]["turns_started"] == 1
    group = await scene.client.expect(200, "alice", "GET", "/groups/g")
    assert (group["state"], len(group["sessions"])) == ("open", 1)


async def test_a_401_says_how_to_send_a_key_and_is_not_sent_again(scene: Scene) -> None:
    for path in ("/v1/completions", "/v1/messages"):
        async with scene.client.http.post(path, json={}) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert answer.headers["x-should-retry"] == "false"
            assert "Authorization: Bearer KEY" in await answer.text()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"bearer {key_of('reader')}"}, 200),
        ({"Authorization": f"Bearer   {key_of('reader')} "}, 200),
        ({"X-Api-Key": key_of("reader")}, 200),
        ({"X-Api-Key": key_of("reader"), **by("admin"[:3])}, 200),
        ({"X-Api-Key": "x" * 24}, 401),
        ({"Authorization": key_of("reader")}, 401),
        ({"Authorization": f"Basic {key_of('reader')}"}, 401),
        ({"Authorization": f"Token {key_of('reader')}"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": ""}, 401),
        ({"Authorization": f"Bearer {key_of('reader')},{key_of('admin')}"}, 401),
        ({"Proxy-Authorization": f"Bearer {key_of('reader')}"}, 401),
        ({"X-Session-ID": "mine"}, 401),
        ({"Authorization": "Bearer " + "x" * 100_000}, 431),
    ],
)
async def test_odd_headers(scene: Scene, headers: dict[str, str], status: int) -> None:
    async with scene.client.http.get("/status", headers=headers) as answer:
        assert answer.status == status, await answer.text()


@pytest.mark.parametrize(
    "key", [b"\xff\xfe" * 12, "é".encode() * 12, b"\x01" * 24, b"sk-finish-\xff", b"sk-session-\xff"]
)
async def test_bytes_that_are_no_text_are_no_key(scene: Scene, key: bytes) -> None:
    url = URL(scene.gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /sessions/mine/finish HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nAuthorization: Bearer " + key)
    writer.write(b"\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.split(b" ")[1] in (b"401", b"400"), answer
    assert b"error" in answer


async def test_a_key_in_a_head_that_is_no_http_is_not_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    url, key = URL(scene.gateway.url), key_of("admin").encode()
    with caplog.at_level(logging.DEBUG):
        for line in (b"Authorization: Bearer " + key + b"\x00", b"Authorization Bearer " + key, b": Bearer " + key):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\n" + line + b"\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            assert answer.split(b" ")[1] == b"400", answer
            assert key not in answer
    assert "the request is no HTTP" in caplog.text
    assert key.decode() not in caplog.text


@pytest.mark.parametrize(
    "head", [b"Authorization: Bearer " + b"a" * 20_000, b"\r\n".join(b"X-%d: y" % n for n in range(5_000))]
)
async def test_a_head_that_is_too_large_is_said_to_be_so(scene: Scene, head: bytes) -> None:
    url = URL(scene.gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\n" + head + b"\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.split(b" ")[1] == b"431", answer
    assert b"send fewer or shorter headers" in answer


async def test_the_url_and_the_query_are_no_place_for_a_key(scene: Scene) -> None:
    key = key_of("reader")
    for path in (f"/status?api_key={key}", f"/status?access_token={key}", f"/status#{key}"):
        await scene.client.expect(401, "", "GET", path)


async def test_a_key_in_a_header_beside_a_sessions_own_does_not_widen_it(scene: Scene) -> None:
    """The session's key acts for `mine` alone, whatever else the request names."""
    theirs = scene.theirs["api_key"]
    for headers in ({"X-Session-ID": "theirs"}, {"X-Claude-Code-Session-Id": "theirs"}, {"Thread-Id": "theirs"}):
        await scene.client.expect(403, scene.mine["api_key"], "POST", "/v1/completions", CALL, **headers)
    await scene.client.expect(
        403, scene.mine["api_key"], "POST", "/sessions/theirs/v1/completions", CALL, **{"X-Api-Key": theirs}
    )


# -- the whole table, by itself


PATHS = {
    "{sid}": "mine",
    "{gid}": "g",
    "{name}": "none",
    "{number}": "1",
    "{model}": "policy",
    "{response_id}": "resp_x",
}
CALLERS = (*HOLDERS, "mine acts", "theirs acts")


def expected(who: str, operation: Any, path: str) -> bool:
    """Whether the operation allows it on the port of all, by the table itself."""
    target = Target(SessionId("mine"), "alice") if "{sid}" in path else None
    target = Target(None, "alice") if "{gid}" in path else target
    name, _, does = who.partition(" ")
    caller = SessionKey(SessionId(name)) if does == "acts" else ApiKey(*HOLDERS[who], b"")
    return operation is not OPERATE and (operation.public or refusal(operation, caller, target) == "")


@pytest.mark.parametrize("who", CALLERS)
async def test_every_route_is_open_to_whom_its_operation_allows_and_to_nobody_else(scene: Scene, who: str) -> None:
    wrong = []
    for route in ROUTES:
        path = route.path
        for name, value in PATHS.items():
            path = path.replace(name, value)
        headers = {"Authorization": f"Bearer {scene.key(who)}"}
        async with scene.client.http.request(route.method, path, data=b"{", headers=headers) as answer:
            allowed = answer.status not in (401, 403)
        if allowed != expected(who, route.operation, route.path):
            wrong.append((route.method, route.path, answer.status))
    assert wrong == []


async def test_every_route_that_is_served_has_an_operation(scene: Scene) -> None:
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in scene.gateway.listener.runner.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert served == {(route.method, route.path) for route in ROUTES}
    assert {route.operation for route in ROUTES} <= set(OPERATIONS)


async def test_head_is_as_get(scene: Scene) -> None:
    for who, status in (("", 401), ("alice", 403), ("reader", 200)):
        async with scene.client.http.head("/status", headers=by(who) if who else {}) as answer:
            assert answer.status == status


async def test_a_route_that_is_not_there_is_said_to_whoever_has_a_key(scene: Scene) -> None:
    assert "no route" in (await scene.client.expect(404, "alice", "GET", "/nowhere"))["error"]["message"]
    await scene.client.expect(405, "alice", "PATCH", "/status")


async def test_no_key_is_in_the_report(scene: Scene) -> None:
    status = await scene.client.expect(200, "reader", "GET", "/status")
    assert status["access"] == {
        "keys": {"admin": 1, "trainer": 1, "agent": 3, "reader": 1},
        "insecure": False,
        "agents_may_reward": False,
        "failure": "",
        "admin_listen": scene.gateway.admin_url,
    }
    for path in (
        "/status",
        "/metrics",
        "/admin/timeline",
        "/admin/sessions",
        "/sessions/mine",
        "/sessions/mine/trajectories",
    ):
        _, told = await scene.client.send("reader", "GET", path)
        found = [
            key
            for key in (*map(key_of, HOLDERS), *scene.mine.values())
            if key.startswith(("key-", "sk-")) and key in str(told)
        ]
        assert found == []


async def test_many_clients_at_once_get_what_is_theirs(scene: Scene) -> None:
    async def look(who: str, status: int) -> None:
        async with aiohttp.ClientSession(scene.gateway.url) as http:
            await Client(http).expect(status, scene.key(who), "GET", "/sessions/mine")

    await asyncio.gather(*(look(*each) for each in (("alice", 200), ("bob", 403), ("mine acts", 200), ("", 401)) * 10))
