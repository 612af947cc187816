"""Nothing that comes from outside holds the event loop: large bodies, many small values, sessions of many branches."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.api.bodies import check_decoded
from gateway.api.errors import BodyTooLarge
from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.core.sessions import SessionState
from gateway.core.tree import Turn
from gateway.core.types import TurnId
from gateway.runtime.garbage import collect_regularly
from protos.trajectories import Segment
from tests.support import codecs
from tests.support.loop_holds import HOLD_S_MAX, beating
from tests.support.scripted_engine import ScriptedEngine
from tests.support.turns import Script, ScriptedTurns, serving
from tests.unit.gateway_api.test_status import gateway

pytestmark = pytest.mark.slow
TRIES = 10
BRANCHES = 1000


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as found:
        yield found


async def shortest(ask: Callable[[int], Awaitable[None]]) -> float:
    """The longest hold while `ask` runs, in the best of some tries: a busy machine makes single ones longer.

    Garbage is collected as in a gateway's process: a full pass over all that the tests of this process left takes
    longer than what is measured."""
    found: list[float] = []
    collector = asyncio.create_task(collect_regularly(lambda: True))
    await asyncio.sleep(0)  # its first pass
    try:
        for number in range(TRIES):
            async with beating() as holds:
                await ask(number)
            found.append(holds.longest_s)
            if found[-1] < HOLD_S_MAX:
                break
    finally:
        collector.cancel()
        await asyncio.wait([collector])
    return min(found)


async def read(answer: aiohttp.ClientResponse, *, beginning: int = 0) -> tuple[int, bytes, int]:
    """Status, the beginning of the body and its length: joined, a long one would hold the client's loop."""
    first, length = b"", 0
    async for piece in answer.content.iter_any():
        first += piece[: max(0, beginning - len(first))]
        length += len(piece)
    return answer.status, first, length


def with_branches(session: SessionState, prompt_tokens: int = 2000, sampled: int = 20) -> None:
    """A thousand answers to one prompt, each with one more turn."""

    def segment(turn: int, start: int) -> Segment:
        times = {"started_unix_s": 1.0, "ended_unix_s": 2.0, "evidence": "told"}
        end = start + sampled
        return Segment(turn=turn, engine="e0", incarnation="i", version=7, start=start, end=end, cause="start", **times)

    def grow(name: str, parent: Turn | None, prompt: list[int]) -> Turn:
        start, depth = (0, 0) if parent is None else (parent.end, parent.depth + 1)
        ids, logprobs, segments = [4] * sampled, [-0.25] * sampled, [segment(depth, start + len(prompt))]
        above = None if parent is None else parent.turn_id
        turn = Turn(TurnId(name), above, depth, start, prompt, ids, logprobs, segments, "stop")
        session.tree.turns[turn.turn_id] = turn
        return turn

    root = grow("root", None, [number % 256 for number in range(prompt_tokens)])
    for number in range(BRANCHES):
        grow(f"t{number}", root, [5] * sampled)


async def test_a_session_of_a_thousand_branches(place: tuple[Gateway, aiohttp.ClientSession]) -> None:
    found, http = place

    async def seen_and_finished(number: int) -> None:
        session = f"s{number}"
        async with http.post("/sessions", json={"session_id": session}) as made:
            assert made.status == 200
        live = found.sessions.live.find(session)  # type: ignore[arg-type]
        assert live is not None
        with_branches(live)
        path = f"/sessions/{session}/trajectories"
        async with http.get(path) as answer:
            status, _, length = await read(answer)
            assert (status, length > BRANCHES * 2000) == (200, True)
        rewards = {f"t{number}": 1.0 for number in range(BRANCHES)}
        async with http.post(f"/sessions/{session}/finish", json={"reward": 0.5, "leaves": rewards}) as answer:
            assert (answer.status, (await answer.json())["leaves"]) == (200, BRANCHES)
        async with http.get(path) as answer:
            assert (await read(answer))[0] == 200
        wanted = {"reader": "r", "trainer_version": 0, "trajectories": 1}
        async with http.post("/experience/sample", json=wanted) as answer:
            assert (await read(answer))[0] == 200

    assert await shortest(seen_and_finished) < HOLD_S_MAX


