"""What a program in the sandbox tries against its host, in each sandbox that works here: none of it gets through."""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents_env.sandbox.client import Sandbox
from agents_env.sandbox.limits import Kind, Limits, Result
from tests.unit.agents_env.sandboxes import KINDS, wait_until_gone, wait_until_there

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", KINDS)]

LIMITS = Limits(time_s=30, memory_bytes=256 << 20, processes_max=8, disk_bytes=8 << 20)
SECRET = "a-secret-of-the-host"


async def attack(kind: Kind, program: str, *words: str, limits: Limits = LIMITS) -> Result:
    return await Sandbox(kind, limits).run(["-I", "-S", "-c", program, *words])


@pytest.fixture
def host() -> Iterator[Path]:
    """A folder of the host that everybody may change, outside /tmp, with a file of the same kind in it."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o777)
    (folder / "file").write_text(SECRET)
    (folder / "file").chmod(0o666)
    yield folder
    shutil.rmtree(folder)


WRITE = """
import os, sys
folder, file = sys.argv[1], sys.argv[1] + "/file"
for name, act in {
    "open": lambda: open(file, "w"), "append": lambda: open(file, "a"), "create": lambda: open(folder + "/new", "w"),
    "truncate": lambda: os.truncate(file, 0), "unlink": lambda: os.unlink(file),
    "mkdir": lambda: os.mkdir(folder + "/d"), "rename": lambda: os.rename(file, folder + "/moved"),
    "chmod": lambda: os.chmod(file, 0), "link": lambda: os.link(file, folder + "/l"),
    "chown": lambda: os.chown(file, os.getuid(), os.getgid()), "utime": lambda: os.utime(file, (1, 1)),
    "setxattr": lambda: os.setxattr(file, "user.x", b"1"), "mknod": lambda: os.mknod(folder + "/n"),
}.items():
    try:
        act()
    except OSError:
        continue
    print("did", name)
print("end")
"""


async def test_write(kind: Kind, host: Path) -> None:
    before = (host / "file").stat()
    result = await attack(kind, WRITE, str(host))
    assert result.stdout == b"end\n", result
    assert (host / "file").stat() == before
    assert os.listdir(host) == ["file"]


READ = """
import sys
for path in sys.argv[1:]:
    try:
        print(open(path).read())
    except OSError:
        pass
print("end")
"""


async def test_read(kind: Kind, host: Path) -> None:
    paths = [str(host / "file"), "/etc/passwd", "/etc/shadow", "/root/.bashrc", "/dev/kmsg", "/dev/mem"]
    assert (await attack(kind, READ, *paths)).stdout == b"end\n"


ENVIRONMENT = """
import os, sys
print(dict(os.environ))
for pid in (1, 2, os.getpid(), os.getppid(), *map(int, sys.argv[1:])):
    for name in ("environ", "cmdline"):
        try:
            print(open(f"/proc/{pid}/{name}").read())
        except OSError:
            pass
print("end")
"""


async def test_environment(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINAR_TEST_KEY", SECRET)
    result = await attack(kind, ENVIRONMENT, str(os.getpid()), str(os.getppid()))
    assert result.stdout.endswith(b"end\n"), result
    assert SECRET.encode() not in result.stdout


NET = """
import socket, sys
port, path, abstract = int(sys.argv[1]), sys.argv[2], sys.argv[3]
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
    (socket.AF_UNIX, socket.SOCK_STREAM, path), (socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + abstract),
    (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)), (socket.AF_INET, socket.SOCK_RAW, ("127.0.0.1", 0)),
    (socket.AF_VSOCK, socket.SOCK_STREAM, (2, 22)),
):
    try:
        with socket.socket(family, kind) as out:
            out.settimeout(1)
            out.connect(address)
            out.send(b"x")
            print("reached", family, kind)
    except OSError:
        pass
