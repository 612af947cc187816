"""What a person in the middle tries at the bytes of a version between two relays, and what comes of it: rows of the
table of docs/reference/relay-attacks.md.

Each attack meets a requester of the test's own first, whose error is the row's answer, and then relays that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from deploy.setup_env import ROOT
from paramserver.core.handshake import NONCE_BYTES, key_id
from paramserver.data import frames
from paramserver.data.frames import Header, Kind, Refusal
from paramserver.data.secured import MAGIC, Hello
from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from protos.errors import LaminarError
from tests.fuzz.watched import unharmed
from tests.support.in_between import Attack, Match, Wire
from tests.support.intercepted import SILENCE_S, Intercepted, InterceptedFleet, contents, intercepted
from tests.support.wire_attacks import (
    CHUNK_BYTES,
    CHUNK_HEADER,
    REQUEST,
    WELCOME,
    cut,
    drop,
    flip,
    instead,
    is_,
    led_to,
    repeat,
    swap,
    trickle,
)

pytestmark = pytest.mark.slow

MODEL, SEED = "policy", 1
RECORD = is_("tls", "answers", at_least=9000)
PHASES = {
    "hello": is_("hello"),
    "challenge": is_("challenge"),
    "greeting": is_("greeting"),
    "proof": is_("proof"),
    "welcome": WELCOME,
    "request": REQUEST,
    "a chunk's header": CHUNK_HEADER,
    "a chunk's bytes": CHUNK_BYTES,
}


@dataclass(frozen=True, slots=True)
class Scene:
    """`a` has the version of `MODEL`, and publishes; `b` follows it, and `c`, which wants TLS, follows `b`."""

    fleet: InterceptedFleet
    a: Intercepted
    b: Intercepted
    c: Intercepted


@pytest.fixture(scope="module")
def scene(shared_etcd: str, fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with (
        pytest.MonkeyPatch.context() as patch,
        intercepted(shared_etcd, fleet, tmp_path_factory.mktemp("attacked")) as found,
    ):
        patch.delenv(CREDENTIALS_VARIABLE, raising=False)
        a = found.start("a", "--chunk-bytes=256KiB")
        b, c = (found.start(name, "--no-publish-host", "--stripes=1", *more) for name, more in FOLLOWERS.items())
        scene = Scene(found, a, b, c)
        asyncio.run(_publish(scene, {MODEL: SEED}))
        yield scene


FOLLOWERS: dict[str, Sequence[str]] = {"b": (), "c": ("--data-tls",)}


async def _publish(scene: Scene, seeds: dict[str, int]) -> None:
    """A version of each model, which all relays then have."""
    tickets = await asyncio.gather(*(scene.fleet.publish(scene.a, model, seed) for model, seed in seeds.items()))
    for (model, seed), ticket in zip(seeds.items(), tickets, strict=True):
        for relay in (scene.a, scene.b, scene.c):
            await scene.fleet.lands(relay, model, ticket.version, seed)


# -- one by one


def attacked(scene: Scene, attack: Attack, *, tls: bool = False) -> str:
    """What the requester meets whose connection is attacked."""
    scene.a.between.attack(attack)
    with scene.a.between.recording() as wires:
        answer = fetched(scene, scene.a, tls=tls)
        assert attack.fired.is_set()
        return next(filter(None, map(refusal_on, wires)), answer)


def fetched(scene: Scene, relay: Intercepted, *, tls: bool = False) -> str:
    try:
        found = scene.fleet.fetch(relay, MODEL, tls=tls)
    except LaminarError as error:
        return in_words(error.message)
    return "what was published arrives" if found == contents(SEED) else "OTHER BYTES"


def in_words(message: str) -> str:
    if "no TLS with" in message or "SSL:" in message:
        return "TLS ends the connection"
    if re.search(r"closed the connection|reset by peer|Broken pipe|EOF occurred", message):
        return "the connection ends"
    if re.search(r"timed out|was silent", message):
        return f"the requester leaves after {SILENCE_S:g} s of silence"
    return re.sub(r"^(receiving failed|a): ", "", message)


def refusal_on(wire: Wire) -> str:
    """What the holder refused with in the clear; no requester reads it that awaits a record."""
    wire.over.wait(60.0)
    refused = next((piece for piece in wire.passed if piece.name == "refused"), None)
    return "" if refused is None else msgspec.json.decode(refused.data[frames.HEADER.size :], type=Refusal).message


def each(scene: Scene, *attacks: Attack, tls: bool = False) -> str:
    return "; or ".join(sorted({attacked(scene, attack, tls=tls) for attack in attacks}))


def recorded(scene: Scene) -> Wire:
    with scene.a.between.recording() as wires:
        assert fetched(scene, scene.a) == "what was published arrives"
    assert wires[0].over.wait(60.0)
    return wires[0]


def said(scene: Scene, data: bytes) -> str:
    """What relay a says to these bytes of nobody."""
    with socket.create_connection(("127.0.0.1", _port(scene.a.between.address)), 60.0) as sock:
        sock.sendall(data)
        while (header := frames.receive_header(sock)).kind is not Kind.REFUSED:
            frames.receive_bytes(sock, header.length)
        return frames.receive_refusal(sock, header).message


def reflected(scene: Scene) -> str:
    """Its own proof, for a nonce that it has just given out, is what the requester shows."""
    key = Credentials(scene.fleet.holders / "relay").material.fleet_keys[0]
    with socket.create_connection(("127.0.0.1", _port(scene.a.between.address)), 60.0) as sock:
        challenges = []
        for nonce in (bytes(NONCE_BYTES), None):
            hello = msgspec.json.encode(Hello(nonce or challenges[0][0], [key_id(key)]))
            with contextlib.ExitStack() as stack:
                where = sock if nonce else stack.enter_context(socket.create_connection(sock.getpeername(), 60.0))
                where.sendall(MAGIC + len(hello).to_bytes(4, "big") + hello)
                challenge = msgspec.json.decode(frames.receive_bytes(where, frames.receive_header(where).length))
                challenges.append(
                    [msgspec.convert(challenge[name], bytes, strict=False) for name in ("nonce", "proof")]
                )
        greeting = recorded(scene).passed
        body = next(piece.data for piece in greeting if piece.name == "greeting")
        sock.sendall(body + challenges[1][1])
        return frames.receive_refusal(sock, frames.receive_header(sock)).message


def wish_is_kept(scene: Scene) -> str:
    attack = scene.c.between.attack(cut(is_("refused")))
    answer = fetched(scene, scene.c)
    assert attack.fired.is_set()
    return answer


def tail_of(wire: Wire, side: str) -> bytes:
    return b"".join(piece.data for piece in wire.passed if (piece.side, piece.name) == (side, "record"))


def refusing(code: str, message: str) -> bytes:
    body = msgspec.json.encode(Refusal(code, message))
    return Header(Kind.REFUSED, length=len(body)).pack() + body


def forged(code: str) -> Attack:
    return instead(is_("hello"), refusing(code, "so says who is in between"))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


CODES = ("unauthenticated", "forbidden", "not_found", "conflict", "out_of_capacity", "internal", "nonsense")
FORGED = refusing("tls_wanted", "TLS, please")
TRIED: dict[str, Callable[[Scene], str]] = {
    "a bit of the hello is flipped on its way": lambda s: each(s, *(flip(PHASES["hello"], at) for at in (0, 4, 20))),
    "a bit of the challenge is flipped": lambda s: each(s, *(flip(PHASES["challenge"], at) for at in (49, -20))),
    "a bit of the greeting, or of its proof, is flipped": lambda s: each(
        s, flip(is_("greeting"), 20), flip(is_("proof"))
    ),
    "a bit of the welcome, of a chunk's header, of its bytes, or of their MAC, is flipped": lambda s: each(
        s, *(flip(match, at) for match in (WELCOME, CHUNK_HEADER, CHUNK_BYTES) for at in (9, -1))
    ),
    "a bit of a request is flipped": lambda s: each(s, flip(REQUEST, 6), flip(REQUEST)),
    "a record of a chunk is left out, repeated, or changes places with the next": lambda s: each(
        s, *(do(match) for do in (drop, repeat, swap) for match in (CHUNK_HEADER, CHUNK_BYTES))
    ),
    "a request is left out, repeated, or changes places with the next": lambda s: each(
        s, drop(REQUEST), repeat(REQUEST), swap(REQUEST)
    ),
    "a connection is cut in the middle of each message, by FIN and by RST": lambda s: each(
        s, *(cut(match, reset=reset) for match in PHASES.values() for reset in (False, True))
    ),
    "the challenge is kept back": lambda s: each(s, drop(is_("challenge"))),
    "a connection is led to another relay": lambda s: attacked(s, led_to(s.b.between.target)),
    "all that a requester sent is sent again": lambda s: said(s, recorded(s).sent("requests")),
    "all that a holder sent is sent again, to another requester": lambda s: attacked(
        s, instead(is_("hello"), recorded(s).sent("answers"))
    ),
    "requests of an earlier connection follow a fresh opening": lambda s: attacked(
        s, instead(REQUEST, tail_of(recorded(s), "requests"), to="requests")
    ),
    "chunks of an earlier connection follow a fresh opening": lambda s: attacked(
        s, instead(WELCOME, tail_of(recorded(s), "answers"))
    ),
    "a holder is shown its own proof": reflected,
    "a holder's wish for TLS is kept from the requester": wish_is_kept,
    "a requester's TLS is answered in the clear": lambda s: attacked(
        s, instead(is_("tls hello"), recorded(s).sent("answers")), tls=True
    ),
    "a key's id in the hello is changed": lambda s: attacked(s, flip(is_("hello"), -6)),
    "a refusal is forged before the holder has proven the key": lambda s: each(s, *map(forged, CODES)),
    "a refusal of 64 MiB is announced there": lambda s: attacked(
        s, instead(is_("hello"), Header(Kind.REFUSED, length=64 << 20).pack() + bytes(1 << 20))
    ),
    "a wish for TLS is forged": lambda s: attacked(s, instead(is_("hello"), FORGED)),
    "over TLS: a bit of any message is flipped": lambda s: each(
        s,
        *(flip(match, 20) for match in (is_("tls hello"), is_("tls", "answers"), is_("tls", "requests"), RECORD)),
        tls=True,
    ),
    "over TLS: a record is left out, repeated, or changes places with the next": lambda s: each(
        s, *(do(RECORD) for do in (drop, repeat, swap)), tls=True
    ),
    "over TLS: a connection is cut in the middle of a record, by FIN and by RST": lambda s: each(
        s, *(cut(RECORD, reset=reset) for reset in (False, True)), tls=True
    ),
}


async def test_the_page_has_what_each_attack_on_a_fetch_is_answered(scene: Scene) -> None:
    page = (ROOT / "docs/reference/relay-attacks.md").read_text()
    names = {scene.a.between.address: "HOST:PORT", scene.b.between.address: "OTHER:PORT"}
    rows = []
    for what, attempt in TRIED.items():
        answer = await asyncio.to_thread(attempt, scene)
        for address, name in names.items():
            answer = answer.replace(address, name)
        rows.append(f"| {what} | {answer} |")
    print("\n".join(rows))
    assert await asyncio.to_thread(fetched, scene, scene.a) == "what was published arrives"
    assert [row for row in rows if row not in page] == []


# -- relays that follow


def on_the_way() -> Iterator[Attack]:
    """Everything above that changes, cuts, leads away or forges, for connections between relays."""
    for match in PHASES.values():
        yield from (flip(match, 9), flip(match), cut(match), cut(match, reset=True))
    for match in (REQUEST, CHUNK_HEADER, CHUNK_BYTES):
        yield from (drop(match), repeat(match), swap(match))
    yield from (drop(WELCOME), drop(is_("challenge")))
    for code in (*CODES, "tls_wanted"):
        yield forged(code)


def on_tls() -> Iterator[Attack]:
    matches: list[Match] = [is_("tls hello", side) for side in ("requests", "answers")]  # type: ignore[arg-type]
    matches += [is_("tls", side, number=number) for side in ("requests", "answers") for number in (0, 3)]  # type: ignore[arg-type]
    for match in (*matches, RECORD):
        yield from (flip(match, 20), cut(match), cut(match, reset=True))
    yield from (drop(RECORD), repeat(RECORD), swap(RECORD))


AT_ONCE = 6
WARM_ROUNDS = 3
"""Versions that a relay keeps, and memory for the next: from then on few cost another descriptor."""
ROUNDS_MAX = 30
EACH_ROUND = 2
"""Attacks for each version on its way: the first bypasses last half a second and a second."""


def seeds(number: int) -> dict[str, int]:
    """Of one round: each model's."""
    return {f"m{model}": number * 100 + model for model in range(AT_ONCE)}


