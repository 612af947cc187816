"""Nothing that comes from outside holds the event loop: large bodies, many small values, sessions of many branches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.app import Gateway
from gateway.core.sessions import SessionState
from gateway.core.tree import Turn
from gateway.core.types import TurnId
from protos.trajectories import Segment
from tests.support.loop_holds import HOLD_S_MAX, beating
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway

pytestmark = pytest.mark.slow
TRIES = 4
BRANCHES = 1000


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as found:
        yield found


async def shortest(ask: Callable[[int], Awaitable[None]]) -> float:
    """The longest hold while `ask` runs, in the best of some tries: a busy machine makes single ones longer."""
    found: list[float] = []
    for number in range(TRIES):
        async with beating() as holds:
            await ask(number)
        found.append(holds.longest_s)
        if found[-1] < HOLD_S_MAX:
            break
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
