"""The supervisor over real, tiny processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.demo.processes import Command, DemoError, Exit, Supervisor

READY = """
import json, os, pathlib, signal, sys, time
path = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
def announce(**fields):
    scratch = path.with_suffix(".scratch")
    scratch.write_text(json.dumps(fields))
    os.replace(scratch, path)
"""
SERVES = READY + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); announce(url='here'); signal.pause()"
STUBBORN = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN); announce(); time.sleep(60)"
ENDS = READY + "announce(); sys.exit(int(sys.argv[1]))"


def command(name: str, script: str, *arguments: str, **options: object) -> Command:
    return Command(name, ("-c", script, *arguments), **options)  # type: ignore[arg-type]


async def test_a_daemon_announces_itself_and_ends_when_asked(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        child = await processes.start(command("daemon", SERVES))
        assert child.ready == {"url": "here"}
        exit = await processes.stop("daemon", 10.0)
    assert exit is not None
    assert (exit.status, exit.ending, exit.clean) == (0, "on request", True)


async def test_start_all_runs_side_by_side(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        ready = await processes.start_all(command(name, SERVES) for name in ("a", "b"))
        await processes.stop_all(["a", "b", "never started"], 10.0)
        assert ready == {"a": {"url": "here"}, "b": {"url": "here"}}
        assert sorted(exit.name for exit in processes.exits) == ["a", "b"]


async def test_a_killed_one_is_no_failure_and_starts_again(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        first = await processes.start(command("engine", SERVES))
        killed = await processes.kill("engine")
        second = await processes.start(command("engine", SERVES))
        assert second.process.pid != first.process.pid
        assert (killed.status, killed.ending, killed.clean) == (-signal.SIGKILL, "killed on purpose", True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(processes.failure(), 0.05)
        await processes.stop("engine", 10.0)
    assert [exit.clean for exit in processes.exits] == [True, True]


async def test_one_that_ignores_sigterm_is_killed_and_not_clean(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        await processes.start(command("stubborn", STUBBORN))
        exit = await processes.stop("stubborn", 0.2)
    assert exit is not None
    assert (exit.ending, exit.clean) == ("killed: ignored SIGTERM", False)


@pytest.mark.parametrize(
    ("ends_by_itself", "status", "fails"),
    [(False, 0, True), (False, 3, True), (True, 0, False), (True, 3, True)],
)
async def test_what_counts_as_a_failure(tmp_path: Path, ends_by_itself: bool, status: int, fails: bool) -> None:
    async with Supervisor(tmp_path) as processes:
        await processes.start(command("one", ENDS, str(status), ends_by_itself=ends_by_itself))
        exit = await processes.wait("one")
        assert exit.status == status
        if fails:
            assert await processes.failure() == exit
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(processes.failure(), 0.05)


async def test_death_before_ready_shows_the_last_words(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        with pytest.raises(DemoError, match=r"(?s)broken ended with 1 before it was ready.*no such luck"):
            await processes.start(command("broken", "raise SystemExit('no such luck')"))


async def test_never_ready_is_told_after_the_deadline(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        with pytest.raises(DemoError, match="slow was not ready after 0 s"):
            await processes.start(command("slow", "import time; time.sleep(60)", ready_timeout_s=0.1))


async def test_a_process_without_ready_file_gets_no_such_option(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        script = "import sys; sys.exit(len(sys.argv) - 1)"
        await processes.start(command("plain", script, ready_timeout_s=None, ends_by_itself=True))
        assert (await processes.wait("plain")).status == 0


async def test_niceness_holds_for_every_thread_once_ready(tmp_path: Path) -> None:
    script = "import threading; threading.Thread(target=signal.pause, daemon=True).start(); "
    async with Supervisor(tmp_path) as processes:
        child = await processes.start(command("nice", READY + script + "announce(); time.sleep(60)", niceness=7))
        tasks = [int(task) for task in os.listdir(f"/proc/{child.process.pid}/task")]
        assert len(tasks) == 2
        assert {os.getpriority(os.PRIO_PROCESS, task) for task in tasks} == {7}


async def test_nothing_outlives_the_supervisor(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as processes:
        child = await processes.start(command("daemon", STUBBORN))
    assert child.process.returncode == -signal.SIGKILL


def test_a_killed_supervisor_takes_its_children_along(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, signal, pathlib
from deploy.demo.processes import Exit, Command, Supervisor
async def main():
    async with Supervisor(pathlib.Path({str(tmp_path)!r})) as processes:
        child = await processes.start(Command("daemon", ("-c", {STUBBORN!r})))
        print(child.process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether it is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_was_killed_from_outside_says_where_to_look() -> None:
    assert str(Exit("trainer", 7, -9, "by itself", 1.0)).endswith(
        "the kernel does that when memory runs out (see dmesg)"
    )
    assert (
        str(Exit("engine-1", 8, -9, "killed on purpose", 1.0))
        == "engine-1 (pid 8) ended with status -9 (killed on purpose)"
    )
