"""Sessions of calls that named none, kept for calls that continue them."""

from __future__ import annotations

from pathlib import Path

from gateway.core.types import SessionId
from gateway.ports import SessionIdentity
from tests.support.gateway_shell import Shell, read, shell
from tests.support.scripted_engine import ScriptedEngine

KEPT = SessionIdentity(None, "none", kept=True)


async def unnamed(found: Shell, turns: int = 1) -> SessionId:
    view = await found.sessions.open_session(KEPT)
    state = found.sessions.live.get(view.session_id)
    for _ in range(turns):
        await read(found.run(state))
    return view.session_id


async def test_they_outlive_their_call_and_a_restart_and_are_not_trained_on(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with shell(tmp_path, e0) as found:
            name = await unnamed(found, turns=2)
            turn_id = found.sessions.live.get(name).tree.newest
            assert turn_id is not None
            await found.sessions.live.saved()
        async with shell(tmp_path, e0) as found:
            state = found.sessions.live.get(name)
            view = found.sessions.session_of_turn(turn_id.turn_id)
            assert (state.spec.unnamed, state.spec.trains, state.turns) == (True, False, 2)
            assert view is not None
            assert (view.session_id, view.ephemeral) == (name, False)
            assert found.fleet.state.session_versions == {}


async def test_the_longest_idle_give_room(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, sessions_max=4) as found:
        names = [await unnamed(found) for _ in range(3)]
        named = found.session("named")
        await found.endings.make_room()
        assert [name for name in names if found.sessions.live.find(name) is not None] == names[1:]
        assert found.sessions.live.find(named.session_id) is named
