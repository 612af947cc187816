"""What a person in the middle does to one message of a data connection: functions that make an `Attack`."""

from __future__ import annotations

import string
import threading
import time

from tests.support.in_between import Attack, Match, Piece, Side, Wire

_BASE64 = frozenset((string.ascii_letters + string.digits + "+/").encode())
_TAG_BYTES = 16


def is_(name: str, side: Side | None = None, *, number: int = 0, at_least: int = 0) -> Match:
    """The `number`-th message of that name, and in that direction; the first from there that has so many bytes."""

    def match(piece: Piece) -> bool:
        right = piece.name == name and side in (None, piece.side)
        return right and piece.number >= number and len(piece.data) >= at_least

    return match


WELCOME = is_("record", "answers")
CHUNK_HEADER = is_("record", "answers", number=1)
CHUNK_BYTES = is_("record", "answers", number=1, at_least=1 << 10)
REQUEST = is_("record", "requests")
WRITTEN_HEADER = is_("record", "requests")
WRITTEN_BYTES = is_("record", "requests", at_least=1 << 10)


def flip(match: Match, at: int = -1) -> Attack:
    """A bit of the byte `at` of the message."""

    def act(_: Wire, piece: Piece) -> bytes:
        changed = bytearray(piece.data)
        if changed[at] in _BASE64:  # it stays a message that can be read, where it was one
            changed[at] = next(changed[at] ^ bit for bit in (1, 2, 4) if changed[at] ^ bit in _BASE64)
        else:
            changed[at] ^= 1
        return bytes(changed)

    return Attack(match, act)


def drop(match: Match) -> Attack:
    return Attack(match, lambda _, piece: b"")


def repeat(match: Match) -> Attack:
    return Attack(match, lambda _, piece: piece.data * 2)


def swap(match: Match) -> Attack:
    """The message changes places with the next one in its direction."""
    held: list[Piece] = []

    def act(_: Wire, piece: Piece) -> bytes:
        held.append(piece)
        return b""

    def then(_: Wire, piece: Piece) -> bytes:
        return piece.data + held.pop().data if held and held[0].side == piece.side else piece.data

    return Attack(match, act, then)


def cut(match: Match, *, reset: bool = False) -> Attack:
    """The connection ends in the middle of the message."""

    def act(wire: Wire, piece: Piece) -> bytes:
        wire.send(piece.side, piece.data[: len(piece.data) // 2])
        wire.cut(reset=reset)
        return b""

    return Attack(match, act)


def instead(match: Match, data: bytes, *, to: Side = "answers") -> Attack:
    """In place of the message, which goes nowhere, that way goes `data`, and the end."""

    def act(wire: Wire, piece: Piece) -> bytes:
        wire.send(to, data)
        wire.end(to)
        return b""

    return Attack(match, act, lambda _, piece: b"")


def trickle(match: Match, *, byte_every_s: float = 0.05) -> Attack:
    """The message comes byte by byte, for as long as there is somebody to whom."""

    def act(wire: Wire, piece: Piece) -> bytes:
        for byte in piece.data:
            if not wire.send(piece.side, bytes([byte])):
                break
            time.sleep(byte_every_s)
        return b""

    return Attack(match, act)


def half_open(match: Match, later: threading.Event) -> Attack:
    """The requester's end is reset, and the holder's stays open: it gets the message, and the one after it, `later`."""

    def act(wire: Wire, piece: Piece) -> bytes:
        following = wire.take("requests", 4)
        following += wire.take("requests", int.from_bytes(following, "big") + _TAG_BYTES)
        wire.end("answers", reset=True)
        later.wait(60.0)
        return piece.data + following

    return Attack(match, act)


def led_to(address: str) -> Attack:
    """The connection goes to another relay, unchanged."""
    return Attack(lambda _: True, lambda _, piece: piece.data, target=address)
