"""A gateway killed at each step between its own database and the shared Redis: nothing is lost, nothing there twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gateway.experience import ExperienceBuffer
from gateway.experience.shared import shared_store
from gateway.store import Database
from tests.support.redis_servers import connect
from tests.unit.gateway_store.test_experience import sample

POINTS = {
    "before its commit": ("Outbox", "put", "before"),
    "between commit and sending": ("Outbox", "put", "after"),
    "as its reply is lost": ("RedisLog", "exchange", "after"),
    "between landing and the outbox": ("Outbox", "delete", "before"),
    "between the outbox and its confirmation": ("Outbox", "delete", "after"),
    "before it is sent": ("RedisLog", "exchange", "before"),
}
NTH = 6
"""The call at which it dies: some finishes are through, and one is on its way. Looks at the log do not count."""

CHILD = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from pathlib import Path
    from gateway.experience import ExperienceBuffer, outbox
    from gateway.experience.shared import shared_store
    from gateway.log import redis
    from gateway.log.redis import RedisStore
    from gateway.core.addresses import RedisAddress
    from gateway.log.redis_server import RedisServer
    from gateway.store import Database
    from tests.unit.gateway_store.test_experience import trajectory

    path, url, namespace, owner, method, when = sys.argv[1:7]
    first, nth = int(sys.argv[7]), int(sys.argv[8])
    kind = {"Outbox": outbox.Outbox, "RedisLog": redis.RedisLog}[owner]
    real, calls = getattr(kind, method), [0]

    async def dies(*arguments, **named):
        calls[0] += method != "exchange" or bool(arguments[2].needs)
        last = calls[0] == nth
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await real(*arguments, **named)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, method, dies)

    async def main():
        async with Database(Path(path)) as database:
            await database.run(lambda c: c.execute("CREATE TABLE IF NOT EXISTS ends(name TEXT PRIMARY KEY)") and None)
            server = await RedisStore.connect(RedisAddress.parse(url), namespace=namespace)
            buffer = ExperienceBuffer(database, store=shared_store(database, server))
            await buffer.open()
            for number in range(first, first + 1000):
                name = f"s{number}"
                end = lambda c, name=name: c.execute("INSERT INTO ends VALUES (?)", (name,))
                await buffer.add(trajectory(name), along=end)
                print(name, flush=True)

    asyncio.run(main())
    """
)


def run_until_killed(path: Path, url: str, namespace: str, point: tuple[str, str, str], first: int) -> list[str]:
    """The sessions whose finish was answered."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), url, namespace, *point, str(first), str(NTH)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_no_finish_is_lost_or_doubled_wherever_the_gateway_dies(
    point: tuple[str, str, str], tmp_path: Path, shared_redis: str, namespace: str
) -> None:
    """A trainer uses up what landed before the gateway is there again: so the Redis has to know what landed, even where
    it is there no more."""
    path = tmp_path / "killed"
    answered = run_until_killed(path, shared_redis, namespace, point, 0)
    used = asyncio.run(used_up(tmp_path / "other", shared_redis, namespace))
    ended, later = asyncio.run(next_life(path, shared_redis, namespace))
    print(json.dumps({"answered": len(answered), "used before the restart": len(used), "after": len(later)}))
    assert set(answered) <= {*used, *later}, "lost"
    assert sorted([*used, *later]) == sorted(ended), "each session that ended, once"


async def used_up(path: Path, url: str, namespace: str) -> list[str]:
    """What another gateway's trainer gets, and acknowledges."""
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(Database(path))
        store = shared_store(database, await connect(stack, url, namespace))
        buffer = ExperienceBuffer(database, store=store)
        await buffer.open()
        lease, found = await sample(buffer, "t", trajectories=1000, trainer_version=1)
        if lease:
            await buffer.ack(lease)
        await buffer.close()
        return [t.session_id for t in found]


async def next_life(path: Path, url: str, namespace: str) -> tuple[list[str], list[str]]:
    """The sessions that had ended at the killed gateway, and what is there once it has sent what it had to."""
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(Database(path))
        rows = await database.run(lambda c: c.execute("SELECT name FROM ends").fetchall())
        store = shared_store(database, await connect(stack, url, namespace))
        buffer = ExperienceBuffer(database, store=store)
        await buffer.open()
        for (name,) in rows:
            await buffer.delivered(name)
        _, found = await sample(buffer, "t", trajectories=1000, trainer_version=1)
        await buffer.close()
        return [name for (name,) in rows], [t.session_id for t in found]
