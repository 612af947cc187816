"""What a person in the middle tries at a publisher's connection to its relay, and what becomes of a relay's credentials
that are replaced by what cannot be used: rows of the table of docs/reference/relay-attacks.md."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from deploy.setup_env import ROOT
from paramserver.client import publish
from paramserver.data import frames
from paramserver.data.frames import Greeting, Header, Kind, Refusal
from paramserver.data.secured import open_connection
from protos.access.credentials import CREDENTIALS_VARIABLE, FILE_BYTES_MAX
from protos.errors import LaminarError
from tests.fuzz.watched import unharmed
from tests.support.in_between import Attack, Wire
from tests.support.intercepted import Intercepted, InterceptedFleet, intercepted, weights
from tests.support.relays import until
from tests.support.weights import source_of
from tests.support.wire_attacks import (
    WRITTEN_BYTES,
    WRITTEN_HEADER,
    cut,
    drop,
    flip,
    half_open,
    instead,
    is_,
    repeat,
    swap,
)

pytestmark = pytest.mark.slow

MODEL = "policy"
DONE = is_("record", "requests", number=6)  # after the headers and bytes of three chunks
WELCOME, DONE_TOO = is_("record", "answers"), is_("record", "answers", number=1)
LEFT_MAX = 12  # descriptors and threads: memory of the versions that are kept comes while this runs


@dataclass(frozen=True, slots=True)
class Scene:
    """`a` takes a publisher's bytes by its data port alone; `b` follows it."""

    fleet: InterceptedFleet
    a: Intercepted
    b: Intercepted


@pytest.fixture(scope="module")
def scene(shared_etcd: str, fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with (
        pytest.MonkeyPatch.context() as patch,
        intercepted(shared_etcd, fleet, tmp_path_factory.mktemp("attacked")) as found,
    ):
        patch.delenv(CREDENTIALS_VARIABLE, raising=False)
        a = found.start("a", "--distrust-publisher", "--chunk-bytes=256KiB")
        b = found.start("b", "--no-publish-host")
        yield Scene(found, a, b)


SEEDS = iter(range(1, 10_000))


async def published(scene: Scene) -> int:
    """The number of a version that landed as it was published, at both relays."""
    seed = next(SEEDS)
    ticket = await scene.fleet.publish(scene.a, MODEL, seed)
    for relay in (scene.a, scene.b):
        await scene.fleet.lands(relay, MODEL, ticket.version, seed)
    return ticket.version


def is_write(wire: Wire) -> bool:
    return any(piece.name == "greeting" and b'"write"' in piece.data for piece in wire.passed)


async def sent_again(scene: Scene, *attacks: Attack) -> str:
    for attack in attacks:
        scene.a.between.attack(attack, purpose="write")
        with scene.a.between.recording() as wires:
            await published(scene)
            assert attack.fired.is_set()
            assert sum(map(is_write, wires)) == 2
    return "what is missing is sent again, and the version lands whole"


async def wrong_token(scene: Scene) -> str:
    greeting = Greeting("write", MODEL, await published(scene), "stranger", token="guess")

    def write() -> str:
        sock, _ = open_connection(scene.a.between.address, 60.0, greeting, scene.fleet.access("trainer"))
        with sock, pytest.raises(LaminarError) as refused:
            frames.receive_welcome(sock, silence_s=60.0)
        return refused.value.message

    return await asyncio.to_thread(write)


async def replayed(scene: Scene) -> str:
    """All that a publisher sent for one version, sent again while the next one is written."""
    with scene.a.between.recording() as wires:
        await published(scene)
    earlier = next(wire for wire in wires if is_write(wire)).sent("requests")
    answers: list[str] = []
    seed = next(SEEDS)
    (source,) = source_of(weights(seed))

    def read() -> memoryview:
        answers.append(said(scene.a, earlier))
        return source.read()

    async with scene.fleet.client(scene.a, "trainer") as trainer:
        ticket = await publish(trainer, MODEL, [replace(source, read=read)], step=seed, run="r")
    for relay in (scene.a, scene.b):
        await scene.fleet.lands(relay, MODEL, ticket.version, seed)
    return answers[0]


def said(relay: Intercepted, data: bytes) -> str:
    host, _, port = relay.between.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60.0) as sock:
        sock.sendall(data)
        while (header := frames.receive_header(sock)).kind is not Kind.REFUSED:
            frames.receive_bytes(sock, header.length)
        return frames.receive_refusal(sock, header).message


