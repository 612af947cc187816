"""What a gateway finds after its death: sessions as they were, turns in flight that go on, answers to ask for again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.core.endings import Finish
from gateway.core.retries import Call
from gateway.core.types import EngineName, SamplingParams, SessionId, TopLogprob, TurnId, TurnOrigin, TurnRequest
from gateway.turns.running import RunningTurn
from tests.support.gateway_shell import BUDGET, PROMPT, Shell, check_at_rest, check_whole, read, shell
from tests.support.scripted_engine import ScriptedEngine, scripted, until

S = SessionId("s")


def begun(found: Shell, name: str, *, digest: str = "same", unnamed: bool = False, **sampling: Any) -> RunningTurn:
    origin = TurnOrigin(digest, unnamed)
    params = SamplingParams(max_tokens=BUDGET, **sampling)
    session = SessionId("call" if unnamed else S)
    return found.sessions.start(TurnRequest(TurnId(name), session, 0, PROMPT, params, origin=origin))


async def four_tokens_and_death(tmp_path: Path, e0: ScriptedEngine, *, unnamed: bool = False, **sampling: Any) -> None:
    """A life that ends in the midst of a turn."""
    async with shell(tmp_path, e0, disconnect_grace_s=60.0) as found:
        found.session("call" if unnamed else S, ephemeral=unnamed)
        run = begun(found, "t0", unnamed=unnamed, **sampling)
        async with run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            await found.pool.flush()
            await found.sessions.suspend()
    e0.hold_at = None


async def test_a_turn_in_flight_goes_on_and_its_client_gets_the_tokens_of_before(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0:
        await four_tokens_and_death(tmp_path, e0)
        async with shell(tmp_path, e0) as found:
            joined = await found.sessions.join(Call("same", S), 1)
            assert joined is not None
            check_whole(joined[0], await read(joined[0]))
            assert e0.requests[1].prompt == [*PROMPT, *scripted(PROMPT, 4)[0]], "no token is asked for twice"
            assert [(s.start, s.end, s.cause) for s in joined[0].segments] == [(0, 4, "start"), (4, BUDGET, "cut")]
            assert await found.outcome(joined[0]) == (
                *scripted(PROMPT, BUDGET),
                [("e0", 0, 4), ("e0", 4, BUDGET)],
            )
            assert found.sessions.counters.turns_recovered == 1
            check_at_rest(found)


async def test_a_call_without_a_session_goes_on_too(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0:
        await four_tokens_and_death(tmp_path, e0, unnamed=True)
        async with shell(tmp_path, e0) as found:
            joined = await found.sessions.join(Call("same", None), 1)
            assert joined is not None
            check_whole(joined[0], await read(joined[0]))
            check_at_rest(found)


async def test_a_turn_that_nobody_asks_for_is_given_up_after_its_grace(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0:
        await four_tokens_and_death(tmp_path, e0)
        e0.hold_at = 0
        async with shell(tmp_path, e0, recovery_grace_s=0.02) as found:
            await until(lambda: found.sessions.counters.turns_aborted, "the end of its grace")
            session = found.sessions.live.get(S)
            await until(lambda: not session.running, "the end of the turn")
            assert "4 tokens kept" in session.last_dropped


async def test_alternatives_of_tokens_survive(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4, top=[{"token_id:5": -1.0}, {"token_id:6": -2.0}]) as e0:
        await four_tokens_and_death(tmp_path, e0, top_logprobs=1)
        async with shell(tmp_path, e0) as found:
            [run] = await found.sessions.join(Call("same", S), 1) or []
            deltas = await read(run)
            tops = [top for delta in deltas for top in delta.top_logprobs or ()]
            assert tops == [(TopLogprob(5, -1.0),), (TopLogprob(6, -2.0),)] * (BUDGET // 2)


async def test_a_session_is_as_it_was(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with shell(tmp_path, e0) as found:
            session = found.session(S, group_size=4, tags={"environment": "sums"})
            for _ in range(2):
                run = found.run(session)
                await read(run)
                head, said_ = {"role": "laminar:head"}, [{"role": "assistant", "content": "é"}]
                await found.sessions.record_turn(run.request, head, said_)
            [key] = [k for k, s in found.sessions.live._keys.items() if s == S]
        async with shell(tmp_path, e0) as found:
            again = found.sessions.live.get(found.sessions.session_of_key(key) or SessionId(""))
            assert again.spec == session.spec
            assert (again.newest, again.turns) == (session.newest, 2)
            assert again.tree == session.tree
            assert (again.version, again.engine) == (session.version, EngineName("e0"))
            assert found.fleet.state.session_versions == {S: session.version}
            await found.endings.finish_rewarded(S, Finish(reward=1.0))
        async with shell(tmp_path, e0) as found:
            assert len(found.sessions.live) == 0
            assert await found.pool.sessions() == []


async def test_an_answer_that_was_whole_can_be_asked_for_again(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with shell(tmp_path, e0) as found:
            found.session(S)
            run = begun(found, "t0")
            async with run:
                await until(lambda: run.session.turns == 1, "the end")
                await run.finish_early(5)
        async with shell(tmp_path, e0) as found:
            [again] = await found.sessions.join(Call("same", S), 1) or []
            deltas = await read(again)
            assert [t for d in deltas for t in d.token_ids] == scripted(PROMPT, 5)[0]
            assert deltas[-1].finish_reason == "stop"
            assert len(e0.requests) == 1
            assert found.sessions.live.get(S).token_ids == [*PROMPT, *scripted(PROMPT, 5)[0]]


async def test_a_death_between_the_two_ends_of_a_session_does_not_give_it_out_twice(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with shell(tmp_path, e0) as found:
            session = found.session(S)
            await read(found.run(session))
            await found.endings._buffer.add(*session.trajectories(1.0, "completed", {}, 0.0))
        async with shell(tmp_path, e0) as found:
            assert found.sessions.live.find(S) is None
            assert await found.pool.sessions() == []


async def test_engines_stay_on_the_version_of_recovered_sessions(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4, version="5") as e0:
        await four_tokens_and_death(tmp_path, e0)
        async with ScriptedEngine("e1", version="6") as e1, shell(tmp_path, e1, e0) as found:
            [run] = await found.sessions.join(Call("same", S), 1) or []
            check_whole(run, await read(run))
            assert {s.version for s in run.segments} == {5}
            assert not e1.requests
