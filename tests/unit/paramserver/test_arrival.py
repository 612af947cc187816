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
from paramserver.data.wire import wait_in_kernel

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(autouse=True, params=["by the libraries", "in Python"])
def _both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(arrival, "_libraries", None)
    else:
        assert arrival._libraries is not None, "`make env` compiles receive.c, `make system-packages` has libxxhash"


@pytest.fixture
def pair() -> Iterator[Pair]:
    sender, receiver = socket.socketpair()
    wait_in_kernel(receiver, 20.0)
    with sender, receiver:
        yield sender, receiver


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", [1, 240, 241, 1024, 4096, PIECE_BYTES - 1, PIECE_BYTES + 1, 5 * PIECE_BYTES + 77])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_bytes_come_to_their_place_and_the_digest_is_that_of_the_whole_chunk(
    pair: Pair, size: int, share: float
) -> None:
    sender, receiver = pair
    sent, upto = content(size), int(share * size)
    around = bytearray(b"." * (size + 128))
    place = memoryview(around)[64 : 64 + size]
    place[:upto] = sent[:upto]
    with ThreadPoolExecutor(1) as threads:
        threads.submit(sender.sendall, sent[upto:] + b"and what comes next")
        chunk = arrival.begin(receiver, place, upto)
        while upto < size:
            upto += chunk.receive(upto)
    assert place == sent
    assert around[:64] + around[64 + size :] == b"." * 128
    assert chunk.digest() == digest(sent)


def test_silence_is_told_after_the_sockets_own_time_and_what_came_before_it_first(pair: Pair) -> None:
    sender, receiver = pair
    wait_in_kernel(receiver, 0.01)
    place = memoryview(bytearray(3 * PIECE_BYTES))
    chunk = arrival.begin(receiver, place, 0)
    with pytest.raises(BlockingIOError):
        chunk.receive(0)
    sender.sendall(b"some")
    assert chunk.receive(0) == 4
    with pytest.raises(BlockingIOError):
        chunk.receive(4)


def test_the_streams_end_is_no_byte_and_a_broken_connection_an_error(pair: Pair) -> None:
    sender, receiver = pair
    chunk = arrival.begin(receiver, memoryview(bytearray(16)), 0)
    sender.close()
    assert chunk.receive(0) == 0
    receiver.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        chunk.receive(0)


def test_progress_of_a_slow_chunk_is_told_before_it_is_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "ENOUGH_S", 0.0)
    sender, receiver = pair
    sent = content(3 * PIECE_BYTES)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(sender.sendall, sent)
        chunk = arrival.begin(receiver, memoryview(bytearray(len(sent))), 0)
        came = [chunk.receive(upto) for upto in range(0, len(sent), PIECE_BYTES)]
    assert came == [PIECE_BYTES] * 3
    assert chunk.digest() == digest(sent)
