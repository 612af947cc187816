"""Every way of moving bytes behind the transport seam: tcp sockets, NIXL (over TCP here), a spilled version's files.

What a fetch may rely on, whoever moves the bytes. NIXL's cases are left out, by name, where the library cannot be had.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from paramserver.core.notices import Notices
from paramserver.core.records import Epoch, Sealed, digest
from paramserver.core.transfer import Want
from paramserver.data import frames
from paramserver.data.fetch import Fetch, Tiers
from paramserver.data.frames import Greeting, LinkBroken
from paramserver.data.nixl import dialer as nixl_module
from paramserver.data.nixl import processes as processes_module
from paramserver.data.nixl.dialer import NixlDialer
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.secured import DataAccess
from paramserver.data.spill import Spill
from paramserver.data.tcp import TcpLink
from paramserver.data.transport import Begun, Dial, Link, Source, ignore_link
from protos.access.credentials import Credentials
from protos.errors import NotFound, StaleEpoch, Unavailable
from tests.support.fleet import until
from tests.support.hops import CHUNK, CONTENT, FETCH, Host, random_content

pytest_plugins = ["tests.support.nixl"]
NIXL = pytest.param("nixl", marks=pytest.mark.slow)  # each of its links takes two processes
SECURED = ["sealed", "tls"]
"""tcp with a fleet's credentials, in both ways of protecting it."""
KINDS = ["tcp", NIXL, "file", *SECURED]
LIVELY_S = 3.0
"""Silence that counts as death where a holder lives: its signs of life come in time beside any other work."""
BIG = {"seed": 1, "size": 8 << 20, "chunk_bytes": 256 << 10, "max_rate": 8e6}
RIGHT = random_content(1, 8 << 20)


