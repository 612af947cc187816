"""A sealed socket: what was sent comes, and nothing else does, whoever stands in between."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paramserver.data import frames
from paramserver.data.frames import LinkBroken, Partly
from paramserver.data.sealed import KEY_BYTES, RECORD_BYTES_MAX, Forged, SealedSocket

FIRST, SECOND = b"1" * KEY_BYTES, b"2" * KEY_BYTES


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), 60.0)
        other, _ = listener.accept()
    other.settimeout(60.0)
    return one, other


@pytest.fixture
def sealed() -> Iterator[tuple[SealedSocket, SealedSocket]]:
    one, other = pair()
    with (
        SealedSocket(one, sends=FIRST, receives=SECOND) as left,
        SealedSocket(other, sends=SECOND, receives=FIRST) as right,
    ):
        yield left, right


def recorded(*pieces: bytes) -> list[bytes]:
    """The records, as they go over the network, of these pieces sent one after the other."""
    one, other = pair()
    found = []
    with SealedSocket(one, sends=FIRST, receives=SECOND) as sender, other:
        for piece in pieces:
            sender.send(piece)
            found.append(frames.receive_bytes(other, 4 + len(piece) + 16))
    return found


@contextlib.contextmanager
def receiver_of(stream: bytes) -> Iterator[SealedSocket]:
    """One to whom exactly these bytes come, and then the end."""
    one, other = pair()
    with one, SealedSocket(other, sends=SECOND, receives=FIRST) as receiver:
        one.sendall(stream)
        one.shutdown(socket.SHUT_WR)
        yield receiver


@pytest.mark.parametrize("size", [1, 29, 4096, RECORD_BYTES_MAX, RECORD_BYTES_MAX + 1, 3 * RECORD_BYTES_MAX - 5])
@pytest.mark.parametrize("step", [1 << 20, 4097])
def test_bytes_come_as_they_were_sent_in_both_directions(
    sealed: tuple[SealedSocket, SealedSocket], size: int, step: int
) -> None:
    content = random.Random(size).randbytes(size)
    for sender, receiver in (sealed, sealed[::-1]):
        sending = threading.Thread(target=frames.send_all, args=(sender, content))
        sending.start()
        into = bytearray(size)
        for start in range(0, size, step):
            frames.receive_exactly(receiver, memoryview(into)[start : start + step])
        sending.join()
        assert bytes(into) == content


def test_nothing_of_the_content_is_on_the_network() -> None:
    content = b"the weights of a policy " * 100
    stream = b"".join(recorded(content, content))
    assert b"policy" not in stream
    assert stream[4 : 4 + len(content)] != stream[-len(content) - 16 : -16], "nor that it is the same twice"


def test_any_changed_byte_ends_the_connection() -> None:
    [record] = recorded(b"content")
    for at in range(len(record)):
        changed = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
        with receiver_of(changed + bytes(1 << 10)) as receiver:
            into = bytearray(7)
            for _ in range(2):  # for good
                with contextlib.suppress(Forged):
                    assert receiver.recv_into(into) == 0, "a length that is too large is waited for until the end"
            assert into == bytes(7), at


@pytest.mark.parametrize(
    ("what", "order"), [("repeated", (0, 0)), ("left out", (1,)), ("moved", (1, 0)), ("repeated later", (0, 1, 0))]
)
def test_records_come_once_and_in_their_order(what: str, order: tuple[int, ...]) -> None:
    records = recorded(b"first", b"other")
    with receiver_of(b"".join(records[number] for number in order)) as receiver:

        def receive_all() -> None:
            for _ in order:
                assert receiver.recv_into(bytearray(5)) == 5

        with pytest.raises(Forged):
            receive_all()


def test_what_an_end_has_sent_is_no_answer_to_it(sealed: tuple[SealedSocket, SealedSocket]) -> None:
    one, other = pair()
    with SealedSocket(one, sends=FIRST, receives=SECOND) as sender, other:
        sender.send(b"reflect")
        other.sendall(frames.receive_bytes(other, 4 + 7 + 16))
        with pytest.raises(Forged):
            sender.recv_into(bytearray(7))


@pytest.mark.parametrize("cut", [0, 3, 4, 10, -1])
def test_an_end_in_the_middle_of_a_record_gives_none_of_it(cut: int) -> None:
    [record] = recorded(b"content")
    with receiver_of(record[:cut]) as receiver:
        into = bytearray(7)
        assert receiver.recv_into(into) == 0
        assert into == bytes(7)
        with pytest.raises(LinkBroken, match="closed the connection"):
            frames.receive_exactly(receiver, memoryview(into))


@pytest.mark.parametrize("length", [0, RECORD_BYTES_MAX + 1, 0xFFFFFFFF])
def test_a_length_that_no_record_has_is_not_waited_for(length: int) -> None:
    with receiver_of(length.to_bytes(4, "big") + bytes(100)) as receiver, pytest.raises(Forged, match="a length"):
        receiver.recv_into(bytearray(7))


def test_a_record_that_comes_slowly_is_waited_for_as_often_as_it_takes() -> None:
    """As a link waits: in calls of a heartbeat, none of which loses what has come."""
    [record] = recorded(b"content")
    one, other = pair()
    with one, SealedSocket(other, sends=SECOND, receives=FIRST) as receiver:
        frames.wait_in_kernel(receiver, 0.01)
        into = bytearray(7)
        for byte in record[:-1]:
            one.sendall(bytes([byte]))
            with pytest.raises(BlockingIOError):
                receiver.recv_into(into, 0, socket.MSG_WAITALL)
        one.sendall(record[-1:])
        receiver.settimeout(60.0)
        assert receiver.recv_into(into) == 7
        assert into == b"content"


def test_a_record_that_trickles_holds_no_caller() -> None:
    """Each byte comes in the socket's own time limit: who waits has to be able to stop."""
    [record] = recorded(b"content" * 100)
    one, other = pair()
    with one, SealedSocket(other, sends=SECOND, receives=FIRST) as receiver:
        receiver.settimeout(60.0)
        into, left = bytearray(700), threading.Event()

        def trickle() -> None:
            for byte in record:
                one.sendall(bytes([byte]))
                if not left.is_set():
                    time.sleep(0.005)

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(Partly):
            receiver.recv_into(into)
        with pytest.raises(LinkBroken, match="timed out after 0 of 700 bytes"):
            frames.receive_exactly(receiver, memoryview(into), time.monotonic() + 0.2)
        left.set()
        frames.receive_exactly(receiver, memoryview(into), time.monotonic() + 60.0)
        thread.join(60.0)
    assert into == b"content" * 100