print("end")
"""


async def test_net(kind: Kind, host: Path) -> None:
    abstract = f"laminar-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as unnamed:
            named.bind(str(host / "socket"))
            (host / "socket").chmod(0o777)
            unnamed.bind(f"\0{abstract}")
            for listener in (named, unnamed):
                listener.listen()
            result = await attack(kind, NET, str(port), str(host / "socket"), abstract)
            for listener in (tcp, udp, named, unnamed):
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.recv(1) if listener is udp else listener.accept()
    assert result.stdout == b"end\n", result


MEMORY = {
    "one block": "x = bytearray(1 << 30)",
    "many blocks": "x = []\nwhile len(x) < 1024: x.append(bytearray(1 << 20))",
    "memfd": "import os\nf = os.memfd_create('x')\nfor _ in range(1024): os.write(f, bytes(1 << 20))",
    "shared memory": "import mmap\nx = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1",
    "System V": "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) < 0: raise MemoryError",
    "tmp": "for i in range(1024): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))",
}


@pytest.mark.parametrize("way", MEMORY)
async def test_memory(kind: Kind, way: str) -> None:
    result = await attack(kind, MEMORY[way] + "\nprint('had it')")
    assert b"had it" not in result.stdout, result
    assert result.ending == "killed" or result.exit_code == 1, result


FORK = """
import os, sys, time
made = 0
while made < 1000:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    except OSError:
        break
    made += 1
print(made, flush=True)
"""


async def test_fork(kind: Kind) -> None:
    token = secrets.token_hex(8)
    result = await attack(kind, FORK, token)
    assert 1 <= int(result.stdout) <= LIMITS.processes_max, result
    wait_until_gone(token)


async def test_a_fork_bomb_ends_with_its_time(kind: Kind) -> None:
    token = secrets.token_hex(8)
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = await attack(kind, bomb, token, limits=replace(LIMITS, time_s=1))
    assert result.ending == "timeout", result
    wait_until_gone(token)


async def test_threads_are_bounded_or_die_with_the_run(kind: Kind) -> None:
    program = (
        "import threading, time\nn = 0\ntry:\n  while n < 5000:\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\n"
        "print('stopped' if n < 5000 else 'had them', flush=True)"
    )
    result = await attack(kind, program, limits=replace(LIMITS, time_s=10))
    assert b"had them" not in result.stdout, result


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(600)", "import os; os.read(0, 1); os.kill(os.getpid(), 19)"],
)
async def test_loop(kind: Kind, program: str) -> None:
    began = time.monotonic()
    result = await attack(kind, program, limits=replace(LIMITS, time_s=1))
    assert result.ending == "timeout"
    assert time.monotonic() - began < 60


SIGNAL = """
import os, resource, signal, sys
pids = [int(sys.argv[1]), int(sys.argv[2]), -1, os.getppid(), 1]
for pid in pids:
    for act in (
        lambda: pid == -1 or os.kill(pid, signal.SIGTERM), lambda: pid > 1 and os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda: pid > 1 and resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1)),
        lambda: pid > 1 and os.sched_setaffinity(pid, {0}),
        lambda: pid > 1 and os.killpg(pid, signal.SIGTERM),
    ):
        try:
            act()
        except OSError:
            pass
print("end", flush=True)
"""


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


async def test_signal(kind: Kind, victim: subprocess.Popen[bytes]) -> None:
    limits_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    result = await attack(kind, SIGNAL, str(victim.pid), str(os.getpid()))
    assert result.stdout == b"end\n", result
    assert victim.poll() is None
    assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert resource.prlimit(victim.pid, resource.RLIMIT_NOFILE) == limits_before
    assert os.sched_getaffinity(victim.pid) == os.sched_getaffinity(0)


DISK = """
import os, sys
written = files = 0
for number in range(100):
    try:
        with open(f"/tmp/big{number}", "wb", buffering=0) as out:
            while True:
                written += out.write(bytes(1 << 20))
    except OSError:
        pass