@dataclass
class Scene:
    """Holders of one kind and a way to ask them; `good` holders speak tcp."""

    kind: str
    directory: Path
    nixl: NixlProcesses | None = None
    credentials: Path | None = None
    hosts: list[Host] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    spills: dict[str, Spill] = field(default_factory=dict)

    own: NixlProcesses | None = None
    silence_s: float = 5.0  # more than the default where it does not matter: this machine may have much else to do

    def __post_init__(self) -> None:
        self.dialer = NixlDialer(self.nixl, self.tcp) if self.nixl is not None else None
        given = self.credentials
        self.access = DataAccess(Credentials(given), tls=self.kind == "tls") if given is not None else None

    @property
    def transport(self) -> str:
        """What its links call themselves."""
        return "tcp" if self.kind in SECURED else self.kind

    def tcp(self, source: Source, greeting: Greeting, begun: Begun = ignore_link) -> TcpLink:
        return TcpLink(source, greeting, silence_s=self.silence_s, access=self.access, begun=begun)

    def own_processes(self) -> NixlProcesses:
        """Fresh ones, for the hosts and links made from now on."""
        self.own = self.nixl = NixlProcesses(idle_max=4)
        self.dialer = NixlDialer(self.own, self.tcp)
        return self.own

    def host(self, *sizes: int, plain: bool = False, **options: object) -> Host:
        """`plain`: speaks tcp only."""
        nixl = None if plain else self.nixl
        self.hosts.append(
            Host(self.directory / f"host{len(self.hosts)}", *sizes, nixl=nixl, access=self.access, **options)
        )  # type: ignore[arg-type]
        return self.hosts[-1]

    def full(self) -> Source:
        """A holder of everything, of this kind."""
        host = self.host()
        host.fill()
        if self.kind != "file":
            return host.source
        return self.spilled(host)

    def spilled(self, host: Host) -> Source:
        disk = self.directory / f"disk{len(self.spills)}"
        spill = Spill(disk, retain=1, notices=Notices())
        self.spills[str(disk)] = spill
        spill.want(host.snapshot, Sealed.of(host.snapshot.manifest, host.snapshot.root(), 1.0, {}))
        found = until(lambda: spill.source(host.snapshot.manifest), "the version is on disk")
        return Source(f"spill-{len(self.spills)}", found.address)

    def process(self, **options: object) -> tuple[subprocess.Popen[str], Source]:
        """A holder of `BIG` in a process of its own, slow enough to be met in the middle."""
        name = f"process{len(self.processes)}"
        credentials = str(self.credentials) if self.credentials is not None else ""
        wanted = {**BIG, "nixl": self.kind == "nixl", "credentials": credentials, "tls": self.kind == "tls", **options}
        command = [sys.executable, "-m", "tests.support.hops", str(self.directory / name), json.dumps(wanted)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.processes.append(process)
        assert process.stdout is not None
        return process, Source(name, next(line for line in process.stdout if ":" in line).strip())

    def dial(self, into: Host) -> Dial:
        def dial(source: Source, greeting: Greeting, begun: Begun = ignore_link) -> Link:
            if source.address.startswith("file:"):
                return self.spills[source.address.removeprefix("file:")].open(greeting)
            if self.dialer is None:
                return self.tcp(source, greeting, begun)
            return self.dialer.dial(source, greeting, into.descriptors(), begun)

        return dial

    def fetch(self, into: Host, tiers: Tiers, *, num_stripes: int = 2) -> Fetch:
        return Fetch(into.snapshot, FETCH, lambda: tiers, self.dial(into), num_stripes=num_stripes, patience_s=20.0)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for host in self.hosts:
            host.close()
        for spill in self.spills.values():
            spill.close()
        if self.own is not None:
            self.own.close()


@pytest.fixture(scope="module")
def nixl_processes(nixl: None) -> Iterator[NixlProcesses]:
    """Shared, since each takes most of a second to start."""
    found = NixlProcesses(idle_max=8)
    yield found
    found.close()


@pytest.fixture
def scene(kind: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    directory = Path(tempfile.mkdtemp(prefix="laminar-transport-", dir="/dev/shm"))
    nixl = request.getfixturevalue("nixl_processes") if kind == "nixl" else None
    credentials = request.getfixturevalue("fleet") / "relay" if kind in SECURED else None
    found = Scene(kind, directory, nixl, credentials)
    yield found
    found.close()
    shutil.rmtree(directory)


every = pytest.mark.parametrize("kind", KINDS)
hops = pytest.mark.parametrize("kind", ["tcp", NIXL, *SECURED])
with_processes = pytest.mark.parametrize(
    "kind", ["tcp", NIXL, *(pytest.param(k, marks=pytest.mark.slow) for k in SECURED)]
)
only_nixl = pytest.mark.parametrize("kind", [NIXL])


@every
@pytest.mark.parametrize("num_stripes", [1, 4])
def test_a_version_comes_whole_and_right(scene: Scene, kind: str, num_stripes: int) -> None:
    source, into = scene.full(), scene.host()
    running = scene.fetch(into, [[source]], num_stripes=num_stripes)
    assert running.run()
    assert into.content() == CONTENT
    assert into.snapshot.root() == scene.hosts[0].snapshot.root()
    assert (running.transport, running.num_bypasses, running.num_stripes) == (scene.transport, 0, num_stripes)


@every
def test_the_rest_of_a_chunk_is_asked_for_and_nothing_before_it_is_touched(scene: Scene, kind: str) -> None:
    source, into = scene.full(), scene.host()
    link = scene.dial(into)(source, FETCH)
    told: list[tuple[int, int]] = []
    with contextlib.closing(link):
        for index, from_byte in ((2, 1000), (1, 0)):
            link.request(Want(index, from_byte))
        arrived = [link.receive(into.snapshot.place, lambda index, upto: told.append((index, upto))) for _ in range(2)]
    assert [(a.index, a.num_bytes) for a in arrived] == [(2, CHUNK - 1000), (1, CHUNK)]
    assert arrived[0].digest == digest(CONTENT[2 * CHUNK : 3 * CHUNK]), "of the whole chunk"
    assert into.snapshot.place(2) == bytes(1000) + CONTENT[2 * CHUNK + 1000 : 3 * CHUNK]
    assert into.snapshot.place(1) == CONTENT[CHUNK : 2 * CHUNK]
    assert {(2, CHUNK), (1, CHUNK)} <= set(told)


@hops
@pytest.mark.slow
def test_chunks_that_come_later_are_waited_for_without_a_bypass(scene: Scene, kind: str) -> None:
    scene.silence_s = LIVELY_S
    upstream, into = scene.host(), scene.host()
    upstream.fill(2)
    running = scene.fetch(into, [[upstream.source]])
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(running.run)
        assert into.snapshot.wait_chunk(1, 60.0) is not None
        assert into.snapshot.wait_chunk(2, 1.3 * LIVELY_S) is None, "longer than the silence that counts as death"
        upstream.fill()
        assert done.result(60.0)
    assert into.content() == CONTENT
    assert (running.transport, running.num_bypasses) == (scene.transport, 0)


@hops
@pytest.mark.slow
def test_a_chunk_that_takes_longer_than_the_silence_that_counts_as_death_is_no_death(scene: Scene, kind: str) -> None:
    """The holder's `--max-rate` holds it back: tcp sends it in pieces, nixl gives signs of life until it may go."""
    content = RIGHT[: 4 << 20]
    slow = scene.host(content=content, chunk_bytes=len(content), max_rate=1e6)
    slow.fill()
    scene.silence_s = LIVELY_S
    into = scene.host(content=content, chunk_bytes=len(content))
    running = scene.fetch(into, [[slow.source]])
    assert running.run()
    assert into.content() == content
    assert (running.transport, running.num_bypasses) == (scene.transport, 0)


@every
def test_a_flipped_byte_is_found_and_the_holder_withdraws(scene: Scene, kind: str) -> None:
    bad, good, into = scene.host(), scene.host(plain=True), scene.host()
    bad.fill()
    good.fill()
    source = scene.spilled(bad) if kind == "file" else bad.source
    if kind == "file":
        path = next(Path(source.address.removeprefix("file:")).rglob("f0"))
        with path.open("r+b") as file:
            file.write(b"\xff")
    else:
        bad.snapshot.place(0)[0] ^= 0xFF
    running = scene.fetch(into, [[source], [good.source]], num_stripes=1)
    assert running.run()
    assert into.content() == CONTENT
    assert running.num_bypasses == 1
    if kind != "file":
        assert bad.withdrawn == ["chunk 0 of version 1 of policy changed in memory since it was verified"]


@every
def test_a_version_that_is_not_known_is_refused(scene: Scene, kind: str) -> None:
    source, into = scene.full(), scene.host()
    with pytest.raises(NotFound):
        scene.dial(into)(source, Greeting("fetch", "other", 1, "test"))


@hops
def test_another_epoch_is_refused(scene: Scene, kind: str) -> None:
    source, into = scene.full(), scene.host()
    with pytest.raises(StaleEpoch, match="was begun in epoch"):
        scene.dial(into)(source, Greeting("fetch", "policy", 1, "test", Epoch("store", 9)))


@with_processes
def test_a_holder_that_is_killed_in_the_middle_costs_little_and_another_gives_the_rest(scene: Scene, kind: str) -> None:
    process, source = scene.process()
    good = scene.host(plain=True, content=RIGHT, chunk_bytes=BIG["chunk_bytes"])
    good.fill()
    into = scene.host(content=RIGHT, chunk_bytes=BIG["chunk_bytes"])
    running = scene.fetch(into, [[source], [good.source]])
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(running.run)
        until(lambda: running.bytes_done > len(RIGHT) // 4, "a quarter is there")
        assert running.transport == scene.transport
        process.kill()
        assert done.result(60.0)
    assert into.content() == RIGHT
    again = good.server.bytes_sent - len(RIGHT) * 3 // 4
    assert again < 2 * 4 * BIG["chunk_bytes"], "at most what was under way comes twice"  # type: ignore[operator]


@with_processes
def test_a_holder_that_hangs_is_noticed_and_what_it_sends_when_it_wakes_lands_nowhere(scene: Scene, kind: str) -> None:
    """The one that hangs has other bytes, so that one of them that came late would show."""
    process, source = scene.process(seed=2, max_rate=8e6 if scene.transport == "tcp" else None)
    good = scene.host(plain=True, content=RIGHT, chunk_bytes=BIG["chunk_bytes"])
    good.fill()
    into = scene.host(content=RIGHT, chunk_bytes=BIG["chunk_bytes"])
    link = scene.dial(into)(source, FETCH)
    assert link.transport == scene.transport
    link.request(Want(0, 0))
    link.receive(into.snapshot.place, lambda *_: None)
    processes = [child.pid for child in psutil.Process(process.pid).children()]
    for pid in processes:  # first, so that reads begin and do not end
        os.kill(pid, signal.SIGSTOP)
    for index in range(1, 8):
        link.request(Want(index, 0))
    begun = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        broken = threads.submit(_all, link, into, begun.set)
        until(lambda: begun.is_set() or _num_reading(link) == 7, "bytes are under way")
        process.send_signal(signal.SIGSTOP)
        _give_up_after(link, frames.SILENCE_S)  # only now: until here a busy machine must not look like a dead holder
        with pytest.raises(LinkBroken, match="silent for"):
            broken.result(60.0)
    everything = [*processes, process.pid]
    link.close()
    assert scene.fetch(into, [[good.source]]).run()
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    sent = psutil.Process(process.pid)
    until(lambda: sent.status() != psutil.STATUS_STOPPED, "it is awake")
    again = scene.host(content=random_content(2, len(RIGHT)), chunk_bytes=BIG["chunk_bytes"])
    with contextlib.closing(scene.dial(again)(source, FETCH)) as late:  # it works again, so it has sent what it had
        late.request(Want(0, 0))
        late.receive(again.snapshot.place, lambda *_: None)
    assert again.snapshot.place(0) == again.all[: len(again.snapshot.place(0))]
    assert into.content() == RIGHT


def _all(link: Link, into: Host, begun: Callable[[], None]) -> None:
    while True:
        link.receive(into.snapshot.place, lambda *_: begun())


def _give_up_after(link: Link, silence_s: float) -> None:
    tcp_link = link._hop if isinstance(link, nixl_module.NixlLink) else link
    assert isinstance(tcp_link, TcpLink)
    tcp_link.silence_s = silence_s


def _num_reading(link: Link) -> int:
    return len(link._reading) if isinstance(link, nixl_module.NixlLink) else 0


@only_nixl
@pytest.mark.slow
def test_a_read_that_takes_longer_than_the_silence_that_counts_as_death_is_no_death(scene: Scene) -> None:
    """The holder has nothing to say meanwhile but that it lives."""
    scene.own_processes()
    scene.silence_s = LIVELY_S
    source, into = scene.full(), scene.host()
    before = children()
    with contextlib.closing(scene.dial(into)(source, FETCH)) as link, ThreadPoolExecutor(1) as threads:
        assert isinstance(link, nixl_module.NixlLink)
        (others,) = children() - before - {link._process.pid}
        os.kill(others, signal.SIGSTOP)
        link.request(Want(0, 0))
        arrived = threads.submit(link.receive, into.snapshot.place, lambda *_: None)
        with pytest.raises(TimeoutError):
            arrived.result(1.5 * LIVELY_S)
        os.kill(others, signal.SIGCONT)
        assert arrived.result(60.0).index == 0
    assert into.snapshot.place(0) == CONTENT[:CHUNK]


@only_nixl
def test_nixl_processes_are_used_again_after_clean_links_and_never_after_others(scene: Scene) -> None:
    processes = scene.own_processes()
    source, into = scene.full(), scene.host()
    before = children()
    pids: list[set[int]] = []
    for _ in range(3):
        with contextlib.closing(scene.dial(into)(source, FETCH)) as link:
            link.request(Want(0, 0))
            link.receive(into.snapshot.place, lambda *_: None)
            pids.append(children() - before)
        until(lambda: not processes.num_busy, "both ends gave their processes back")
    assert pids[0] == pids[1] == pids[2]
    link = scene.dial(into)(source, FETCH)
    link.request(Want(len(CONTENT) // CHUNK, 0))
    link.request(Want(0, 0))
    until(lambda: _begun(link, into), "a read has begun")
    link.close()
    until(lambda: not children() & pids[0], "neither is used again")


def children() -> set[int]:
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as gone, too
            found |= {child.pid} if "paramserver.data.nixl.process" in child.cmdline() else set()
    return found


def _kill_own(link: Link) -> None:
    assert isinstance(link, nixl_module.NixlLink)
    os.kill(link._process.pid, signal.SIGKILL)


def _kill_others(link: Link) -> None:
    assert isinstance(link, nixl_module.NixlLink)
    for pid in children() - {link._process.pid}:
        os.kill(pid, signal.SIGKILL)  # those that only wait for work are replaced


def _begun(link: Link, into: Host) -> bool:
    assert isinstance(link, nixl_module.NixlLink)
    link._wait(into.snapshot.place)
    return bool(link._reading)


@only_nixl
def test_a_version_that_goes_is_unmapped_though_an_asker_stays_connected(scene: Scene) -> None:
    processes = scene.own_processes()
    holder, into = scene.host(), scene.host()
    holder.fill()
    with contextlib.closing(scene.dial(into)(holder.source, FETCH)) as link:

        def freed() -> bool:
            with contextlib.suppress(LinkBroken):  # it may be told so already
                link.alive()
            return processes.num_busy == 1

        assert processes.num_busy == 2
        holder.store.remove(holder.snapshot, "retired")
        until(freed, "only the asker's still maps anything")


@only_nixl
def test_a_nixl_process_that_dies_is_a_failed_link_and_twice_means_tcp(scene: Scene) -> None:
    """The relays' own processes live on, whatever the library does."""
    processes = scene.own_processes()
    source, into = scene.full(), scene.host()
    for lose, transport in ((_kill_own, "nixl"), (_kill_others, "nixl"), (None, "tcp")):
        with contextlib.closing(scene.dial(into)(source, FETCH)) as link:
            assert link.transport == transport
            if lose is not None:
                link.request(Want(0, 0))
                lose(link)
                with pytest.raises(LinkBroken):
                    link.receive(into.snapshot.place, lambda *_: None)
        until(lambda: not processes.num_busy, "both ends have given up their processes")
    assert scene.fetch(into, [[source]]).run()
    assert into.content() == CONTENT


@only_nixl
def test_a_holder_that_speaks_tcp_only_is_asked_over_tcp_and_it_is_said(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    holder, into = scene.host(plain=True), scene.host()
    holder.fill()
    running = scene.fetch(into, [[holder.source]])
    assert running.run()
    assert (running.transport, into.content()) == ("tcp", CONTENT)
    assert caplog.text.count("does not speak nixl: its bytes come over tcp") == 1


@only_nixl
@pytest.mark.parametrize("transports", [[], ["of-tomorrow"]])
def test_an_asker_that_does_not_speak_nixl_is_sent_its_bytes(scene: Scene, transports: list[str]) -> None:
    """Relays of an earlier release greet without `transports`; those of a later one may know more."""
    source, into = scene.full(), scene.host()
    link = TcpLink(source, msgspec.structs.replace(FETCH, transports=transports))
    with contextlib.closing(link):
        assert link.welcome.nixl is None
        link.request(Want(0, 0))
        link.receive(into.snapshot.place, lambda *_: None)
    assert into.snapshot.place(0) == CONTENT[:CHUNK]


@only_nixl
def test_with_every_nixl_process_at_work_links_go_over_tcp(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "PROCESSES_MAX", 0)
    source, into = scene.full(), scene.host()
    running = scene.fetch(into, [[source]])
    assert running.run()
    assert (running.transport, into.content()) == ("tcp", CONTENT)


@pytest.mark.slow
def test_without_the_package_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "VARIANTS", ("nixl_not_there",))
    with pytest.raises(Unavailable) as caught:
        NixlProcesses(idle_max=1).warm(1)
    assert "needs the package nixl" in str(caught.value)
    assert caught.value.hint.endswith("[nixl]'")