async def spliced(scene: Scene) -> str:
    """Records of an earlier version's connection, in place of the ones that were meant."""
    with scene.a.between.recording() as wires:
        await published(scene)
    wire = next(wire for wire in wires if is_write(wire))
    records = b"".join(p.data for p in wire.passed if (p.side, p.name) == ("requests", "record"))
    return await sent_again(scene, instead(WRITTEN_HEADER, records, to="requests"))


async def left_half_open(scene: Scene) -> str:
    later = threading.Event()
    answer = await sent_again(scene, half_open(is_("record", "requests", number=2), later))
    later.set()
    await published(scene)
    return answer


async def forged(scene: Scene) -> str:
    """Before the holder has proven anything: what the publisher and the relay that follows are told."""
    body = msgspec.json.encode(Refusal("unauthenticated", "no fleet key in common"))
    refusal = Header(Kind.REFUSED, length=len(body)).pack() + body
    attacks = [scene.a.between.attack(instead(is_("hello"), refusal)) for _ in range(6)]
    await published(scene)
    assert all(attack.fired.is_set() for attack in attacks)
    return "it is tried again, and the version lands whole"


async def cut_each_time(scene: Scene) -> str:
    before = await published(scene)
    for _ in range(3):
        scene.a.between.attack(cut(WRITTEN_BYTES), purpose="write")
    assert await published(scene) == before + 2
    for relay in (scene.a, scene.b):
        async with scene.fleet.client(relay, "reader") as reader:
            assert before + 1 not in [one.version for one in await reader.versions(MODEL)]
    return "that version is given up, and what was published lands whole as the next one"


Attempt = Callable[[Scene], Awaitable[str]]
TRIED: dict[str, Attempt] = {
    "a write with a wrong token": wrong_token,
    "all that a publisher sent is sent again while it writes the next version": replayed,
    "records of an earlier write follow a fresh opening": spliced,
    "a bit of what a publisher sends is flipped": lambda s: sent_again(
        s, *(flip(match) for match in (WRITTEN_HEADER, WRITTEN_BYTES, DONE, WELCOME, DONE_TOO))
    ),
    "a record of a write is left out, repeated, or changes places with the next": lambda s: sent_again(
        s, *(do(match) for do in (drop, repeat, swap) for match in (WRITTEN_HEADER, WRITTEN_BYTES))
    ),
    "a write is cut in the middle of each message, by FIN and by RST": lambda s: sent_again(
        s,
        *(
            cut(match, reset=reset)
            for match in (is_("proof"), WELCOME, WRITTEN_HEADER, WRITTEN_BYTES, DONE, DONE_TOO)
            for reset in (False, True)
        ),
    ),
    "a write is cut for the publisher, and what it had sent comes to the relay later": left_half_open,
    "a refusal to a publisher is forged before the relay has proven the key": forged,
    "a write is cut each time that it is tried": cut_each_time,
}


def not_in_page(rows: list[str]) -> list[str]:
    """Of docs/reference/relay-attacks.md. Numbers of versions, which depend on what ran before, may differ."""

    def numberless(text: str) -> str:
        return re.sub(r"\bversion \d+", "version N", text)

    page = numberless((ROOT / "docs/reference/relay-attacks.md").read_text())
    return [row for row in rows if numberless(row) not in page]


