"""The data port and the fetch over real loopback sockets: resume, bypass, digests, publishing both ways."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from paramserver.client import pull
from paramserver.core.layout import TensorSpec, plan_layout
from paramserver.core.records import ChunkMap, Epoch, Manifest, digest, version_root
from paramserver.core.transfer import Want
from paramserver.data import arrival, frames, tcp
from paramserver.data import server as data_server
from paramserver.data.fetch import Fetch
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken, Partly
from paramserver.data.nixl.dialer import NixlLink
from paramserver.data.nixl.lender import NixlLender
from paramserver.data.publish import Image, write_mapped, write_tcp
from paramserver.data.publisher_link import Mappings, NotItsSocket, leave
from paramserver.data.sealed import PARTLY_S, RECORD_BYTES_MAX
from paramserver.data.transport import Arrived, Begun, Source
from protos.errors import (
    Conflict,
    Corrupt,
    InvalidRequest,
    LaminarError,
    NotFound,
    OutOfCapacity,
    StaleEpoch,
    Unavailable,
)
from tests.support.fleet import until
from tests.support.hops import CHUNK, CONTENT, EPOCH, FETCH, Host, manifest
from tests.support.skips import needs

MakeHost = Callable[..., Host]


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    directory = Path(tempfile.mkdtemp(prefix="laminar-data-", dir="/dev/shm"))
    hosts: list[Host] = []

    def make(*sizes: int) -> Host:
        hosts.append(Host(directory / f"host{len(hosts)}", *(sizes or (len(CONTENT),))))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
    shutil.rmtree(directory)


LIVELY_S = 3.0
"""Silence that counts as death where a holder lives: its signs of life come in time beside any other work."""


def fetch(into: Host, *sources: Host, patience_s: float = 20.0) -> Fetch:
    dial = tcp.dialer(silence_s=LIVELY_S)
    return Fetch(into.snapshot, FETCH, lambda: [[s.source] for s in sources], dial, patience_s=patience_s)


@pytest.mark.slow
def test_a_version_comes_over_while_it_is_still_being_written(make_host: MakeHost) -> None:
    upstream, downstream = make_host(), make_host()
    upstream.fill(2)
    running = fetch(downstream, upstream)
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(running.run()))
    thread.start()
    assert downstream.snapshot.wait_chunk(1, 60.0) is not None
    assert downstream.snapshot.wait_chunk(2, 1.3 * LIVELY_S) is None, "longer than the silence that counts as death"
    upstream.fill()
    thread.join(60.0)
    assert result == [True]
    assert downstream.content() == CONTENT
    assert downstream.snapshot.root() == upstream.snapshot.root()
    assert running.num_bypasses == 0


def test_a_source_that_is_away_is_bypassed(make_host: MakeHost) -> None:
    gone, upstream, downstream = make_host(), make_host(), make_host()
    gone.server.close()
    upstream.fill()
    running = fetch(downstream, gone, upstream)
    assert running.run()
    assert downstream.content() == CONTENT
    assert gone.source.name in running.bypassed()


def test_a_host_that_stood_still_takes_nobody_for_dead_before_it_has_listened(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic()
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: clock))
    holder = make_host()

    def look(seconds: float) -> int:
        nonlocal clock
        clock += seconds
        raise BlockingIOError

    looks = iter([lambda: look(3.0), lambda: 7])
    with tcp_link(holder.source) as link:
        link.silence_s = frames.SILENCE_S
        assert link._some(lambda: next(looks)()) == 7
        with pytest.raises(LinkBroken, match="was silent for"):
            link._some(lambda: look(frames.HEARTBEAT_S))


def test_a_record_that_trickles_ends_its_link_and_a_slow_one_does_not(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic()
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: clock))
    rate_bytes_s = 64 << 10

    def trickle(seconds: float) -> Iterator[int]:
        nonlocal clock
        ends_at = clock + seconds
        while clock < ends_at:
            clock += PARTLY_S
            yield 0
        yield RECORD_BYTES_MAX

    def receive() -> int:
        if num := next(looks):
            return num
        raise Partly

    with tcp_link(make_host().source) as link:
        looks = trickle(RECORD_BYTES_MAX / rate_bytes_s)
        assert link._some(receive) == RECORD_BYTES_MAX
        began, looks = clock, trickle(3600.0)
        with pytest.raises(LinkBroken, match="no record of host0 was whole"):
            link._some(receive)
        assert clock - began < link.silence_s + tcp.RECORD_S + 1.0


def test_without_any_source_it_gives_up_and_says_why(make_host: MakeHost) -> None:
    gone, downstream = make_host(), make_host()
    gone.server.close()
    with pytest.raises(Unavailable, match="cannot connect"):
        fetch(downstream, gone, patience_s=0.3).run()


def test_stripes_spread_over_the_holders_of_one_tier(make_host: MakeHost) -> None:
    holders, downstream = [make_host(), make_host()], make_host()
    tiers = [[holder.source for holder in holders]]
    running = Fetch(downstream.snapshot, FETCH, lambda: tiers, tcp.dialer(silence_s=LIVELY_S), num_stripes=1)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(running.run)
        until(lambda: all(holder.snapshot.num_links == 1 for holder in holders), "a stripe to each holder")
        for holder in holders:
            holder.fill()
        assert done.result(60.0)
    assert downstream.content() == CONTENT
    assert sum(holder.server.bytes_sent for holder in holders) == len(CONTENT), "no byte came twice"
    assert all(holder.server.bytes_sent for holder in holders), "each answers what it was asked while it waited"


def test_a_holder_serves_few_late_joiners_at_once_and_the_next_when_one_is_done(make_host: MakeHost) -> None:
    holder = make_host()
    holder.fill()
    late = [Greeting("fetch", "policy", 1, f"joiner-{i}", EPOCH, late=True) for i in range(3)]
    with tcp_link(holder.source, late[0]), tcp_link(holder.source, late[0]), tcp_link(holder.source, late[1]):
        with pytest.raises(OutOfCapacity, match="goes to joiner-0, joiner-1 already"):
            tcp.TcpLink(holder.source, late[2], silence_s=LIVELY_S)
        tcp.TcpLink(holder.source, FETCH).close()
    waiting = make_host()
    assert Fetch(
        waiting.snapshot, late[2], lambda: [[holder.source]], tcp.dialer(silence_s=LIVELY_S), patience_s=20.0
    ).run()
    assert waiting.content() == CONTENT


def test_a_cancelled_fetch_ends_without_an_error(make_host: MakeHost) -> None:
    upstream, downstream = make_host(), make_host()
    running = fetch(downstream, upstream)
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(running.run()))
    thread.start()
    running.cancel()
    thread.join(60.0)
    assert result == [False]


def test_a_server_ends_while_a_connection_begins(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` waits for threads in any order, and the one of a connection may not have begun yet."""
    starts, closed = threading.Event(), threading.Event()
    start = threading.Thread.start

    def late(thread: threading.Thread) -> None:
        if thread.name == "data-connection":
            starts.set()
            closed.wait(0.05)  # `close` goes on meanwhile, or waits for this
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    for _ in range(12):
        starts.clear()
        closed.clear()
        host = make_host()
        address, _, port = host.source.address.rpartition(":")
        with socket.create_connection((address, int(port))):
            assert starts.wait(60.0)
            host.server.close()
            closed.set()


