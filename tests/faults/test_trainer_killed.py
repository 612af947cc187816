"""A trainer killed with -9 goes on from its checkpoint: what the checkpoint has used is not sampled again, and what it
has not used is, at once."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from gateway.store import Database
from tests.support.experience import experience_app
from tests.support.trajectories import make_trajectory
from tests.support.turns import serving_app

pytestmark = pytest.mark.slow
SESSIONS = 12


async def trainer(url: str, checkpoint: Path, *options: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.killed_trainer", url, checkpoint, *options, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def killed_and_resumed(folder: Path, die: str, *options: str) -> tuple[Counter[str], int, str]:
    """How often the last checkpoint has trained on each session, how many wait still, and what was printed."""
    checkpoint = folder / "checkpoint.json"
    async with Database(folder / "db") as database, experience_app(database) as (app, stores, _):
        for number in range(SESSIONS):
            await stores.buffer.add(make_trajectory("g", number, [1, 2], ([3], []), version=1))
        async with serving_app(app) as url:
            assert (await trainer(url, checkpoint, *options, "--die", die))[0] == -signal.SIGKILL
            status, printed = await trainer(url, checkpoint, *options)
        assert status == 0
        found = stores.buffer.statistics()
        assert (found.lapsed_leases, found.leased) == (0, 0), "nothing waited for a lease's end"
        return Counter(json.loads(checkpoint.read_text())["trained"]), found.trajectories, printed


ALL = {f"g-{number}" for number in range(SESSIONS)}


@pytest.mark.parametrize(
    ("die", "options", "uses", "given_back"),
    [
        ("sampled:3", (), 1, 2),
        ("saved:3", (), 1, 0),
        ("saved:4", ("--every", "2"), 1, 0),
        ("sampled:5", ("--every", "3", "--uses", "2"), 2, 4),
    ],
)
async def test_every_session_is_trained_on_as_often_as_allowed(
    tmp_path: Path, die: str, options: tuple[str, ...], uses: int, given_back: int
) -> None:
    trained, waiting, printed = await killed_and_resumed(tmp_path, die, *options)
    assert trained == Counter(dict.fromkeys(ALL, uses))
    assert (waiting, printed) == (0, f"given back: {given_back}\n")


async def test_what_was_acknowledged_after_the_checkpoint_is_gone(tmp_path: Path) -> None:
    """The checkpoint is of step 2; the batch of step 3 was acknowledged, and is lost to training."""
    trained, waiting, printed = await killed_and_resumed(tmp_path, "acked:3", "--every", "2", "--early")
    assert trained == Counter(ALL - {"g-4", "g-5"})
    assert (waiting, printed) == (0, "given back: 0\n")
