"""The data port, whatever bytes come: each connection costs itself alone, and ends."""

from __future__ import annotations

import contextlib
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from paramserver.data import frames
from protos.errors import LaminarError
from tests.fuzz.cases import EXAMPLES, Case, cases
from tests.fuzz.watched import unharmed
from tests.support.relays import Relays
from trainer_client import Publisher

ANSWER_BYTES_MAX = 1 << 20
PATIENCE_S = 1.0
"""A relay waits for a version that may yet come; the client does not."""
AT_ONCE = 8

pytestmark = pytest.mark.slow


def test_a_relay_outlives_any_bytes_on_its_data_port(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a")
    with Publisher(daemon.ready["grpc"], "policy") as publisher:
        publisher.publish({"w": np.arange(5000, dtype=np.float32)}, step=1)
    address = daemon.ready["data"]
    talk(address, next(cases("frames", 0)))
    with unharmed(daemon):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(lambda case: talk(address, case), cases("frames", EXAMPLES * 20)))
        assert sum(map(bool, answers)) > EXAMPLES, "some of it is answered"
    by_name = {case.name: answer for case, answer in zip(cases("frames", 0), answers, strict=False)}
    assert fetched(by_name["fetch a chunk"]), "what is whole is served as before"
    assert fetched(talk(address, next(c for c in cases("frames", 0) if c.name == "fetch a chunk")))


def talk(address: str, case: Case) -> bytes:
    """Sends the case whole, and returns what was answered until the end or for a while."""
    host, _, port = address.rpartition(":")
    found = b""
    with socket.create_connection((host, int(port)), 30.0) as sock, contextlib.suppress(OSError):
        sock.sendall(case.data)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(PATIENCE_S)
        while len(found) < ANSWER_BYTES_MAX and (more := sock.recv(1 << 16)):
            found += more
    return found


def fetched(answer: bytes) -> bool:
    """Whether a welcome came first, and then a chunk's bytes."""
    kinds = []
    while len(answer) >= frames.HEADER.size:
        kind, _, _, length, _ = frames.HEADER.unpack(answer[: frames.HEADER.size])
        answer = answer[frames.HEADER.size + length :]
        kinds.append(kind)
    return [kind for kind in kinds if kind != frames.Kind.ALIVE][:2] == [frames.Kind.WELCOME, frames.Kind.DATA]


class _Replayed:
    """Both ends of a socket pair: what one case sends is what the reader under test receives."""

    def __init__(self, data: bytes) -> None:
        self.near, self._far = socket.socketpair()
        self._far.sendall(data)
        self._far.shutdown(socket.SHUT_WR)

    def __enter__(self) -> socket.socket:
        return self.near

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self._far.close()


@pytest.mark.parametrize("reader", ["greeting", "welcome", "header"])
def test_a_reader_of_frames_raises_what_it_says_it_does(reader: str) -> None:
    """Those who connect to a relay read a stranger's frames as well."""
    for case in cases("frames", EXAMPLES * 40):
        data = case.data
        if reader == "welcome":  # the same bodies, behind the header of an answer
            kind = frames.Kind.REFUSED if len(data) % 2 else frames.Kind.WELCOME
            data = struct.pack("!BIII16s", kind, 0, 0, len(data[8:]), bytes(16)) + data[8:]
        with _Replayed(data) as sock:
            try:
                if reader == "greeting":
                    frames.receive_greeting(sock)
                elif reader == "welcome":
                    frames.receive_welcome(sock, silence_s=5.0)
                else:
                    frames.receive_header(sock)
            except LaminarError:
                continue  # the connection is broken, or refused by name
            except Exception as error:
                raise AssertionError(f"{case}: {error!r}") from error