def test_a_cancelled_fetch_does_not_wait_for_a_holder_that_has_no_more(make_host: MakeHost) -> None:
    """Its publisher may take minutes; ALIVE comes meanwhile, so that the link is never silent."""
    upstream, downstream = make_host(), make_host()
    upstream.fill(1)
    running = fetch(downstream, upstream)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    downstream.snapshot.wait_chunk(0, 60.0)
    running.cancel()
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("says", [Header(Kind.ALIVE).pack(), b""], ids=["alive", "byte by byte"])
def test_a_cancelled_fetch_does_not_wait_for_a_welcome(make_host: MakeHost, says: bytes) -> None:
    """The holder lives, and says so for as long as it is listened to."""
    waiting, left = threading.Event(), threading.Event()
    bytewise = iter(Header(Kind.WELCOME, length=1 << 20).pack() + bytes(1 << 20))

    def say(listener: socket.socket) -> None:
        with listener.accept()[0] as sock, contextlib.suppress(OSError):
            frames.receive_greeting(sock)
            while not left.wait(0.05):
                sock.sendall(says or bytes([next(bytewise)]))
                waiting.set()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        said = pool.submit(say, listener)
        source = Source("talker", f"127.0.0.1:{listener.getsockname()[1]}")
        dial = tcp.dialer(silence_s=60.0)
        running = Fetch(make_host().snapshot, FETCH, lambda: [[source]], dial, num_stripes=1)
        done = pool.submit(running.run)
        assert waiting.wait(60.0)
        running.cancel()
        try:
            assert done.result(20.0) is False
        finally:
            left.set()
        said.result(60.0)


def test_a_link_that_is_told_of_after_the_fetch_was_cancelled_is_broken_off(make_host: MakeHost) -> None:
    holder = make_host()
    running: list[Fetch] = []
    broken: list[str] = []

    class Told:
        def break_off(self) -> None:
            broken.append("told")

    def dial(source: Source, greeting: Greeting, begun: Begun) -> tcp.TcpLink:
        running[0].cancel()
        begun(Told())
        raise LinkBroken("no welcome")

    running.append(Fetch(make_host().snapshot, FETCH, lambda: [[holder.source]], dial, num_stripes=1))
    assert running[0].run() is False
    assert broken == ["told"]


def test_memory_that_went_bad_at_the_sender_is_found_withdrawn_and_had_elsewhere(make_host: MakeHost) -> None:
    bad, good, downstream = make_host(), make_host(), make_host()
    bad.fill()
    good.fill()
    bad.snapshot.place(3)[5:6] = b"\xff"
    assert fetch(downstream, bad, good).run()
    assert downstream.content() == CONTENT
    with tcp_link(bad.source) as link:
        link.request(Want(3, 0, suspect=True))
        with pytest.raises(Corrupt, match="changed in memory"):
            link.receive(downstream.snapshot.place, lambda index, upto: None)
    assert "chunk 3" in bad.withdrawn[0]


class tcp_link:  # noqa: N801  (reads as a function)
    """A link as a context manager."""

    def __init__(self, source: Source, greeting: Greeting = FETCH) -> None:
        self.link = tcp.TcpLink(source, greeting, silence_s=LIVELY_S)

    def __enter__(self) -> tcp.TcpLink:
        return self.link

    def __exit__(self, *_: object) -> None:
        self.link.close()


@pytest.fixture(params=["by the library", "in Python"])
def _both_arrivals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(arrival, "_library", None)
    else:
        assert arrival._library is not None, "`make env` compiles receive.c"


@pytest.mark.usefixtures("_both_arrivals")
def test_a_request_may_start_in_the_middle_of_a_chunk(make_host: MakeHost) -> None:
    upstream, downstream = make_host(), make_host()
    upstream.fill()
    progress: list[int] = []
    with tcp_link(upstream.source) as link:
        link.request(Want(1, 1000))
        arrived = link.receive(downstream.snapshot.place, lambda index, upto: progress.append(upto))
    assert (arrived.index, arrived.digest) == (1, digest(CONTENT[CHUNK : 2 * CHUNK]))
    assert arrived.found == digest(bytes(downstream.snapshot.place(1)))  # what was there before counts, too
    assert arrived.num_bytes == CHUNK - 1000
    assert bytes(downstream.snapshot.place(1)) == bytes(1000) + CONTENT[CHUNK + 1000 : 2 * CHUNK]
    assert progress[-1] == CHUNK


