"""Chunks that arrive on a socket: each byte in its place, the digest of them all, and progress in time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paramserver.core.records import digest
from paramserver.data import arrival
from paramserver.data.arrival import PIECE_BYTES
from paramserver.data.frames import wait_in_kernel

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(autouse=True, params=["by the library", "in Python"])
def _both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(arrival, "_library", None)
    else:
        assert arrival._library is not None, "`make env` compiles receive.c"


@pytest.fixture
def pair() -> Iterator[Pair]:
    sender, receiver = socket.socketpair()
    wait_in_kernel(receiver, 20.0)
    with sender, receiver:
        yield sender, receiver


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def place_of(size: int, beside: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int]:
    """Dots, and where in them a place of that size begins: `beside` bytes behind the beginning of a cache line."""
    around = np.full(size + 256, ord("."), np.uint8)
    return around, -around.ctypes.data % 64 + 64 + beside


@pytest.mark.parametrize("size", [1, 240, 241, 1024, 4096, PIECE_BYTES - 1, PIECE_BYTES + 1, 5 * PIECE_BYTES + 77])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("beside", [0, 17])
def test_bytes_come_to_their_place_and_the_digest_is_that_of_the_whole_chunk(
    pair: Pair, size: int, share: float, beside: int
) -> None:
    sender, receiver = pair
    sent, upto = content(size), int(share * size)
    around, at = place_of(size, beside)
    place = memoryview(around)[at : at + size]
    place[:upto] = sent[:upto]
    with ThreadPoolExecutor(1) as threads:
        threads.submit(sender.sendall, sent[upto:] + b"and what comes next")
        chunk = arrival.begin(receiver, place, upto)
        while upto < size:
            upto += chunk.receive()
    assert place == sent
    assert around.tobytes() == b"." * at + sent + b"." * (256 - at)
    assert chunk.digest() == digest(sent)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [0, 17])
def test_a_chunk_may_come_in_parts_of_any_size(pair: Pair, beside: int) -> None:
    sender, receiver = pair
    wait_in_kernel(receiver, 0.001)
    random = np.random.default_rng(beside)
    size = PIECE_BYTES + 1000
    sent, (around, at) = content(size), place_of(size, beside)
    place = memoryview(around)[at : at + size]
    upto = int(random.integers(1, 200))
    place[:upto] = sent[:upto]
    chunk = arrival.begin(receiver, place, upto)
    while upto < size:
        there = min(size, upto + int(random.choice([1, 63, 64, 65, 8191, 20_000])))
        sender.sendall(sent[upto:there])
        while upto < there:
            upto += chunk.receive()
    assert around.tobytes() == b"." * at + sent + b"." * (256 - at)
    assert chunk.digest() == digest(sent)


def test_silence_is_told_after_the_sockets_own_time_and_what_came_before_it_first(pair: Pair) -> None:
    sender, receiver = pair
    wait_in_kernel(receiver, 0.01)
    place = memoryview(bytearray(3 * PIECE_BYTES))
    chunk = arrival.begin(receiver, place, 0)
    with pytest.raises(BlockingIOError):
        chunk.receive()
    sender.sendall(b"some")
    assert chunk.receive() == 4
    with pytest.raises(BlockingIOError):
        chunk.receive()


def test_the_streams_end_is_no_byte_and_a_broken_connection_an_error(pair: Pair) -> None:
    sender, receiver = pair
    chunk = arrival.begin(receiver, memoryview(bytearray(16)), 0)
    sender.close()
    assert chunk.receive() == 0
    receiver.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        chunk.receive()


def test_progress_of_a_slow_chunk_is_told_before_it_is_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "ENOUGH_S", 0.0)
    sender, receiver = pair
    sent = content(3 * PIECE_BYTES)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(sender.sendall, sent)
        chunk = arrival.begin(receiver, memoryview(bytearray(len(sent))), 0)
        came = [chunk.receive() for upto in range(0, len(sent), PIECE_BYTES)]
    assert came == [PIECE_BYTES] * 3
    assert chunk.digest() == digest(sent)
