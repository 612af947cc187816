"""Who gets through to a data port with credentials, what is tried against it, and the peers that these find."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from paramserver.core.handshake import NONCE_BYTES, Opening, key_id
from paramserver.core.layout import TensorSpec, plan_layout
from paramserver.core.transfer import Want
from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from paramserver.data import frames, secured, tcp
from paramserver.data.fetch import Fetch
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken
from paramserver.data.publish import Image, write_tcp
from paramserver.data.secured import MAGIC, Challenge, DataAccess, Hello
from paramserver.data.transport import Begun, Source
from protos.access.credentials import Credentials
from protos.access.fleet import Identity
from protos.errors import Conflict, Forbidden, LaminarError, NotFound, OutOfCapacity, Unauthenticated
from tests.support.fleet_credentials import authority_of, write_holder
from tests.support.hops import CHUNK, CONTENT, FETCH, Host
from tests.support.middleman import Middleman
from tests.support.secured_relay import client_context
from tests.support.tls_endings import ending

MakeHost = Callable[..., Host]
WAYS = pytest.mark.parametrize("tls", [False, True], ids=["sealed", "tls"])
WRITE = Greeting("write", "policy", 1, "t", token="token")


@pytest.fixture
def make_host(fleet: Path) -> Iterator[MakeHost]:
    """Holders of the whole content, with a relay's credentials."""
    directory = Path(tempfile.mkdtemp(prefix="laminar-data-", dir="/dev/shm"))
    hosts: list[Host] = []

    def make(holder: Path | None = None, *, tls: bool = False, filled: bool = True, size: int = len(CONTENT)) -> Host:
        access = DataAccess(Credentials(holder or fleet / "relay"), tls=tls)
        hosts.append(Host(directory / f"host{len(hosts)}", size, access=access))
        if filled:
            hosts[-1].fill()
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
    shutil.rmtree(directory)


def by(holder: Path, *, tls: bool = False) -> DataAccess:
    return DataAccess(Credentials(holder), tls=tls)


def link(host: Host, access: DataAccess | None, greeting: Greeting = FETCH) -> tcp.TcpLink:
    return tcp.TcpLink(host.source, greeting, silence_s=60.0, access=access)


def refused(host: Host, access: DataAccess | None, greeting: Greeting = FETCH) -> LaminarError:
    with pytest.raises(LaminarError) as found:
        link(host, access, greeting).close()
    return found.value


# -- those who may


@WAYS
@pytest.mark.parametrize("role", ["relay", "trainer", "engine-host", "admin"])
def test_who_has_the_fleet_key_fetches(fleet: Path, make_host: MakeHost, tls: bool, role: str) -> None:
    holder, into = make_host(tls=tls), make_host(filled=False)
    dial = tcp.dialer(60.0, access=by(fleet / role, tls=tls))
    assert Fetch(into.snapshot, FETCH, lambda: [[holder.source]], dial, patience_s=60.0).run()
    assert into.content() == CONTENT


@WAYS
def test_a_publisher_elsewhere_writes(fleet: Path, make_host: MakeHost, tls: bool) -> None:
    (file,) = plan_layout([TensorSpec("w", "U8", (50_000,))])
    content = bytes(range(250)) * 200
    host = make_host(tls=tls, filled=False, size=file.size_bytes)
    image = Image([file.size_bytes], {0: file}, {"w": lambda: memoryview(content)}, CHUNK)
    write_tcp(host.source.address, WRITE, image, access=by(fleet / "trainer"))
    assert bytes(host.snapshot.files[0].view()).endswith(content)
    with pytest.raises(Conflict, match="a wrong token"):
        write_tcp(host.source.address, msgspec.structs.replace(WRITE, token="x"), image, access=by(fleet / "trainer"))


def test_a_requester_goes_over_to_tls_where_the_holder_wants_it(fleet: Path, make_host: MakeHost) -> None:
    host = make_host(tls=True)
    with contextlib.closing(link(host, by(fleet / "trainer"))) as found:
        assert isinstance(found._sock, secured.TlsSocket)


def test_a_holder_that_does_not_want_tls_takes_it(fleet: Path, make_host: MakeHost) -> None:
    with contextlib.closing(link(make_host(), by(fleet / "trainer", tls=True))) as found:
        assert isinstance(found._sock, secured.TlsSocket)