@pytest.mark.parametrize(
    ("greeting", "error", "words"),
    [
        (Greeting("fetch", "policy", 1, "t", Epoch("store", 2)), StaleEpoch, "begun in epoch store/1"),
        (Greeting("fetch", "critic", 1, "t"), NotFound, "no critic here"),
        (Greeting("write", "policy", 1, "t", token="guess"), Conflict, "a wrong token"),
        (Greeting("map", "policy", 1, "t", token="token", to="here"), Conflict, "only over the unix socket"),
    ],
)
def test_what_is_not_to_be_had_is_refused_in_words(
    make_host: MakeHost, greeting: Greeting, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        tcp.TcpLink(make_host().source, greeting)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"LMN1\xff\xff\xff\xff", b"LMN1\x00\x00\x00\x42{}"])
def test_garbage_ends_its_own_connection_and_no_other(make_host: MakeHost, garbage: bytes) -> None:
    host = make_host()
    host.fill()
    with frames.connect(host.source.address, 5.0) as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(garbage + bytes(64))
        assert sock.recv(1) == b""
    downstream = make_host()
    assert fetch(downstream, host).run()


DEEP = b"[" * 200_000
"""JSON nested deeper than any decoder goes."""


def test_a_greeting_nested_too_deep_ends_its_own_connection_and_no_other(make_host: MakeHost) -> None:
    host = make_host()
    host.fill()
    with frames.connect(host.source.address, 5.0) as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(b"LMN1" + len(DEEP).to_bytes(4, "big") + DEEP)
        assert sock.recv(1) == b""
    assert fetch(make_host(), host).run()


