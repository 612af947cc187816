"""Turns through the shell go where their prompt's beginning was sent before, while that engine lives."""

from __future__ import annotations

from pathlib import Path

from gateway.core.types import EngineName, SamplingParams, TurnId, TurnRequest
from tests.support.gateway_shell import BUDGET, Shell, check_at_rest, read, shell
from tests.support.scripted_engine import ScriptedEngine, until


async def where(found: Shell, prompt: list[int], name: str, *, ephemeral: bool = False) -> str:
    """The engine that a new session's first turn runs on."""
    session = found.session(name, ephemeral=ephemeral)
    request = TurnRequest(TurnId(f"t-{name}"), session.session_id, 0, tuple(prompt), SamplingParams(max_tokens=BUDGET))
    run = found.sessions.start(request)
    await read(run)
    return run.segments[0].engine


async def test_siblings_and_calls_without_a_session_follow_their_prompt(tmp_path: Path) -> None:
    first, second = list(range(100, 740)), list(range(900, 1540))
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        assert await where(found, first, "a") == "e0"
        assert await where(found, second, "b") == "e1", "idle engines take turns"
        assert await where(found, [*first, 7], "c") == "e0"
        assert await where(found, [*second, *range(3, 20)], "d", ephemeral=True) == "e1"
        assert await where(found, second, "e") == "e1", "though e0 comes first by name"
        check_at_rest(found)


async def test_an_engine_that_was_restarted_holds_nothing(tmp_path: Path) -> None:
    prompt = list(range(100, 164))
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        state = found.fleet.state.engines[EngineName("e0")]
        state.suspected = True
        assert await where(found, prompt, "a") == "e1"
        found.fleet.suspect(EngineName("e0"))
        await until(lambda: not state.suspected, "e0's answer")
        assert await where(found, prompt, "b") == "e1"
        e1.started_unix_s += 1
        found.fleet.suspect(EngineName("e1"))
        await until(
            lambda: found.fleet.state.engines[EngineName("e1")].incarnation == repr(e1.started_unix_s), "its look"
        )
        await until(lambda: found.status(e1) == "serving", "its service")
        assert await where(found, prompt, "c") == "e0"
        check_at_rest(found)