async def test_versions_land_whole_although_each_connection_is_attacked(scene: Scene) -> None:
    attacks = {scene.a: [*on_the_way()], scene.b: [*on_tls()]}
    waiting = {relay: iter(found) for relay, found in attacks.items()}
    numbers = itertools.count(1)
    for number in itertools.islice(numbers, WARM_ROUNDS):
        await _publish(scene, seeds(number))
    with contextlib.ExitStack() as stack:
        for relay in (scene.a, scene.b, scene.c):
            stack.enter_context(unharmed(relay.daemon, left_max=2 * AT_ONCE))
        for number in itertools.islice(numbers, ROUNDS_MAX):
            for relay, left in waiting.items():
                for attack in itertools.islice(left, AT_ONCE * EACH_ROUND - relay.between.num_attacks):
                    relay.between.attack(attack)
            if not any(relay.between.num_attacks for relay in attacks):
                break
            await _publish(scene, seeds(number))
    assert [sum(not one.fired.is_set() for one in found) for found in attacks.values()] == [0, 0]


async def test_a_version_whose_bytes_trickle_makes_way_for_the_next(scene: Scene) -> None:
    attack = scene.a.between.attack(trickle(CHUNK_BYTES))
    first = await scene.fleet.publish(scene.a, "slow", 1)
    assert await asyncio.to_thread(attack.fired.wait, 60.0)
    second = await scene.fleet.publish(scene.a, "slow", 2)
    await scene.fleet.lands(scene.b, "slow", second.version, 2)
    assert first.version < second.version
    assert scene.b.daemon.log().count("makes way for a newer one") < 5
