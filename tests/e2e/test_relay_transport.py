"""Relay processes with `--transport nixl`: the same bytes everywhere, one killed in the middle, and among others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.survivors import MODEL, SLOW, client, identical, in_the_middle, publish_seed, status_of

pytest_plugins = ["tests.support.nixl"]
pytestmark = pytest.mark.slow


async def start(relays: Relays, name: str, *flags: str) -> Daemon:
    return await asyncio.to_thread(relays.start, name, *flags)


async def came_over(daemon: Daemon) -> dict[str, str]:
    """What moved the newest version to each relay that got it by a hop."""
    status = await status_of(daemon)
    hops = [hop for model in status.models if model.model == MODEL for hop in model.hops] if status else []
    return {hop.relay: hop.transport for hop in hops if hop.transport}


async def test_three_relays_over_nixl_with_the_middle_one_killed_end_with_the_same_bytes(
    nixl: None, relays: Relays
) -> None:
    flags = ("--transport", "nixl", "--max-rate")
    rates = {"a": "32MiB", "b": SLOW, "c": "32MiB"}
    a, b, c = [await start(relays, name, *flags, rate) for name, rate in rates.items()]
    async with client(a) as head:
        first = await publish_seed(head, 1)
        await identical([a, b, c], first.version, 1)
        await until(lambda: came(a, {"b": "nixl", "c": "nixl"}), "both came over nixl")
        assert {status.transport for daemon in (a, b, c) if (status := await status_of(daemon))} == {"nixl"}
        second = await publish_seed(head, 2, scale=2)
        await until(lambda: in_the_middle(c, second.version), "the tail has a part")
        status = await status_of(c)
        assert status is not None
        assert [(t.upstream, t.transport) for t in status.transfers] == [("b", "nixl")]
        b.kill()
        await identical([a, c], second.version, 2, scale=2)
        await until(lambda: came(a, {"c": "nixl"}), "from the head, over nixl too")
        third = await publish_seed(head, 3)
        await identical([a, c], third.version, 3)


async def came(daemon: Daemon, expected: dict[str, str]) -> bool:
    return await came_over(daemon) == expected


async def test_relays_over_nixl_and_over_tcp_are_one_chain(nixl: None, relays: Relays) -> None:
    a = await start(relays, "a", "--transport", "nixl")
    b = await start(relays, "b")
    c, d = [await start(relays, name, "--transport", "nixl") for name in "cd"]
    async with client(a) as head:
        ticket = await publish_seed(head, 1)
        await identical([a, b, c, d], ticket.version, 1)
        await until(lambda: came(a, {"b": "tcp", "c": "tcp", "d": "nixl"}), "nixl between those that speak it")
    assert "b does not speak nixl: its bytes come over tcp" in c.log()


def test_a_relay_without_the_library_says_in_one_line_how_to_get_it(relays: Relays) -> None:
    command = [sys.executable, "-m", "paramserver", "serve", "--name", "x", "--transport", "nixl"]
    where = ["--etcd", relays.etcd, "--pool-dir", str(relays.pools / "x"), "--pool-bytes", "1MiB"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 1
    assert "needs the package nixl, which is not installed" in done.stderr.splitlines()[-1]
    assert "[nixl]'" in done.stderr.splitlines()[-1]
