"""The sandbox as its callers see it: results, input, bounds that cannot be had, and a run that is given up."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents_env.sandbox import client, kinds
from agents_env.sandbox.client import Sandbox, SandboxFailed
from agents_env.sandbox.limits import Kind, Limits, SandboxRefused
from agents_env.sandbox.stage import UID_BASE
from tests.support.skips import needs
from tests.unit.agents_env.sandboxes import KINDS, wait_until_gone, wait_until_there

pytestmark = pytest.mark.slow
LIMITS = Limits(time_s=60)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_program_reads_its_input_and_its_end_is_reported(kind: Kind) -> None:
    sandbox = Sandbox(kind, LIMITS)
    program = "import sys; data = sys.stdin.read(); print(len(data)); print(sys.argv[1], file=sys.stderr); sys.exit(3)"
    result = await sandbox.run(["-I", "-c", program, "word"], b"x" * 300_000)
    assert (result.ending, result.exit_code, result.stdout, result.stderr) == ("exited", 3, b"300000\n", b"word\n")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_leaves_no_shared_memory_and_no_semaphores(kind: Kind) -> None:
    """sandlock keeps some for each user, and each run of root's has a user of its own."""
    sandbox = Sandbox(kind, LIMITS)
    await sandbox.run(["-I", "-c", "pass"])
    before = _of_system_v()
    await sandbox.run(["-I", "-c", "pass"])
    assert not _of_system_v() - before


def _of_system_v() -> set[tuple[str, str]]:
    """Kind and id of each object of the runs' users."""
    rows = [
        (kind, row.split()) for kind in ("shm", "sem") for row in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
    ]
    users = {"shm": 7, "sem": 4}
    return {(kind, row[1]) for kind, row in rows if row[users[kind]].isdigit() and int(row[users[kind]]) >= UID_BASE}


@pytest.mark.parametrize("kind", KINDS)
async def test_input_that_is_not_read_does_not_hold_the_run(kind: Kind) -> None:
    result = await Sandbox(kind, LIMITS).run(["-I", "-c", "print(1)"], b"x" * 1_000_000)
    assert (result.ending, result.stdout) == ("exited", b"1\n")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_signal_is_told_from_an_exit(kind: Kind) -> None:
    result = await Sandbox(kind, LIMITS).run(["-I", "-c", "import os; os.kill(os.getpid(), 9)"])
    assert (result.ending, result.exit_code) == ("killed", None)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_that_is_given_up_has_ended_when_the_cancellation_has(kind: Kind) -> None:
    token = secrets.token_hex(8)
    running = asyncio.create_task(Sandbox(kind, LIMITS).run(["-I", "-c", "import time; time.sleep(600)", token]))
    await asyncio.to_thread(wait_until_there, token, 1)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    wait_until_gone(token)


@pytest.mark.parametrize("kind", KINDS)
async def test_runs_at_once_are_bounded_and_do_not_see_each_other(kind: Kind) -> None:
    sandbox = Sandbox(kind, LIMITS, concurrency=2)
    program = "import os, sys; open('/tmp/x', 'a').write(sys.argv[1]); print(open('/tmp/x').read())"
    results = await asyncio.gather(*(sandbox.run(["-I", "-c", program, str(number)]) for number in range(5)))
    assert [result.stdout for result in results] == [f"{number}\n".encode() for number in range(5)]


def test_without_a_sandbox_the_refusal_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "landlock_abi", lambda: 2)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        SandboxRefused, match=r"sandlock needs .* this kernel's is 2; bubblewrap needs the command bwrap"
    ):
        Sandbox()


def test_an_older_kernel_has_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(client, "landlock_abi", lambda: 5)
    assert client.choose() == "bubblewrap"


def test_the_kernel_answers_which_landlock_it_has() -> None:
    assert 0 <= kinds.landlock_abi() < 100


RUN = """
import asyncio, sys
from agents_env.sandbox.client import Sandbox, SandboxFailed
from agents_env.sandbox.limits import Limits, SandboxRefused
PROGRAM = "import os; child = os.fork(); print(1, flush=True); child and os.waitpid(child, 0)"
try:
    sandbox = Sandbox(sys.argv[1], Limits(time_s=60, disk_bytes=int(sys.argv[2])))
    print(asyncio.run(sandbox.run(["-I", "-S", "-c", PROGRAM])).stdout)
except SandboxRefused as refused:
    print(refused.bound)
"""


def run_without(capability: str, kind: Kind, disk_bytes: int) -> str:
    """What a caller prints that has all of root's rights but one, as a plain container has not CAP_SYS_ADMIN."""
    if os.geteuid() != 0:
        pytest.skip(needs("root's rights can be taken from root alone", "run the same as root"))
    drop = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
    done = subprocess.run([*drop, sys.executable, "-c", RUN, kind, str(disk_bytes)], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("capability", "disk_bytes", "bound"), [("sys_admin", 1 << 20, "disk"), ("setuid", 0, "processes")]
)
def test_a_bound_that_cannot_be_had_is_refused_by_name(
    kind: Kind, capability: str, disk_bytes: int, bound: str
) -> None:
    assert run_without(capability, kind, disk_bytes) == bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_container_runs_without_a_writable_folder(kind: Kind) -> None:
    assert run_without("sys_admin", kind, 0) == repr(b"1\n1\n")


@pytest.fixture
def public_package() -> Iterator[Path]:
    """The sandbox's modules where every user may read them."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    shutil.copytree(Path(client.__file__).parents[1], folder / "agents_env")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.id == "bubblewrap"])
def test_a_user_other_than_root_has_the_same_sandbox(kind: Kind, public_package: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip(needs("another user is for root alone", "nothing: the other tests ran as a user"))
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        [*become, client.interpreter(), "-c", RUN, kind, str(1 << 20)],
        env={"PYTHONPATH": str(public_package), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == repr(b"1\n1\n"), done.stderr


@pytest.mark.parametrize("kind", KINDS)
async def test_check_passes_where_the_sandbox_works_and_names_what_the_sandbox_said_where_not(kind: Kind) -> None:
    sandbox = Sandbox(kind, replace(LIMITS, processes_max=1))
    await sandbox.check()
    sandbox.python = "/usr/bin/false"
    with pytest.raises(SandboxFailed, match="does not run /usr/bin/false"):
        await sandbox.check()