async def test_what_is_shown_of_many_branches_is_what_is_shown_of_few(
    place: tuple[Gateway, aiohttp.ClientSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long answer is sent piece by piece, a short one at once: both are the same JSON, and the same msgpack."""
    found, http = place
    async with http.post("/sessions", json={"session_id": "s"}):
        pass
    live = found.sessions.live.find("s")  # type: ignore[arg-type]
    assert live is not None
    with_branches(live, prompt_tokens=3, sampled=2)
    async with http.get("/sessions/s") as answer:
        told = await answer.json()
    assert (told["tokens"], told["sampled_tokens"]) == (9, 2 * (BRANCHES + 1)), "of the newest path, and of all turns"

    async def shown(*, msgpack: bool = False) -> Any:
        if live.phase == "live":
            async with http.get("/sessions/s/trajectories?tokens=true") as answer:
                return await answer.json()
        accept = {"Accept": "application/msgpack" if msgpack else "application/json"}
        async with http.post("/experience/sample", json=wanted, headers=accept) as answer:
            sampled: Any = msgspec.msgpack.decode(await answer.read()) if msgpack else await answer.json()
        async with http.post("/experience/release", json={"lease_id": sampled["lease_id"]}) as answer:
            assert answer.status == 200
        return sampled["trajectories"]

    wanted = {"reader": "r", "trainer_version": 0, "trajectories": 1}
    at_once: list[Any] = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr("gateway.api.records.AT_ONCE_TOKENS", limit)
        at_once.append(await shown())
    for recorded in at_once:
        for one in recorded["trajectories"]:
            one["trajectory"].pop("finished_unix_s")
    assert at_once[0] == at_once[1]
    assert len(at_once[0]["trajectories"]) == BRANCHES
    async with http.post("/sessions/s/finish", json={"reward": 0.5}) as answer:
        assert answer.status == 200
    sampled = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr("gateway.api.experience.AT_ONCE_TOKENS", limit)
        sampled += [await shown(), await shown(msgpack=True)]
    assert len(sampled[0]) == BRANCHES
    assert sampled == [sampled[0]] * 4


async def test_a_group_of_4096_and_tasks_of_megabytes(place: tuple[Gateway, aiohttp.ClientSession]) -> None:
    _, http = place
    text = "y" * 900_000

    async def asked(number: int) -> None:
        pool = f"p{number}"
        async with http.post("/groups", json={"group_size": 4096, "group_id": f"g{number}"}) as answer:
            assert (await read(answer))[0] == 200
        for batch in range(4):
            tasks = b",".join(b'{"data":{"n":%d,"x":"%s"}}' % (20 * batch + n, text.encode()) for n in range(20))
            body = io.BytesIO(b'{"pool":"%s","tasks":[%s]}' % (pool.encode(), tasks))
            async with http.post("/tasks", data=body) as answer:
                assert (await answer.json())["added"] == 20
        async with http.post("/tasks/lease", json={"pool": pool, "runner": "r", "count": 80}) as answer:
            status, begun, length = await read(answer, beginning=12)
            assert (status, begun, length > 80 * len(text)) == (200, b'{"leases":[{', True)

    assert await shortest(asked) < HOLD_S_MAX


CHAT = b'{"model":"policy","messages":[{"role":"user","content":'
MESSAGE = b'{"role":"user","content":"x"}'
BODY_BYTES = 31 << 20
TOO_LARGE, TOO_LONG = (413, b"too_large"), (400, b"context_length_exceeded")


def keys(field: str, num: int, more: str = "") -> bytes:
    """An object of so many keys, as a field of a body."""
    return b'{%s"%s":{%s}}' % (more.encode(), field.encode(), b",".join(b'"%d":1.5' % number for number in range(num)))


def tasks(num: int, fields: int) -> bytes:
    """So many tasks, each of so many small fields."""
    data = b",".join(b'"field_%d":"the value %d"' % (number, number) for number in range(fields))
    return b'{"tasks":[%s]}' % b",".join([b'{"data":{%s}}' % data] * num)


def call(arguments: bytes) -> bytes:
    """A chat with a call of these arguments."""
    function = b'{"name":"get","arguments":"%s"}' % arguments.replace(b'"', b'\\"')
    answer = b'{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":%s}]}' % function
    return CHAT + b'"x"},%s,{"role":"tool","tool_call_id":"c","content":"x"}]}' % answer


BODIES: dict[str, tuple[Callable[[], bytes], tuple[int, bytes]]] = {
    "63 MiB": (lambda: CHAT + b'"' + b"x" * (63 << 20) + b'"}]}', TOO_LARGE),
    "one text": (lambda: CHAT + b'"' + b"x" * BODY_BYTES + b'"}]}', TOO_LONG),
    "words": (lambda: CHAT + b'"' + b"what is it. " * (BODY_BYTES // 12) + b'"}]}', TOO_LONG),
    "one wide character": (lambda: CHAT + b'"' + b"x" * BODY_BYTES + "\U0001f600".encode() + b'"}]}', TOO_LARGE),
    "escapes": (lambda: CHAT + b'"' + b"\\n" * (BODY_BYTES // 2) + b'"}]}', TOO_LARGE),
    "backslashes": (lambda: CHAT + b'"' + b"\\\\" * (BODY_BYTES // 2) + b'"}]}', TOO_LARGE),
    "lists": (lambda: CHAT + b'"x"}],"metadata":{"a":[' + b"[]," * (BODY_BYTES // 3) + b"1]}}", TOO_LARGE),
    "objects": (lambda: CHAT + b'"x"}],"metadata":{"a":[' + b'{"b":1},' * (BODY_BYTES // 8) + b"1]}}", TOO_LARGE),
    "21 MB of messages": (
        lambda: b'{"model":"policy","messages":[' + b",".join([MESSAGE] * 700_000) + b"]}",
        TOO_LARGE,
    ),
    "a call of a long list": (lambda: call(b'{"a":[' + b"1234567," * 2_000_000 + b"1]}"), TOO_LARGE),
    "a call of as long a list as is taken": (lambda: call(b'{"a":[' + b"1234567," * 190_000 + b"1]}"), TOO_LONG),
    "a call of a long text with a wide character": (
        lambda: call(b'{"a":"' + b"def f(x): return " * (5_000_000 // 17) + "\U0001f600".encode() + b'"}'),
        TOO_LONG,
    ),
    "a schema in text": (
        lambda: CHAT + b'"x"}],"structured_outputs":{"json":"[' + b"1234567," * 2_000_000 + b'1]"}}',
        TOO_LARGE,
    ),
    "biases": (lambda: keys("logit_bias", 200_000, CHAT.decode() + '"x"}],'), TOO_LARGE),
    "as many lists as are taken": (
        lambda: CHAT + b'"x"}],"metadata":{"a":[' + b"[]," * 400_000 + b"1]}}",
        (200, b"prompt_tokens"),
    ),
    "as many messages as are taken": (
        lambda: b'{"model":"policy","messages":[' + b",".join([MESSAGE] * 60_000) + b"]}",
        TOO_LONG,
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_large_body(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [most] = [field.default for field in dataclasses.fields(GatewayConfig) if field.name == "body_bytes_max"]
    monkeypatch.setattr("tests.support.turns.BODY_BYTES_MAX", most)
    make, (status, code) = BODIES[name]
    body, turns = make(), ScriptedTurns(lambda request: Script([2]), context_tokens=1 << 16)
    async with serving(turns, codecs.qwen25()) as url, aiohttp.ClientSession(url) as http:

        async def asked(_: int) -> None:
            async with http.post("/v1/chat/completions", data=io.BytesIO(body)) as answer:
                found = await read(answer, beginning=500)
                assert (answer.status, code in found[1]) == (status, True), found

        assert await shortest(asked) < HOLD_S_MAX


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/sessions/s/finish", "metrics", '"reward":1,'),
        ("/sessions/s/finish", "leaves", '"reward":1,'),
        ("/tasks/priorities", "priorities", ""),
    ],
)
@pytest.mark.parametrize(("num", "status"), [(130_000, 400), (400_000, 413)])
async def test_a_body_of_many_keys(
    path: str, field: str, more: str, num: int, status: int, place: tuple[Gateway, aiohttp.ClientSession]
) -> None:
    _, http = place
    async with http.post("/sessions", json={"session_id": "s"}) as made:
        assert made.status == 200
    body = keys(field, num, more)

    async def asked(_: int) -> None:
        async with http.post(path, data=io.BytesIO(body)) as answer:
            assert answer.status == status, await answer.text()

    assert await shortest(asked) < HOLD_S_MAX


def test_every_route_reads_its_body_where_it_is_bounded() -> None:
    for path in sorted(Path("gateway/api").rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"request\.(json|post|text|multipart)\(", text), path
        handlers = text.count("await request.read()")
        assert handlers <= text.count("within(request, "), f"{path}: a body is read and not bounded"


BOUND = 40 << 20


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (b'["' + b"x" * BOUND + b'"]', False),
        (b'["' + b"x" * (BOUND - 4096) + b'"]', True),
        (b'["' + b'{[,\\"' * (3 << 20) + b'"]', True),  # within a text nothing is a value
        (b'["' + b'{[,\\\\",["' * (1 << 20) + b'"]', False),
        (b"[" + b"123456," * 1_000_000 + b"1]", True),
        (b"[" + b"123456," * 1_100_000 + b"1]", False),
        (b"[" + b"1, " * 2_500_000 + b"1]", True),  # short numbers are shared
        (b'["' + b"\\u2019" + b"x" * (BOUND // 2) + b'"]', False),
        (b'["' + b"\\u2019" + b"x" * (BOUND // 2 - 4096) + b'"]', True),
        (b'["' + b"\\ud83d\\ude00" + b"x" * (BOUND // 3) + b'"]', False),
        (b"[" + b"{}," * (BOUND // 300) + b"{}]", True),
        (keys("a", 130_000), True),
        (keys("a", 160_000), False),
        (tasks(10_000, 10), True),
        (tasks(40_000, 10), False),
    ],
    ids=range(15),
)
def test_a_body_is_priced_by_what_it_takes_decoded(raw: bytes, kept: bool) -> None:
    for shift in range(3):  # wherever the pieces end
        if kept:
            check_decoded(b" " * shift + raw, BOUND)
            continue
        with pytest.raises(BodyTooLarge, match="would take more than 40 MiB decoded"):
            check_decoded(b" " * shift + raw, BOUND)