def test_both_ends_may_be_at_different_steps_of_a_rotation(fleet: Path, own_fleet: Path, make_host: MakeHost) -> None:
    relays = [Path(shutil.copytree(own_fleet / "relay", own_fleet.parent / "step0"))]
    for step in range(1, 4):
        Fleet(own_fleet).rotate(30)
        relays.append(Path(shutil.copytree(own_fleet / "relay", own_fleet.parent / f"step{step}")))
    for tls in (False, True):
        for first, second in itertools.pairwise(relays):
            for one, other in ((first, second), (second, first)):
                link(make_host(one), by(other, tls=tls)).close()
        error = refused(make_host(relays[3], tls=tls), by(relays[0], tls=tls))
        assert isinstance(error, LinkBroken), error
    files = Credentials(own_fleet / "relay")
    assert files.material.fleet_keys == Credentials(relays[3]).material.fleet_keys


# -- those who may not


@WAYS
def test_without_credentials_nothing_is_said(make_host: MakeHost, tls: bool) -> None:
    error = refused(make_host(tls=tls), None)
    assert isinstance(error, Unauthenticated)
    assert "asks for credentials" in str(error)


def test_another_fleets_key_is_refused(make_host: MakeHost, tmp_path: Path) -> None:
    Fleet.init(tmp_path / "other", (), 30)
    error = refused(make_host(), by(tmp_path / "other" / "admin"))
    assert isinstance(error, LinkBroken), "whoever has proven nothing ends one connection, and no fetch"
    assert "no fleet key in common" in str(error)


def test_a_guess_at_the_key_is_refused(fleet: Path, make_host: MakeHost) -> None:
    """One that names the right id, and knows no more."""
    host = make_host()
    key = Credentials(fleet / "relay").material.fleet_keys[0]
    with begun(host, Hello(bytes(NONCE_BYTES), [key_id(key)])) as (sock, challenge):
        body = msgspec.json.encode(msgspec.structs.replace(FETCH, to=host.source.address))
        guess = Opening("mac", bytes(NONCE_BYTES), challenge.nonce).requester_proof(b"guess", body)
        frames.send_all(sock, len(body).to_bytes(4, "big") + body + guess)
        assert answer(sock) == "does not prove that it knows the fleet key"


FORGED = [
    Conflict("the run is over"),
    Forbidden("not you"),
    NotFound("no such model"),
    OutOfCapacity("too many"),
    Unauthenticated("who?"),
]


@pytest.mark.parametrize("forged", FORGED, ids=lambda error: error.code)
def test_a_refusal_by_whoever_has_proven_nothing_ends_one_connection_alone(
    fleet: Path, make_host: MakeHost, forged: LaminarError
) -> None:
    """Anybody in between can send it: a write goes on over the next connection."""
    (file,) = plan_layout([TensorSpec("w", "U8", (50_000,))])
    content = bytes(range(250)) * 200
    host = make_host(filled=False, size=file.size_bytes)
    image = Image([file.size_bytes], {0: file}, {"w": lambda: memoryview(content)}, CHUNK)
    body = msgspec.json.encode(frames.Refusal.of(forged))
    with Tap(host.source.address, forges=Header(Kind.REFUSED, length=len(body)).pack() + body) as tap:
        error = refused_at(tap.address, by(fleet / "trainer"))
        assert isinstance(error, LinkBroken)
        assert f"has not proven that it knows the fleet key, refuses: {forged.message}" in str(error)
        tap.forge_again()
        host.server._address = tap.address
        write_tcp(tap.address, WRITE, image, access=by(fleet / "trainer"))
    assert bytes(host.snapshot.files[0].view()).endswith(content)


@WAYS
def test_a_holder_that_is_full_is_asked_again_soon_and_has_not_failed(
    fleet: Path, make_host: MakeHost, tls: bool
) -> None:
    """It says so before it listens, and so before it has proven anything."""
    holder, into = make_host(tls=tls), make_host(filled=False)
    admission = holder.server._by_tcp
    per_host_max, admission._per_host_max = admission._per_host_max, 0
    dial = tcp.dialer(60.0, access=by(fleet / "relay"))
    refused_so: list[LaminarError] = []

    def dial_and_tell(source: Source, greeting: Greeting, begun: Begun) -> tcp.TcpLink:
        try:
            return dial(source, greeting, begun)
        except LaminarError as error:
            refused_so.append(error)
            admission._per_host_max = per_host_max
            raise

    running = Fetch(into.snapshot, FETCH, lambda: [[holder.source]], dial_and_tell, num_stripes=1, patience_s=60.0)
    assert running.run()
    assert into.content() == CONTENT
    [error] = refused_so
    assert isinstance(error, OutOfCapacity)
    assert isinstance(error, LinkBroken), "a write goes on over the next connection"
    assert running.num_bypasses == 0


