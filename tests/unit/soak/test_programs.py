"""The programs of a soak go on from their journals, and its supervisor starts again what ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protos.trajectories import Trajectory
from tests.soak.journal import Follower, Journal
from tests.soak.processes import Program, Supervised
from tests.soak.runner import answer_of, recovered
from tests.soak.trainer import Checkpoint, runs_of


def test_a_runner_goes_on_with_the_sessions_that_are_open(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for name in ("a", "b", "c"):
            journal.add(did="begin", session=name)
        journal.add(did="open", session="b", calls_key="k", finish_key="f")
        journal.add(did="turn", session="b", turn=0, ids=[1, 2], spans=[])
        journal.add(did="finish", session="a")
        journal.add(did="500", session="b")
    with path.open("ab") as file:
        file.write(b'{"did":"finish","session":"c"')  # cut short, as by a full disk
    found, begun = recovered(path)
    assert begun == 3
    assert {name: (s.calls_key, s.finish_key, s.answers) for name, s in found.items()} == {
        "b": ("k", "f", [[1, 2]]),
        "c": ("", "", []),
    }


def test_a_trainer_goes_on_at_the_step_that_is_not_published(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert Checkpoint.of(path) == Checkpoint()
    with Journal(path) as journal:
        journal.add(did="life", publisher={"run": "a"})
        journal.add(did="published", step=4, version=9, publisher={"run": "a", "version": 9})
        journal.add(did="used", lease="l", used=[], reader={"used": ["l"]})
        journal.add(did="life", publisher={"run": "b", "version": 9})
    assert Checkpoint.of(path) == Checkpoint(5, {"run": "b", "version": 9}, {"used": ["l"]})


def test_a_follower_returns_each_entry_once_and_no_half(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "journal")
    assert list(follower.entries()) == []
    with (tmp_path / "journal").open("ab", buffering=0) as file:
        file.write(b'{"n":1}\n{"n"')
        assert list(follower.entries()) == [{"n": 1}]
        file.write(b":2}\n")
        assert list(follower.entries()) == [{"n": 2}]


def test_runs_are_where_the_mask_is_one() -> None:
    common = {"session_id": "s", "group_id": "g", "sample_index": 0, "reward": 1.0, "status": "completed"}
    more = {"mixed": True, "split": "train", "turns": 1, "segments": [], "started_unix_s": 0, "finished_unix_s": 0}
    mask, versions = [0, 1, 1, 1, 0, 1], [-1, 3, 3, 4, -1, 4]
    lists = {"token_ids": [9] * 6, "logprobs": [0.0] * 6, "loss_mask": mask, "versions": versions}
    assert runs_of(Trajectory(**common, **more, **lists)) == [(1, 3, 3), (3, 4, 4), (5, 6, 4)]


def test_answers_whole_and_streamed_are_read_alike() -> None:
    span = '[{"version":"3","start":0,"end":2,"engine":"e"}]'
    whole = '{"choices":[{"token_ids":[5,6],"weight_versions":' + span + "}]}"
    first, second = '{"choices":[{"token_ids":[5]}]}', '{"choices":[{"token_ids":[6],"weight_versions":' + span + "}]}"
    streamed = f": alive\n\ndata: {first}\n\ndata: {second}\n\ndata: [DONE]\n\n"
    assert answer_of(whole, stream=False) == answer_of(streamed, stream=True)
    assert answer_of(whole, stream=False).spans == [(0, 2, 3)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_what_was_killed_is_started_again_and_what_ended_by_itself_is_a_finding(tmp_path: Path) -> None:
    found: list[tuple[str, str]] = []
    program = Program("sleeper", "runner", (sys.executable, "-c", "import time; time.sleep(600)"), ready=False)
    process = Supervised(program, tmp_path, lambda who, what: found.append((who, what)))
    process.start()
    await process.ready()
    first = process.pid
    process.kill(0.0)
    await until(lambda: process.ends["killed"] == 1 and process.pid not in (None, first))
    await process.close()
    assert found == []
    assert process.pid is None
    failing = Program("failing", "runner", (sys.executable, "-c", "raise SystemExit('no more')"), ready=False)
    process = Supervised(failing, tmp_path, lambda who, what: found.append((who, what)))
    process.start()
    await until(lambda: process.ends["by itself"] > 0)
    await process.close()
    assert found[0] == ("failing", "ended with 1: no more")


async def test_a_program_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    program = Program("done", "runner", (sys.executable, "-c", ""), ready=False, ends=True)
    process = Supervised(program, tmp_path, lambda who, what: None)
    process.start()
    await until(lambda: process.done)
    await process.close()
    assert not process.ends