def test_a_record_that_was_sent_in_part_is_the_last(sealed: tuple[SealedSocket, SealedSocket]) -> None:
    """What came after it would stand in the middle of it."""
    sender, receiver = sealed
    sender.settimeout(0.05)

    def send_until_full() -> None:
        while True:
            sender.send(os.urandom(RECORD_BYTES_MAX))

    with pytest.raises(TimeoutError):
        send_until_full()
    with pytest.raises(Forged, match="failed before"):
        sender.send(b"more")
    receiver.send(b"refused")
    sender.settimeout(60.0)
    into = bytearray(7)
    assert sender.recv_into(into) == 7, "the other direction has its own state"


def test_nothing_passes_beside_the_records(sealed: tuple[SealedSocket, SealedSocket]) -> None:
    one, _ = sealed
    for call in (
        lambda: one.recv(1),
        lambda: one.sendall(b"x"),
        lambda: one.sendmsg([b"x"]),
        lambda: one.recvmsg(1),
        lambda: one.sendto(b"x", ("127.0.0.1", 1)),
        lambda: one.sendfile(io.BytesIO(b"x")),
        lambda: one.recvfrom(1),
        lambda: one.recvmsg_into([bytearray(1)]),
        lambda: one.recvfrom_into(bytearray(1)),
    ):
        with pytest.raises(NotImplementedError):
            call()