def test_what_has_proven_nothing_takes_neither_memory_nor_time(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "GREETING_S", 0.5)
    announced = Header(Kind.REFUSED, length=frames.JSON_BYTES_MAX).pack()
    with Tap("127.0.0.1:0", forges=announced) as tap:
        assert "a message of 64 MiB announced" in str(refused_at(tap.address, by(fleet / "trainer")))
    with Tap("127.0.0.1:0", forges=announced, pause_s=0.1) as tap:
        began = time.monotonic()
        assert isinstance(refused_at(tap.address, by(fleet / "trainer")), LinkBroken)
        assert time.monotonic() - began < len(announced) * 0.1, "as a whole, and not from byte to byte"


def test_a_requester_tells_nobody_what_it_wants_who_does_not_prove_the_key(fleet: Path) -> None:
    """Who stands at the holder's address, and answers with a proof that it made up, or that it was sent."""
    requester = by(fleet / "trainer")
    for made_up in (bytes(32), None):
        with impostor(made_up) as (address, heard), pytest.raises(LinkBroken, match="does not prove"):
            requester.open(address, 60.0, FETCH)
        assert b"policy" not in b"".join(heard)


@WAYS
def test_a_recorded_connection_is_worth_nothing(fleet: Path, make_host: MakeHost, tls: bool) -> None:
    host = make_host(tls=tls)
    with Tap(host.source.address) as tap:
        assert isinstance(refused_at(tap.address, by(fleet / "relay", tls=tls)), Conflict), "it means the tap's address"
        requests = tap.heard()
    with frames.connect(host.source.address, 60.0) as sock:
        with contextlib.suppress(LinkBroken):
            frames.send_all(sock, requests)
        came = received(sock)
    assert b"does not prove" in came or tls
    assert b"manifest" not in came


def test_a_challenge_is_another_one_each_time(fleet: Path, make_host: MakeHost) -> None:
    host, hello = make_host(), Hello(bytes(NONCE_BYTES), [key_id(Credentials(fleet / "relay").material.fleet_keys[0])])
    challenges = []
    for _ in range(3):
        with begun(host, hello) as (_, challenge):
            challenges.append(challenge)
    assert len({one.nonce for one in challenges}) == len({one.proof for one in challenges}) == 3


def test_a_holders_own_proof_is_no_proof_to_it(fleet: Path, make_host: MakeHost) -> None:
    """Reflection: a stranger opens two connections, and has the holder answer on one what it asked on the other."""
    host, ids = make_host(), [key_id(Credentials(fleet / "relay").material.fleet_keys[0])]
    with begun(host, Hello(bytes(NONCE_BYTES), ids)) as (sock, challenge):
        with begun(host, Hello(challenge.nonce, ids)) as (_, reflected):
            pass
        body = msgspec.json.encode(msgspec.structs.replace(FETCH, to=host.source.address))
        frames.send_all(sock, len(body).to_bytes(4, "big") + body + reflected.proof)
        assert answer(sock) == "does not prove that it knows the fleet key"


@pytest.mark.parametrize(
    ("was", "becomes"), [(b'"policy"', b'"critic"'), (b'"version":1', b'"version":2'), (b'"fetch"', b'"write"')]
)
def test_a_greeting_that_was_changed_on_its_way_is_refused(
    fleet: Path, make_host: MakeHost, was: bytes, becomes: bytes
) -> None:
    host = make_host()
    key = Credentials(fleet / "relay").material.fleet_keys[0]
    with begun(host, Hello(bytes(NONCE_BYTES), [key_id(key)])) as (sock, challenge):
        body = msgspec.json.encode(msgspec.structs.replace(FETCH, to=host.source.address))
        proof = Opening("mac", bytes(NONCE_BYTES), challenge.nonce).requester_proof(key, body)
        changed = body.replace(was, becomes)
        assert changed != body
        frames.send_all(sock, len(changed).to_bytes(4, "big") + changed + proof)
        assert answer(sock) == "does not prove that it knows the fleet key"


