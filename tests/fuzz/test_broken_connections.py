"""Connections to a relay with credentials that break, or are held open, in each phase: by thousands and by hundreds.

`LAMINAR_FUZZ_EXAMPLES` bounds their number. Honest requesters fetch meanwhile, and get what was published.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from paramserver.data import frames
from paramserver.data.server import CONNECTIONS_PER_HOST_MAX, STALL_S
from protos.access.credentials import CREDENTIALS_VARIABLE
from tests.fuzz.cases import EXAMPLES
from tests.fuzz.watched import unharmed
from tests.support.intercepted import Intercepted, InterceptedFleet, contents, intercepted
from tests.support.wire_attacks import CHUNK_BYTES, REQUEST, WELCOME, cut

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL, SEED = "policy", 1
AT_ONCE = 8
SLOW = 300
PATIENCE_S = 60.0
OTHER_THREADS_MAX = 64
"""Of a relay besides those of its data port: the event loop's, gRPC's, its pools'."""


@dataclass(frozen=True, slots=True)
class Scene:
    fleet: InterceptedFleet
    a: Intercepted
    sent: dict[str, bytes]
    """What a requester sends up to the middle of each phase."""


@pytest.fixture(scope="module")
def scene(shared_etcd: str, fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with (
        pytest.MonkeyPatch.context() as patch,
        intercepted(shared_etcd, fleet, tmp_path_factory.mktemp("broken")) as found,
    ):
        patch.delenv(CREDENTIALS_VARIABLE, raising=False)
        a = found.start("a", "--chunk-bytes=256KiB")

        async def prepare() -> None:
            ticket = await found.publish(a, MODEL, SEED)
            await found.lands(a, MODEL, ticket.version, SEED)

        asyncio.run(prepare())
        with a.between.recording() as wires:
            assert found.fetch(a, MODEL) == contents(SEED)
            assert found.fetch(a, MODEL, tls=True) == contents(SEED)
        for wire in wires:
            assert wire.over.wait(PATIENCE_S)
        sealed, tls = (wire.sent("requests") for wire in wires)
        hello = 8 + int.from_bytes(sealed[4:8], "big")
        phases = {
            "nothing": b"",
            "a byte": sealed[:1],
            "half a hello": sealed[: hello // 2],
            "a hello": sealed[:hello],
            "half a greeting": sealed[: hello + 30],
            "a greeting with another's proof": sealed,
            "half of a TLS hello": tls[:100],
            "a TLS hello": tls[:225],
        }
        yield Scene(found, a, phases)


def connected(relay: Intercepted) -> socket.socket:
    """To the relay itself."""
    return frames.connect(relay.between.target, PATIENCE_S)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def served(scene: Scene) -> None:
    """Fails unless an honest requester gets what was published. It tries again, as a relay does: it may have made way
    for a stranger in the moment before its proof, and this machine may stand still for longer than it waits."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert scene.fleet.fetch(scene.a, MODEL) == contents(SEED)
        except frames.LinkBroken:
            assert time.monotonic() < deadline, "nobody is served"
        else:
            return


@contextlib.contextmanager
def serving(scene: Scene) -> Iterator[None]:
    """An honest requester is served again and again, and once more at the end."""
    over = threading.Event()

    def work() -> int:
        num = 0
        while not over.is_set():
            served(scene)
            num += 1
        return num

    with ThreadPoolExecutor(1) as thread:
        times = thread.submit(work)
        try:
            yield
        finally:
            over.set()
    print(f"served {times.result()} times meanwhile")
    served(scene)


def test_connections_that_break_in_each_phase_leave_nothing(scene: Scene) -> None:
    def breaks(number: int, data: bytes) -> None:
        sock = connected(scene.a)
        with sock, contextlib.suppress(OSError):
            sock.sendall(data)
            if number % 4 == 0:
                sock.settimeout(PATIENCE_S)
                sock.recv(1 << 10)  # a challenge, a refusal, or the end
            if number % 2:
                reset(sock)

    served(scene)
    with unharmed(scene.a.daemon), serving(scene), ThreadPoolExecutor(AT_ONCE) as threads:
        for data in scene.sent.values():
            whole = data not in (b"", data[:1]) and len(data) > 150
            step = 1 if whole else 2  # where nothing is answered, nothing is waited for
            list(threads.map(lambda n, data=data, step=step: breaks(n * step + step - 1, data), range(EXAMPLES * 10)))


def test_fetches_that_break_among_their_bytes_leave_nothing(scene: Scene) -> None:
    """By requesters that have proven the key: the connection is theirs, and its end as sudden."""
    with unharmed(scene.a.daemon):
        for number in range(EXAMPLES * 4):
            match = (WELCOME, REQUEST, CHUNK_BYTES)[number % 3]
            scene.a.between.attack(cut(match, reset=bool(number % 2)))
            with pytest.raises(frames.LinkBroken):
                scene.fleet.fetch(scene.a, MODEL)
    served(scene)


@pytest.mark.parametrize(
    "phase", ["nothing", "a byte", "half a hello", "a hello", "half a greeting", "half of a TLS hello"]
)
def test_connections_that_are_held_end_in_time_and_keep_nobody_out(scene: Scene, phase: str) -> None:
    data, process = scene.sent[phase], psutil.Process(scene.a.daemon.process.pid)
    with unharmed(scene.a.daemon), serving(scene), contextlib.ExitStack() as stack:
        began = time.monotonic()
        held = [stack.enter_context(connected(scene.a)) for _ in range(SLOW)]
        for sock in held:
            with contextlib.suppress(OSError):
                sock.sendall(data)
        assert process.num_threads() <= CONNECTIONS_PER_HOST_MAX + OTHER_THREADS_MAX
        for sock in held:
            ended(sock)
        assert time.monotonic() - began < frames.GREETING_S + PATIENCE_S, "of which the last is this machine's"


def test_a_byte_at_a_time_gains_no_time(scene: Scene) -> None:
    opening = scene.sent["a hello"]
    with unharmed(scene.a.daemon), connected(scene.a) as sock:
        began, sent = time.monotonic(), 0
        with contextlib.suppress(OSError):
            for byte in opening[:-1]:
                sock.sendall(bytes([byte]))
                sent += 1
                sock.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert time.monotonic() - began < frames.GREETING_S + STALL_S
        assert sent < len(opening) - 1


def ended(sock: socket.socket) -> None:
    """Reads until the relay has ended the connection."""
    sock.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 12):
            pass