for number in range(20000):
    try:
        open(f"/tmp/small{number}", "w").close()
        files += 1
    except OSError:
        break
places = []
for folder, _, _ in os.walk("/"):
    try:
        open(folder + "/x", "w").close()
        places.append(folder)
    except OSError:
        pass
print(written, files, places)
"""


async def test_disk(kind: Kind) -> None:
    result = await attack(kind, DISK)
    written, files, places = result.stdout.decode().split(maxsplit=2)
    assert 0 < int(written) <= LIMITS.disk_bytes
    assert int(files) <= LIMITS.files_max
    assert places.strip() in ("[]", "['/tmp']"), result


async def test_no_disk_is_no_writable_folder(kind: Kind) -> None:
    result = await attack(kind, DISK, limits=replace(LIMITS, disk_bytes=0))
    assert result.stdout == b"0 0 []\n", result


SYMLINK = """
import os, sys
target = sys.argv[1]
def through(name, path, mode):
    try:
        with open(path, mode) as file:
            print(name, file.read() if mode == "r" else file.write("x"))
    except OSError:
        pass
for name, make in {"symlink": os.symlink, "link": os.link}.items():
    try:
        make(target, "/tmp/" + name)
    except OSError:
        continue
    for mode in "rwa":
        through(name, "/tmp/" + name, mode)
for name, path in {"root": "/proc/self/root" + target, "dots": "/tmp/../../.." + target, "cwd": "/proc/1/cwd" + target,
                   "init": "/proc/1/root" + target, "parent": f"/proc/{os.getppid()}/root" + target}.items():
    for mode in "ra":
        through(name, path, mode)
try:
    os.symlink(os.path.dirname(target), "/tmp/folder")
    for mode in "ra":
        through("folder", "/tmp/folder/" + os.path.basename(target), mode)
except OSError:
    pass
print("end")
"""


async def test_escape_by_symlink(kind: Kind, host: Path) -> None:
    result = await attack(kind, SYMLINK, str(host / "file"))
    assert result.stdout == b"end\n", result
    assert (host / "file").read_text() == SECRET


async def test_a_namespace_of_its_own(kind: Kind) -> None:
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "made = [flag for flag in (0x20000, 0x10000000, 0x40000000) if libc.unshare(flag) == 0]\n"
        "print(made, libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.syscall(56, 0x10000011, 0, 0, 0, 0))"
    )
    assert (await attack(kind, program)).stdout == b"[] -1 -1\n"


async def test_output_without_end_is_cut(kind: Kind) -> None:
    limits = replace(LIMITS, output_bytes_max=1000, time_s=2)
    result = await attack(
        kind, "import os\nwhile True: os.write(1, b'x' * 4096); os.write(2, b'y' * 4096)", limits=limits
    )
    assert (result.ending, result.stdout, result.stderr) == ("timeout", b"x" * 1000, b"y" * 1000)


CALLER = """
import asyncio, sys
from agents_env.sandbox.client import Sandbox
from agents_env.sandbox.limits import Limits
async def main():
    sandbox = Sandbox(sys.argv[1], Limits(time_s=300))
    print("now", flush=True)
    await sandbox.run(["-I", "-S", "-c", sys.argv[2], sys.argv[3]])
asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06, 0.1, None])
def test_nothing_outlives_a_caller_that_is_killed(kind: Kind, after_s: float | None) -> None:
    """Killed so long after it began, None: when the run's processes are all there."""
    token = secrets.token_hex(8)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, kind, FORK + "\ntime.sleep(600)", token],
        env=os.environ | {"LAMINAR_TEST_TOKEN": token},
        stdout=subprocess.PIPE,
    )
    with caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"now\n"
        if after_s is None:
            wait_until_there(token, LIMITS.processes_max)
        else:
            time.sleep(after_s)  # not for luck: each moment is one of the test's cases
        caller.kill()
    wait_until_gone(token)