@WAYS
def test_a_connection_that_is_passed_on_to_another_relay_is_refused(
    fleet: Path, make_host: MakeHost, tls: bool
) -> None:
    """The one in between changes nothing: each end is who it says, and means another."""
    host = make_host(tls=tls)
    with Tap(host.source.address) as tap:
        error = refused_at(tap.address, by(fleet / "relay", tls=tls))
    assert isinstance(error, Conflict)
    assert f"a greeting for the relay at '{tap.address}' came to {host.source.address}" in str(error)


@pytest.mark.parametrize("at", [0, 60, 300, 700, 2000])
def test_a_byte_that_is_changed_on_its_way_costs_the_connection(
    fleet: Path, make_host: MakeHost, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not XXH3 alone guards it, for which whoever changes bytes computes another."""
    host = make_host()
    with Middleman(host.source.address) as between:
        between.flip(at)
        host.server._address = between.address  # as if it were reached by it
        source = Source("held", between.address)

        def read() -> bytes:
            found = tcp.TcpLink(source, FETCH, silence_s=60.0, access=by(fleet / "relay"))
            with contextlib.closing(found):
                return read_all(found, host)

        with pytest.raises(LaminarError):
            read()
        assert between.flipped.is_set()
        assert read() == CONTENT


@WAYS
def test_nothing_of_a_version_is_to_be_read_on_its_way(fleet: Path, make_host: MakeHost, tls: bool) -> None:
    host = make_host(tls=tls)
    with Tap(host.source.address) as tap:
        host.server._address = tap.address
        found = tcp.TcpLink(Source("h", tap.address), FETCH, silence_s=60.0, access=by(fleet / "relay", tls=tls))
        with contextlib.closing(found):
            assert read_all(found, host) == CONTENT
        passed = tap.heard("answers")
    assert len(passed) > len(CONTENT)
    assert CONTENT[:64] not in passed
    assert b"manifest" not in passed


# -- TLS


def test_tls_takes_certificates_of_the_fleet_with_the_right_role_alone(
    fleet: Path, make_host: MakeHost, tmp_path: Path
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    host = make_host(tls=True)
    strangers = {
        "no certificate": None,
        "foreign": write_holder(tmp_path / "foreign", Authority.new(now), Identity("admin", "a"), trusts=fleet),
        "expired": write_holder(
            tmp_path / "expired", authority_of(fleet), Identity("admin", "a"), trusts=fleet, days_ago=31
        ),
    }
    for what, holder in strangers.items():
        met = over_tls(host, client_context(fleet, holder))
        assert met not in ("challenged", "served"), (what, met)
    reader = write_holder(tmp_path / "reader", authority_of(fleet), Identity("reader", "r"), trusts=fleet)
    error = refused(host, by(reader, tls=True))  # with the fleet key, which readers are not given
    assert isinstance(error, Forbidden)
    error = refused(host, by(fleet / "relay", tls=True), WRITE)
    assert isinstance(error, Forbidden)
    assert "write a version" in str(error)


@pytest.mark.parametrize("most", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])
def test_older_tls_is_refused(fleet: Path, make_host: MakeHost, most: ssl.TLSVersion) -> None:
    met = over_tls(make_host(), client_context(fleet, fleet / "admin", most=most))
    assert met == "TLSV1_ALERT_PROTOCOL_VERSION"


def test_a_requester_takes_no_holder_but_a_relay_of_its_fleet(fleet: Path, make_host: MakeHost, tmp_path: Path) -> None:
    relay, issuer = Identity("relay", "relay"), authority_of(fleet)
    elsewhere = write_holder(tmp_path / "elsewhere", issuer, relay, trusts=fleet, hosts=("elsewhere",))
    trainer = write_holder(tmp_path / "trainer", issuer, Identity("trainer", "t"), trusts=fleet)
    Fleet.init(tmp_path / "other", (), 30)
    for directory in (elsewhere, trainer, tmp_path / "other" / "relay"):
        with pytest.raises(LinkBroken, match="no TLS with"):
            link(make_host(directory, tls=True), by(fleet / "admin", tls=True)).close()


# -- slow, long, and wrong


@pytest.mark.parametrize(
    "opening",
    [
        b"LMN1" + (10).to_bytes(4, "big") + bytes(10),
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + (2 << 30).to_bytes(4, "big"),
        MAGIC + (1025).to_bytes(4, "big") + bytes(1025),
        MAGIC + (4).to_bytes(4, "big") + b"null",
        MAGIC + (2).to_bytes(4, "big") + b"{}",
        MAGIC + (12).to_bytes(4, "big") + b'{"nonce":""}',
        b"\x16\x03\x01" + bytes(600),
        b"\x16\x03\x01\x40\x00" + bytes(20_000),
        bytes(4096),
    ],
)
def test_what_is_no_opening_ends_the_connection(make_host: MakeHost, opening: bytes) -> None:
    host = make_host()
    with frames.connect(host.source.address, 60.0) as sock:
        with contextlib.suppress(LinkBroken):
            frames.send_all(sock, opening)
        assert b"manifest" not in received(sock)


def test_a_greeting_that_is_too_long_is_not_taken_in(fleet: Path, make_host: MakeHost) -> None:
    key = Credentials(fleet / "relay").material.fleet_keys[0]
    with begun(make_host(), Hello(bytes(NONCE_BYTES), [key_id(key)])) as (sock, _):
        with contextlib.suppress(LinkBroken):
            frames.send_all(sock, (1 << 30).to_bytes(4, "big") + bytes(frames.GREETING_BYTES_MAX))
        assert received(sock) == b""


@pytest.mark.parametrize("prefix", [b"", b"L", MAGIC, b"\x16", b"\x16\x03\x01"])
def test_whoever_opens_slowly_loses_the_connection(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, prefix: bytes
) -> None:
    monkeypatch.setattr(frames, "GREETING_S", 0.3)
    host = make_host()
    with frames.connect(host.source.address, 60.0) as sock:
        frames.send_all(sock, prefix)
        began = time.monotonic()
        received(sock)
        assert time.monotonic() - began < 50.0
    threads = [thread for thread in threading.enumerate() if thread.name == "data-connection"]
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_holder_that_answers_slowly_loses_the_requester(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, each in time: other holders would wait behind it."""
    monkeypatch.setattr(frames, "GREETING_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = threading.Event()

        def trickle() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                for byte in frames.Header(Kind.CHALLENGE, length=1000).pack() + bytes(1000):
                    sock.sendall(bytes([byte]))
                    left.wait(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(LinkBroken, match="timed out"):
            by(fleet / "relay").open(f"127.0.0.1:{listener.getsockname()[1]}", 60.0, FETCH)
        assert not left.is_set()
        left.set()
        thread.join(60.0)


def test_a_welcome_that_trickles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "WELCOME_S", 0.3)
    near, far = socket.socketpair()
    left = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in frames.Header(Kind.WELCOME, length=1000).pack() + bytes(1000):
                far.sendall(bytes([byte]))
                left.wait(0.05)

    thread = threading.Thread(target=trickle)
    thread.start()
    with near, far:
        with pytest.raises(LinkBroken, match="timed out"):
            frames.receive_welcome(near, silence_s=60.0)
        left.set()
        near.close()
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_source_whose_records_trickle_is_bypassed(
    fleet: Path, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is in between lets a byte through in less time than a silence may last."""
    monkeypatch.setattr(tcp, "RECORD_S", 0.3)
    slow, good, into = make_host(), make_host(), make_host(filled=False)
    with Tap(slow.source.address, answers_pause_s=0.02) as tap:
        slow.server._address = tap.address
        tiers = [[Source("slow", tap.address)], [good.source]]
        dial = tcp.dialer(0.5, access=by(fleet / "relay"))
        running = Fetch(into.snapshot, FETCH, lambda: tiers, dial, num_stripes=1, patience_s=60.0)
        assert running.run()
    assert into.content() == CONTENT
    assert running.num_bypasses >= 1


# -- peers by hand


@contextlib.contextmanager
def begun(host: Host, hello: Hello) -> Iterator[tuple[socket.socket, Challenge]]:
    """A connection that has said hello, and the challenge that it got."""
    with frames.connect(host.source.address, 60.0) as sock:
        body = msgspec.json.encode(hello)
        frames.send_all(sock, MAGIC + len(body).to_bytes(4, "big") + body)
        header = frames.receive_header(sock)
        assert header.kind is Kind.CHALLENGE
        yield sock, frames.receive_json(sock, header.length, Challenge)


def answer(sock: socket.socket) -> str:
    """The end of what the holder refused with."""
    header = frames.receive_header(sock)
    assert header.kind is Kind.REFUSED
    return frames.receive_refusal(sock, header).message.removeprefix("the peer ")


def received(sock: socket.socket) -> bytes:
    """All that comes until the end."""
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            came += data
    return came


def refused_at(address: str, access: DataAccess) -> LaminarError:
    with pytest.raises(LaminarError) as found:
        tcp.TcpLink(Source("h", address), FETCH, silence_s=60.0, access=access).close()
    return found.value


def read_all(found: tcp.TcpLink, host: Host) -> bytes:
    chunks = host.snapshot.chunks
    places = [bytearray(chunks.chunk(index).length) for index in range(chunks.num_chunks)]
    for index in range(chunks.num_chunks):
        found.request(Want(index, 0))
        found.receive(lambda index: memoryview(places[index]), lambda *_: None)
    return b"".join(places)


def over_tls(host: Host, context: ssl.SSLContext) -> str:
    """What a TLS client met that then says hello: "challenged", or how it ended."""
    name, _, port = host.source.address.rpartition(":")
    context.set_alpn_protocols([])
    try:
        with (
            socket.create_connection((name, int(port)), 60.0) as sock,
            context.wrap_socket(sock, server_hostname=name) as tls,
        ):
            body = msgspec.json.encode(Hello(bytes(NONCE_BYTES), []))
            tls.sendall(MAGIC + len(body).to_bytes(4, "big") + body)
            return "challenged" if tls.recv(1) else "closed"
    except (ssl.SSLError, ConnectionError) as error:
        return ending(error)


@contextlib.contextmanager
def impostor(proof: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """Stands at a holder's address: answers a hello with that proof, or with what it was sent, and hears the rest."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(60.0)
            frames.receive_bytes(sock, 4)
            hello = msgspec.json.decode(
                frames.receive_bytes(sock, int.from_bytes(frames.receive_bytes(sock, 4), "big")), type=Hello
            )
            challenge = Challenge(hello.nonce, hello.keys[0], proof if proof is not None else hello.nonce)
            frames.send_message(sock, Kind.CHALLENGE, challenge)
            heard.append(received(sock))

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join(60.0)


class Tap:
    """Passes connections on to `target` unchanged, and keeps what went by. The first one gets what it `forges` instead,
    a byte at a time where there is a pause. `answers_pause_s`: what is answered goes so, too, once the first chunk
    came."""

    def __init__(self, target: str, *, forges: bytes = b"", pause_s: float = 0.0, answers_pause_s: float = 0.0) -> None:
        self._target = target
        self._forges = self._forged = forges
        self._pause_s, self._answers_pause_s = pause_s, answers_pause_s
        self._left = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._passed = {"requests": b"", "answers": b""}
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []

    def __enter__(self) -> Tap:
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._answers_pause_s:
            self._left.set()
            for sock in self._socks:
                with contextlib.suppress(OSError):  # one end has gone
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive()
        for sock in self._socks:
            sock.close()

    def heard(self, side: str = "requests") -> bytes:
        for thread in self._threads[1:]:
            thread.join(60.0)
        return self._passed[side]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asker, _ = self._listener.accept()
                if self._forged:
                    with asker:
                        self._forge(asker)
                    continue
                holder = frames.connect(self._target, 60.0)
                self._socks += [asker, holder]
                for source, target, side in ((asker, holder, "requests"), (holder, asker, "answers")):
                    thread = threading.Thread(target=self._pump, args=(source, target, side))
                    self._threads.append(thread)
                    thread.start()

    def forge_again(self) -> None:
        self._forged = self._forges

    def _forge(self, asker: socket.socket) -> None:
        forged, self._forged = self._forged, b""
        pieces = [forged] if not self._pause_s else [forged[at : at + 1] for at in range(len(forged))]
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                asker.sendall(piece)
                time.sleep(self._pause_s)
            asker.shutdown(socket.SHUT_WR)
            received(asker)

    def _send(self, target: socket.socket, data: bytes, pause_s: float) -> None:
        for at in range(len(data) if pause_s else 0):
            if self._left.wait(pause_s):
                raise ConnectionAbortedError("the tap is closed")
            target.sendall(data[at : at + 1])
        if not pause_s:
            target.sendall(data)

    def _pump(self, source: socket.socket, target: socket.socket, side: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._passed[side] += data
                trickles = side == "answers" and len(self._passed[side]) > 2 * CHUNK
                self._send(target, data, self._answers_pause_s if trickles else 0.0)
            target.shutdown(socket.SHUT_WR)