async def test_the_page_has_what_each_attack_on_a_write_is_answered(scene: Scene) -> None:
    await published(scene)
    with unharmed(scene.a.daemon, left_max=LEFT_MAX), unharmed(scene.b.daemon, left_max=LEFT_MAX):
        rows = [f"| {what} | {await attempt(scene)} |" for what, attempt in TRIED.items()]
    print("\n".join(rows).replace(scene.a.between.address, "HOST:PORT"))
    assert not_in_page(rows) == []


# -- files that are replaced


def by_a_directory(path: Path) -> None:
    path.mkdir()


def by_a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def by_a_huge_file(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, 1 << 40)


def by_a_link_to_nothing(path: Path) -> None:
    path.symlink_to("/nothing")


def by_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def by_half_of_it(path: Path) -> None:
    other = path.parent.parent / "other" / path.name
    path.write_bytes(other.read_bytes()[: other.stat().st_size // 2])
    path.chmod(0o600)


def by_what_others_may_read(path: Path) -> None:
    shutil.copy(path.parent.parent / "before" / path.name, path)
    path.chmod(0o644)


def by_another_certificate(path: Path) -> None:
    shutil.copy(path.parent.parent / "other" / path.name, path)


REPLACED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a directory in place of its key": ("key.pem", by_a_directory, "is no file"),
    "a named pipe in place of its fleet key": ("fleet.key", by_a_pipe, "is no file"),
    "a link to /dev/zero in place of its CA": ("ca.pem", by_a_device, "is no file"),
    "a link to nothing in place of its certificate": ("cert.pem", by_a_link_to_nothing, "No such file or directory"),
    "a file of 1 TiB in place of its CA": ("ca.pem", by_a_huge_file, f"is larger than {FILE_BYTES_MAX >> 10} KiB"),
    "half of its fleet key": ("fleet.key", by_half_of_it, "is no fleet key"),
    "a key that others may read": ("key.pem", by_what_others_may_read, "has the mode 0644: others may read or write"),
    "the certificate of another key": ("cert.pem", by_another_certificate, "is not the key of the certificate"),
}


async def test_the_page_has_what_becomes_of_a_relay_whose_credentials_cannot_be_used(scene: Scene) -> None:
    own, rows = scene.fleet.directory, []
    before = Path(shutil.copytree(own, own.parent / "before"))
    shutil.copytree(scene.fleet.holders / "relay", own.parent / "other")
    for what, (name, put, why) in REPLACED.items():
        (own / name).unlink()
        put(own / name)
        for relay in (scene.a, scene.b):
            await until(lambda relay=relay, why=why: failure(scene, relay, why), f"{relay.name} has noticed: {why}")
            assert why in relay.daemon.log()
        await published(scene)
        for relay in (scene.a, scene.b):
            assert [path for path in open_files(relay) if f"{own}/" in path] == []
        (own / name).rmdir() if (own / name).is_dir() else (own / name).unlink()
        shutil.copy(before / name, own / name)
        rows.append(f"| {what} | it goes on with what it had: {why} |")
    for relay in (scene.a, scene.b):
        await until(lambda relay=relay: failure(scene, relay, ""), "what was there before is there again")
        assert relay.daemon.log().count("the credentials stay as they were") <= 3 * len(REPLACED), "not with each look"
    await published(scene)
    print("\n".join(rows))
    assert not_in_page(rows) == []


async def failure(scene: Scene, relay: Intercepted, why: str) -> bool:
    """Whether the relay's status names that reason why its credentials stay as they were; "": none."""
    async with scene.fleet.client(relay, "reader") as reader:
        access = (await reader.status()).access
    assert access is not None
    return why in access.failure if why else not access.failure


def open_files(relay: Intercepted) -> list[str]:
    return [file.readlink().as_posix() for file in Path(f"/proc/{relay.daemon.process.pid}/fd").iterdir()]