def test_a_source_whose_answer_is_nested_too_deep_is_bypassed(make_host: MakeHost) -> None:
    upstream, downstream = make_host(), make_host()
    upstream.fill()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        liar = Source("liar", f"127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=_answer_deep, args=(listener,), daemon=True).start()
        running = Fetch(downstream.snapshot, FETCH, lambda: [[liar], [upstream.source]], tcp.dialer(silence_s=LIVELY_S))
        assert running.run()
    assert downstream.content() == CONTENT


def _answer_deep(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with sock:
                frames.receive_greeting(sock)
                sock.sendall(Header(Kind.WELCOME, length=len(DEEP)).pack() + DEEP)


def test_an_error_in_making_a_link_that_nobody_foresaw_costs_that_source_alone(make_host: MakeHost) -> None:
    odd, upstream, downstream = make_host(), make_host(), make_host()
    upstream.fill()
    make = tcp.dialer(silence_s=LIVELY_S)

    def dial(source: Source, greeting: Greeting, begun: Begun) -> tcp.TcpLink:
        if source is odd.source:
            raise ZeroDivisionError("unforeseen")
        return make(source, greeting, begun)

    running = Fetch(downstream.snapshot, FETCH, lambda: [[odd.source], [upstream.source]], dial)
    assert running.run()
    assert downstream.content() == CONTENT


def test_an_error_in_a_stripe_that_nobody_foresaw_reaches_who_waits_for_the_fetch(make_host: MakeHost) -> None:
    upstream, downstream = make_host(), make_host()
    upstream.fill()

    def fails(index: int, chunk_digest: bytes) -> None:
        raise ZeroDivisionError("unforeseen")

    downstream.snapshot.present = fails  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        fetch(downstream, upstream).run()


def test_without_a_thread_for_every_stripe_no_other_goes_on_writing(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked for the fetch gives the memory back as soon as it has ended."""
    silent, downstream = make_host(), make_host()
    running = fetch(downstream, silent)
    running.num_stripes = 2
    start, started = threading.Thread.start, []

    def fails_the_second_time(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr("paramserver.data.fetch.threading.Thread.start", fails_the_second_time)
        with pytest.raises(RuntimeError, match="new thread"):
            running.run()
    assert not started[0].is_alive()


@pytest.mark.slow
def test_a_data_port_without_a_thread_to_be_had_serves_again_when_there_is_one(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host()
    host.fill()
    start, num_failed = host.server._start, 0

    def fails_twice(work: Callable[[], None], name: str) -> None:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise RuntimeError("can't start new thread")
        start(work, name)

    monkeypatch.setattr(host.server, "_start", fails_twice)
    assert fetch(make_host(), host).run()
    assert num_failed == 2
    assert len([r for r in caplog.records if "are not accepted" in r.getMessage() and r.levelname == "ERROR"]) == 1


def test_what_nobody_foresaw_in_serving_a_connection_is_refused_and_costs_no_other(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host()
    host.fill()
    with monkeypatch.context() as patch:
        patch.setattr(host, "find", lambda *_: 1 // 0)
        with pytest.raises(LaminarError, match="ZeroDivisionError"):
            tcp.TcpLink(host.source, FETCH)
    assert fetch(make_host(), host).run()


class FakeLink:
    """A link in memory that breaks after a given number of answers, each time in mid-chunk."""

    transport = "noted"
    rtt_s = 0.0

    def __init__(self, content: bytes, answers: int) -> None:
        self._content = content
        self._answers = answers
        self.asked: list[Want] = []

    def request(self, want: Want) -> None:
        self.asked.append(want)

    def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
        want = self.asked.pop(0)
        start = want.index * CHUNK
        whole = self._content[start : start + CHUNK]
        if self._answers == 0:
            half = (want.from_byte + len(whole)) // 2
            place(want.index)[want.from_byte : half] = whole[want.from_byte : half]
            received(want.index, half)
            raise LinkBroken("cut")
        self._answers -= 1
        place(want.index)[want.from_byte :] = whole[want.from_byte :]
        received(want.index, len(whole))
        return Arrived(want.index, digest(whole), len(whole) - want.from_byte, time.monotonic())

    def alive(self) -> None: ...

    def break_off(self) -> None: ...

    def close(self) -> None: ...


def test_every_break_resumes_where_the_bytes_stopped(make_host: MakeHost) -> None:
    downstream = make_host()
    resumed: list[Want] = []

    class Noting(FakeLink):
        def request(self, want: Want) -> None:
            if want.from_byte:
                resumed.append(want)
            super().request(want)

    sources = [Source(f"s{i}", "") for i in range(8)]
    running = Fetch(
        downstream.snapshot,
        FETCH,
        lambda: [[s] for s in sources],
        lambda source, *_: Noting(CONTENT, 2),
        num_stripes=1,
        patience_s=5.0,
    )
    assert running.run()
    assert downstream.content() == CONTENT
    assert resumed[0] == Want(2, CHUNK // 2)
    assert len(resumed) == running.num_bypasses == 3


def test_a_hops_rate_counts_once_the_time_in_which_several_chunks_come_at_once(make_host: MakeHost) -> None:
    """Or stripes that run side by side would seem slower than those that take turns."""
    downstream, began_at = make_host(), time.monotonic() - 1.0

    class Beside(FakeLink):
        def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
            return dataclasses.replace(super().receive(place, received), began_at=began_at)

    sources = [[Source("s", "")]]
    running = Fetch(downstream.snapshot, FETCH, lambda: sources, lambda *_: Beside(CONTENT, 7), num_stripes=2)
    assert running.run()
    assert running.rate_bytes_s >= len(CONTENT) / (time.monotonic() - began_at)


def image_of(*tensors: tuple[str, bytes]) -> tuple[Image, Manifest, bytes]:
    specs = [TensorSpec(name, "U8", (len(data),)) for name, data in tensors]
    files = plan_layout(specs)
    reads = {name: (lambda data=data: memoryview(data)) for name, data in tensors}  # type: ignore[misc]
    expected = files[0].head + b"".join(data for _, data in sorted(tensors))
    return Image([files[0].size_bytes], {0: files[0]}, reads, CHUNK), manifest(files[0].size_bytes), expected


TENSORS = (("b", CONTENT), ("a", b"x" * 5000), ("empty", b""))


def test_a_publisher_writes_through_the_passed_descriptors(make_host: MakeHost) -> None:
    image, found, expected = image_of(*TENSORS)
    host = make_host(found.size_bytes)
    mappings = Mappings()
    digests = write_mapped(host.socket, Greeting("map", "policy", 1, "t", token="token", to="here"), image, mappings)
    held = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert str(host.snapshot.files[0].path) not in held.stdout, (
        "a program that the trainer starts would keep its memory"
    )
    mappings.close()
    assert bytes(host.snapshot.files[0].view()) == expected
    assert host.snapshot.complete
    assert version_root(found, digests) == host.snapshot.root()


FORKS = """
import os, sys
from paramserver.data.publisher_link import Mappings

path, mappings = sys.argv[1], Mappings()
place = mappings.map(os.open(path, os.O_RDWR))
place.view[:5] = b"whole"
child = os.fork()
if child == 0:
    held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps:
        held += maps.read().split()
    place.view[:5] = b"child"
    mappings.close()
    place.leave()
    mappings.close()
    os._exit(3 if path in held else 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bytes(place.view[:5]) == b"whole"
assert os.path.samestat(place.status(), os.stat(path))

mappings.close()  # its relay has gone; the writer is not done
with open(path, "rb") as data:  # has the descriptor's number
    child = os.fork()
    if child == 0:
        os._exit(0 if data.read(5) == b"whole" else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.slow
def test_a_forked_child_holds_none_of_the_relays_memory(tmp_path: Path) -> None:
    """Or the relay could not use it again while a trainer's data loaders live."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    subprocess.run([sys.executable, "-c", FORKS, str(path)], check=True, timeout=120)
    assert path.read_bytes()[:6] == b"whole\0"


@pytest.mark.parametrize("to", ["another instance", ""], ids=["another", "an earlier release's"])
def test_a_socket_is_used_only_where_its_relay_proves_to_be_the_one_meant(make_host: MakeHost, to: str) -> None:
    image, found, _ = image_of(*TENSORS)
    host, greeting = make_host(found.size_bytes), Greeting("map", "policy", 1, "t", token="token", to=to)
    with pytest.raises(NotItsSocket):
        write_mapped(host.socket, greeting, image, Mappings())
    with pytest.raises(NotItsSocket):
        write_mapped(host.socket.with_name("nothing"), greeting, image, Mappings())
    assert not host.snapshot.written_elsewhere
    assert len(host.snapshot.missing()) == host.snapshot.chunks.num_chunks


def test_a_welcome_without_the_instance_that_is_meant_gets_no_bytes(tmp_path: Path) -> None:
    """Of a relay that looks at no instance, with the same model and token by chance, or by design."""
    image, found, _ = image_of(*TENSORS)
    path = tmp_path / "publish.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                frames.receive_greeting(sock)
                frames.send_message(sock, Kind.WELCOME, frames.Welcome(found, [], instance="mine"))
                assert sock.recv(1) == b"", "it left without a byte"

        with ThreadPoolExecutor(1) as threads:
            serving = threads.submit(serve)
            with pytest.raises(NotItsSocket, match="another relay listens there"):
                write_mapped(path, Greeting("map", "policy", 1, "t", token="token", to="yours"), image, Mappings())
            serving.result(60)


def test_many_threads_copy_one_version_and_read_each_tensor_once(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.data.publish.num_copy_threads", lambda chunks: 4)
    reads: Counter[str] = Counter()

    def reader(name: str, data: bytes) -> Callable[[], memoryview]:
        def read() -> memoryview:
            reads[name] += 1
            return memoryview(data)

        return read

    tensors = {f"t{i}": CONTENT[i:] for i in range(6)}
    (file,) = plan_layout([TensorSpec(name, "U8", (len(data),)) for name, data in tensors.items()])
    image = Image([file.size_bytes], {0: file}, {n: reader(n, data) for n, data in tensors.items()}, CHUNK)
    host = make_host(file.size_bytes)
    mappings = Mappings()
    digests = write_mapped(host.socket, Greeting("map", "policy", 1, "t", token="token", to="here"), image, mappings)
    held = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert str(host.snapshot.files[0].path) not in held.stdout, (
        "a program that the trainer starts would keep its memory"
    )
    mappings.close()
    assert bytes(host.snapshot.files[0].view()) == file.head + b"".join(tensors.values())
    assert digests == host.snapshot.digests()
    assert set(reads.values()) == {1}


def test_no_chunk_that_is_whole_waits_for_the_read_of_another_tensor(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.data.publish.num_copy_threads", lambda chunks: 1)
    monkeypatch.setattr("paramserver.data.publisher_link.ALIVE_S", 0.01)
    (file,) = plan_layout([TensorSpec("a", "U8", (5 * CHUNK,)), TensorSpec("b", "U8", (5 * CHUNK,))])
    host, mappings = make_host(file.size_bytes), Mappings()

    def gathered() -> memoryview:
        whole = (len(file.head) + 5 * CHUNK) // CHUNK
        assert host.snapshot.wait_chunk(whole - 1, 60.0) is not None
        return memoryview(bytes(5 * CHUNK))

    reads = {"a": lambda: memoryview(bytes(5 * CHUNK)), "b": gathered}
    image = Image([file.size_bytes], {0: file}, reads, CHUNK, resident={"a"})
    write_mapped(host.socket, Greeting("map", "policy", 1, "t", token="token", to="here"), image, mappings)
    mappings.close()
    assert host.snapshot.complete


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("resident", [True, False])
def test_runs_are_short_at_both_ends_and_go_on_over_tensors_that_lie_in_memory(
    num_threads: int, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain waits for the first, and at the end a thread without a run would wait for one that has a long one."""
    monkeypatch.setattr("paramserver.data.publish.RUN_BYTES_MAX", 8 * CHUNK)
    names = [f"t{n}" for n in range(10)]
    (file,) = plan_layout([TensorSpec(name, "U8", (10 * CHUNK,)) for name in names])
    reads = {name: lambda: memoryview(bytes(10 * CHUNK)) for name in names}
    image = Image([file.size_bytes], {0: file}, reads, CHUNK, names if resident else ())
    runs = [[chunk.index for chunk in run.chunks] for run in image.runs(num_threads)]
    lengths = [len(run) for run in runs]
    assert [index for run in runs for index in run] == list(image.indices)
    assert lengths[:3] == [1, 2, 4]
    assert lengths[-1] == 1
    assert max(lengths) == 8
    if resident:
        ending = list(itertools.takewhile(lambda length: length < 8, reversed(lengths)))
        assert sum(ending) >= 8 * num_threads, "what is left is shared once it is two long runs for each thread"
        assert len(runs) == 3 + lengths.count(8) + len(ending), "no tensor's end ended one"
    else:
        starts = [place.offset for place in file.tensors]
        tensors = [{bisect.bisect(starts, (index + 1) * CHUNK - 1) for index in run} for run in runs]
        assert max(map(len, tensors)) == 1, "no run waits for the tensor in which the first of its chunks does not end"


def test_a_tensor_that_fails_in_one_thread_ends_them_all(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.data.publish.num_copy_threads", lambda chunks: 4)

    def gone() -> memoryview:
        raise RuntimeError("the device is gone")

    (file,) = plan_layout([TensorSpec("a", "U8", (len(CONTENT),)), TensorSpec("b", "U8", (len(CONTENT),))])
    image = Image([file.size_bytes], {0: file}, {"a": lambda: memoryview(CONTENT), "b": gone}, CHUNK)
    host, mappings = make_host(file.size_bytes), Mappings()
    with pytest.raises(RuntimeError, match="the device is gone"):
        write_mapped(host.socket, Greeting("map", "policy", 1, "t", token="token", to="here"), image, mappings)
    mappings.close()
    assert not host.snapshot.complete


def publish(how: str, host: Host, image: Image) -> None:
    if how == "streamed":
        write_tcp(host.source.address, Greeting("write", "policy", 1, "t", token="token"), image, attempts=1)
        return
    mappings = Mappings()
    try:
        write_mapped(host.socket, Greeting("map", "policy", 1, "t", token="token", to="here"), image, mappings)
    finally:
        mappings.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mapped", "streamed"])
def test_a_tensor_that_takes_longer_to_read_than_a_silence_may_last_breaks_nothing(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The relay hears signs of life meanwhile, and the trainer's log says which tensor is waited for."""
    for name in ("server.STALL_S", "server.PUBLISHER_SILENCE_S"):
        monkeypatch.setattr(f"paramserver.data.{name}", 0.5)
    monkeypatch.setattr("paramserver.data.publisher_link.ALIVE_S", 0.05)
    monkeypatch.setattr("paramserver.data.publisher_link.SLOW_READ_S", 0.2)

    def slow() -> memoryview:
        time.sleep(1.5)  # what is tested is that nothing happens meanwhile
        return memoryview(CONTENT)

    (file,) = plan_layout([TensorSpec("gathered", "U8", (len(CONTENT),))])
    image = Image([file.size_bytes], {0: file}, {"gathered": slow}, CHUNK)
    host = make_host(file.size_bytes)
    publish(how, host, image)
    assert host.snapshot.complete
    said = [r.getMessage() for r in caplog.records if "gathered" in r.getMessage()]
    assert 1 <= len(said) <= 3, "at 0.2, 0.4 and 0.8 s, and not at every look"
    assert re.search(r"tensor 'gathered' has been read for \d+\.\d s", said[0])


@pytest.mark.parametrize("how", ["mapped", "streamed"])
def test_a_publisher_hears_why_its_version_was_given_up_meanwhile(make_host: MakeHost, how: str) -> None:
    (file,) = plan_layout([TensorSpec("a", "U8", (len(CONTENT),)), TensorSpec("b", "U8", (len(CONTENT),))])
    host = make_host(file.size_bytes)

    def read() -> memoryview:
        host.snapshot.close("rank 1 left")
        return memoryview(CONTENT)

    image = Image([file.size_bytes], {0: file}, {"a": lambda: memoryview(CONTENT), "b": read}, CHUNK)
    with pytest.raises(LaminarError, match="rank 1 left"):
        publish(how, host, image)


@pytest.mark.parametrize("how", ["mapped", "streamed"])
def test_a_version_given_up_during_a_slow_read_frees_the_relays_thread_and_is_said(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.setattr("paramserver.data.publisher_link.ALIVE_S", 0.01)
    (file,) = plan_layout([TensorSpec("gathered", "U8", (len(CONTENT),))])
    host = make_host(file.size_bytes)

    def slow() -> memoryview:
        host.snapshot.close("rank 1 left")
        until(lambda: any("left while tensor 'gathered' is read" in r.getMessage() for r in caplog.records), "a word")
        return memoryview(CONTENT)

    image = Image([file.size_bytes], {0: file}, {"gathered": slow}, CHUNK)
    with pytest.raises(LaminarError, match="rank 1 left"):
        publish(how, host, image)


def test_a_publisher_streams_and_sends_only_what_is_missing(make_host: MakeHost) -> None:
    image, found, expected = image_of(*TENSORS)
    host = make_host(found.size_bytes)
    greeting = Greeting("write", "policy", 1, "t", token="token")
    digests = write_tcp(host.source.address, greeting, image)
    assert bytes(host.snapshot.files[0].view()) == expected
    assert version_root(found, digests) == host.snapshot.root()


def test_a_chunk_that_was_verified_is_not_written_again(make_host: MakeHost) -> None:
    """Whoever still has the token, or a second connection of one publisher, cannot tear what others may read."""
    image, found, expected = image_of(*TENSORS)
    host = make_host(found.size_bytes)
    greeting = Greeting("write", "policy", 1, "t", token="token")
    write_tcp(host.source.address, greeting, image)
    other = b"x" * host.snapshot.chunks.chunk(0).length
    with frames.connect(host.source.address, 5.0) as sock:
        frames.send_greeting(sock, greeting)
        frames.receive_welcome(sock, silence_s=5.0)
        frames.send_all(sock, Header(Kind.DATA, 0, 0, len(other), digest(other)).pack())
        refusal = frames.receive_refusal(sock, frames.receive_header(sock))
    assert (type(refusal), str(refusal)) == (Conflict, "chunk 0 of version 1 of policy is present")
    with pytest.raises(Conflict, match="present with another digest"):
        host.snapshot.present(0, digest(other))
    assert bytes(host.snapshot.files[0].view()) == expected


def test_a_chunk_that_arrives_broken_is_refused(make_host: MakeHost) -> None:
    host = make_host()
    with frames.connect(host.source.address, 5.0) as sock:
        frames.send_greeting(sock, Greeting("write", "policy", 1, "t", token="token"))
        frames.receive_welcome(sock, silence_s=5.0)
        frames.send_all(sock, Header(Kind.DATA, 0, 0, CHUNK, bytes(16)).pack() + bytes(CHUNK))
        header = frames.receive_header(sock)
        with pytest.raises(Corrupt, match="chunk 0 of version 1 of policy arrived with a wrong digest"):
            raise frames.receive_refusal(sock, header)
    assert host.snapshot.missing()[0] == 0


def test_a_tensor_that_gives_too_few_bytes_is_named() -> None:
    specs = [TensorSpec("w", "F32", (10,))]
    (file,) = plan_layout(specs)
    image = Image([file.size_bytes], {0: file}, {"w": lambda: memoryview(b"short")}, CHUNK)
    with pytest.raises(InvalidRequest, match="'w' gave 5 bytes, its shape and dtype make 40"):
        image.fill(image.chunks.chunk(0), memoryview(bytearray(CHUNK)))


def test_kept_mappings_are_reused_and_dropped_when_the_file_is_destroyed(tmp_path: Path) -> None:
    mappings = Mappings()
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    first = mappings.map(os.open(path, os.O_RDWR))
    first.view[0:1] = b"x"
    assert bytes(mappings.map(os.open(path, os.O_RDWR)).view) == b"x234"
    assert mappings.num_kept == 1
    path.unlink()
    other = tmp_path / "other"
    other.write_bytes(b"5678")
    assert bytes(mappings.map(os.open(other, os.O_RDWR)).view) == b"5678"
    assert mappings.num_kept == 1
    mappings.close()


def test_a_dropped_mapping_stays_for_its_writer_and_goes_with_it_though_a_view_is_kept(tmp_path: Path) -> None:
    """A view that somebody keeps, in the frames of an error say, holds none of the relay's memory."""
    mappings, path = Mappings(), tmp_path / "file"
    path.write_bytes(b"1234")
    first, empty, again = mappings.map_all([os.open(path, os.O_RDWR) for _ in range(3)], [4, 0, 4])
    assert first is not None
    assert first is again
    assert empty is None
    kept = first.view[1:3]
    mappings.close()
    leave([first])
    kept[0:1] = b"x"
    assert path.read_bytes() == b"1x34", "the other writer's bytes still arrive"
    leave([again])
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert bytes(kept) == bytes(2)


def test_descriptors_are_closed_when_a_file_cannot_be_mapped(tmp_path: Path) -> None:
    mappings, path = Mappings(), tmp_path / "file"
    path.write_bytes(b"1234")
    before = len(os.listdir("/proc/self/fd"))
    other = tmp_path / "other"
    other.write_bytes(b"5678")
    fds = [os.open(path, os.O_RDWR), os.open(other, os.O_RDONLY), os.open(path, os.O_RDWR)]  # one is not writable
    with pytest.raises(PermissionError):
        mappings.map_all(fds, [4, 4, 4])
    mappings.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_ranges() -> None:
    assert frames.ranges([]) == []
    assert frames.ranges([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
    assert ChunkMap([0, 0], 4).num_chunks == 0


# ---- what strangers say


@pytest.mark.parametrize("name", ["../outside/authorized_keys", "/etc/passwd"])
def test_a_relay_that_lies_about_file_names_gets_nothing_written(tmp_path: Path, name: str) -> None:
    """As `paramserver pull` meets it: the manifest is refused before there is a path."""
    found = msgspec.json.encode(frames.Welcome(manifest(5000), [])).replace(b'"f0"', msgspec.json.encode(name))

    def lie() -> None:
        sock, _ = listener.accept()
        with sock:
            frames.receive_greeting(sock)
            frames.send_all(sock, Header(Kind.WELCOME, length=len(found)).pack() + found)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        liar = threading.Thread(target=lie)
        liar.start()
        source = Source("liar", f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(LaminarError, match="cannot name a file of a version"):
            pull._query_manifest(source, Greeting("fetch", "policy", 1, "pull:1"))
        liar.join(30.0)


def test_a_relay_that_answers_with_another_version_is_not_believed(make_host: MakeHost) -> None:
    host = make_host()
    host.find = lambda model, version, timeout_s: host.snapshot  # type: ignore[method-assign]
    with pytest.raises(Corrupt, match="answers a request for version 7 of policy with version 1 of policy"):
        pull._query_manifest(host.source, Greeting("fetch", "policy", 7, "pull:1"))


@pytest.mark.parametrize("change", [b'"name":"forged\\nERROR all is lost"', b'"name":"' + b"n" * 30_000 + b'"'])
def test_a_greeting_that_would_forge_or_fill_the_log_is_not_taken_in(
    make_host: MakeHost, caplog: pytest.LogCaptureFixture, change: bytes
) -> None:
    host = make_host()
    body = msgspec.json.encode(Greeting("fetch", "policy", 1, "t")).replace(b'"name":"t"', change)
    with frames.connect(host.source.address, 5.0) as sock:
        frames.send_all(sock, frames._OPENING.pack(frames.MAGIC, len(body)) + body)
        sock.settimeout(30.0)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 16):
                pass
    assert all("\n" not in line.getMessage() and len(line.getMessage()) < 1000 for line in caplog.records)


def test_slow_strangers_keep_nobody_out(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says a byte now and then, and never what it wants."""
    monkeypatch.setattr(data_server, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(data_server, "CONNECTIONS_PER_HOST_MAX", 6)
    host = make_host()
    host.fill()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(frames.connect(host.source.address, 5.0)) for _ in range(40)]
        for sock in strangers:
            with contextlib.suppress(LinkBroken):  # ended already
                frames.send_all(sock, b"L")
        link = tcp.TcpLink(host.source, FETCH, silence_s=30.0)
        assert link.manifest == host.snapshot.manifest
        link.close()


def test_who_was_welcomed_stays_and_one_host_does_not_take_every_place() -> None:
    admission = data_server.Admission(4, 3)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect(host: str) -> socket.socket:
            stack.enter_context(socket.create_connection(listener.getsockname(), 30.0, (host, 0)))
            return stack.enter_context(listener.accept()[0])

        for sock in [connect("127.0.0.2") for _ in range(3)]:
            admission.admit(sock)
            admission.welcome(sock)
        with pytest.raises(OutOfCapacity, match="more than 3 data connections from one host"):
            admission.admit(connect("127.0.0.2"))
        stranger = connect("127.0.0.3")
        admission.admit(stranger)
        last = connect("127.0.0.3")
        admission.admit(last)
        assert stranger not in admission.connected()
        assert stranger.recv(1) == b"", "it was ended"
        admission.welcome(last)
        with pytest.raises(OutOfCapacity, match="more than 4 data connections"):
            admission.admit(connect("127.0.0.4"))
        admission.left(last)
        admission.admit(connect("127.0.0.4"))


def test_a_greeting_that_trickles_is_given_up(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "GREETING_S", 0.3)
    host = make_host()
    with frames.connect(host.source.address, 30.0) as sock, pytest.raises(LinkBroken):
        trickle(sock)


def trickle(sock: socket.socket) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        frames.send_all(sock, b"L")
        time.sleep(0.05)


# ---- sockets


def _congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_a_connection_is_tuned_before_it_is_made_and_what_a_listener_accepts_is_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel goes on pacing a connection that began under bbr, whatever it is given later."""
    begun: list[tuple[bytes, int]] = []

    class Watched(socket.socket):
        def connect(self, address: object) -> None:
            begun.append((_congestion_control(self), self.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            super().connect(address)  # type: ignore[arg-type]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        frames.tune(listener)
        wanted = (_congestion_control(listener), 1)
        monkeypatch.setattr(socket, "socket", Watched)
        with frames.connect(f"127.0.0.1:{listener.getsockname()[1]}", 5.0, bind_host="127.0.0.1"):
            monkeypatch.undo()
            accepted, _ = listener.accept()
            with accepted:
                nodelay = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert (_congestion_control(accepted), nodelay) == wanted
    assert begun == [wanted]


def test_nobody_at_an_address_is_a_broken_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkBroken, match=r"cannot connect to 127\.0\.0\.1"):
        frames.connect(f"127.0.0.1:{port}", 5.0)


@pytest.fixture
def file_of_a_mib() -> Iterator[int]:
    fd = os.memfd_create("file")
    os.write(fd, os.urandom(1 << 20))
    yield fd
    os.close(fd)


def test_a_range_of_a_file_is_sent_to_a_slow_reader_whole(file_of_a_mib: int) -> None:
    ours, theirs = _pair()
    got = bytearray()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        ours.settimeout(5.0)
        sent = pool.submit(frames.send_file, ours, file_of_a_mib, 1000, (1 << 20) - 1000)
        while len(got) < (1 << 20) - 1000:
            got += theirs.recv(10_000)
        sent.result()
    assert bytes(got) == os.pread(file_of_a_mib, 1 << 20, 1000)


def test_a_file_that_ends_too_soon_or_a_reader_that_takes_nothing_breaks_the_link(file_of_a_mib: int) -> None:
    ours, theirs = _pair()
    with ours, theirs:
        ours.settimeout(0.1)
        with pytest.raises(LinkBroken, match="ends at byte 1048576"):
            frames.send_file(ours, file_of_a_mib, (1 << 20) - 10, 11)
        with pytest.raises(LinkBroken, match="timed out"):
            _send_for_ever(ours, file_of_a_mib)


def _send_for_ever(sock: socket.socket, fd: int) -> None:
    while True:
        frames.send_file(sock, fd, 0, 1 << 20)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection whose receiver takes little at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        ours = frames.connect(f"127.0.0.1:{listener.getsockname()[1]}", 5.0)
        return ours, listener.accept()[0]


MANY = 1500
"""A descriptor's number beyond what `select.select` takes."""


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    """Whatever is opened in a test gets a number beyond MANY, as the lower ones are taken."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < MANY + 200:
        pytest.skip(needs(f"no {MANY + 200} open files are allowed here", "`ulimit -n 4096`"))
    with open(os.devnull, "rb") as taken:
        taken_fds = [taken.fileno()]
        try:
            while taken_fds[-1] < MANY:
                taken_fds.append(os.dup(taken.fileno()))
            yield
        finally:
            for fd in taken_fds[1:]:
                os.close(fd)


@pytest.mark.usefixtures("_many_descriptors")
def test_a_refusal_is_read_from_a_descriptor_of_any_number(make_host: MakeHost) -> None:
    host = make_host()
    with tcp_link(host.source) as link:
        assert link.fileno() > MANY
        link.raise_refusal(0.01)
        host.server.close()
        with pytest.raises(LaminarError):
            link.raise_refusal(60.0)


@pytest.mark.usefixtures("_many_descriptors")
def test_a_lender_over_nixl_hears_its_peer_at_a_descriptor_of_any_number(make_host: MakeHost) -> None:
    """Its NIXL process is a silent socket here: nothing is lent."""
    near, far = socket.socketpair()
    process, other = socket.socketpair()
    with near, far, process, other:
        lender = NixlLender(near, make_host().snapshot, None, process, None, None)  # type: ignore[arg-type]
        assert min(near.fileno(), process.fileno()) > MANY
        far.sendall(frames.REQUEST.pack(Kind.TAKEN, 0, 7, 0))
        with pytest.raises(LinkBroken, match="chunk 7 was not lent"):
            lender._next()


@pytest.mark.usefixtures("_many_descriptors")
def test_a_link_over_nixl_hears_its_holder_at_a_descriptor_of_any_number(make_host: MakeHost) -> None:
    host = make_host()
    process, other = socket.socketpair()
    with tcp_link(host.source) as hop, process, other:
        hop.welcome = msgspec.structs.replace(hop.welcome, nixl=frames.Lent(b"", [0]))
        link = NixlLink(hop, None, process, lambda _: None)  # type: ignore[arg-type]
        assert min(hop.fileno(), process.fileno()) > MANY
        link._wait(host.snapshot.place)
        host.server.close()
        with pytest.raises(LinkBroken):
            link._wait(host.snapshot.place)


def test_bytes_that_never_pause_are_not_waited_for_longer_than_they_may_take() -> None:
    """Each of the pieces is there when it is asked for."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        for _ in range(8):
            far.send(b"x")
        with pytest.raises(LinkBroken, match="timed out after 1 of 8 bytes"):
            frames.receive_bytes(near, 8, time.monotonic())
        assert frames.receive_bytes(near, 7, time.monotonic() + 60.0) == b"x" * 7


def test_what_can_be_received_from_is_told_within_the_time() -> None:
    near, far = socket.socketpair()
    quiet, other = socket.socketpair()
    with near, quiet, other:
        assert frames.readable([near, quiet], 0.01) == []
        far.sendall(b"x")
        assert frames.readable([near, quiet], None) == [near]
        near.recv(1)
        far.close()
        assert frames.readable([quiet, near], None) == [near], "an end is to be received, too"


@pytest.mark.slow
def test_bytes_that_trickle_are_signs_of_life(make_host: MakeHost) -> None:
    """A chunk comes in more time than a silence may last, with no pause in it that is as long."""
    target = make_host()
    content = CONTENT[:CHUNK]
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        served = pool.submit(_trickle, listener, target.snapshot.manifest, content)
        link = tcp.TcpLink(Source("slow", f"127.0.0.1:{listener.getsockname()[1]}"), FETCH, silence_s=1.0)
        with contextlib.closing(link):
            link.request(Want(0, 0))
            arrived = link.receive(target.snapshot.place, lambda *_: None)
        served.result()
    assert arrived.found == arrived.digest == digest(bytes(target.snapshot.place(0)))


def _trickle(listener: socket.socket, of: Manifest, content: bytes) -> None:
    """Serves the first chunk in eight pieces, 0.2 s apart."""
    with listener.accept()[0] as sock:
        frames.receive_greeting(sock)
        frames.send_message(sock, Kind.WELCOME, frames.Welcome(of, []))
        frames.receive_bytes(sock, frames.REQUEST.size)
        frames.send_all(sock, Header(Kind.DATA, 0, 0, len(content), digest(content)).pack())
        for at in range(0, len(content), len(content) // 8):
            frames.send_all(sock, content[at : at + len(content) // 8])
            time.sleep(0.2)


@pytest.mark.parametrize("copied", [False, True])
def test_a_paced_connection_is_sent_copies_of_the_same_bytes(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """Whether a host leaves us bbr is not for a test to choose."""
    upstream, downstream = make_host(), make_host()
    upstream.fill()
    monkeypatch.setattr(frames, "is_paced", lambda _: copied)
    sent: list[int] = []
    send_file = frames.send_file
    monkeypatch.setattr(frames, "send_file", lambda *args: (sent.append(args[-1]), send_file(*args)))
    assert fetch(downstream, upstream).run()
    assert downstream.snapshot.root() == upstream.snapshot.root()
    assert bool(sent) is not copied
