"""A TCP proxy in a thread of the test: it holds back what one side sends, cuts, and flips a byte on its way.

    with Middleman(etcd) as between:                # listens on `between.address`
        between.hold("answers")                     # requests arrive, answers wait here
        between.release(); between.cut()

Invariants:
- what is held is kept in order and delivered on `release`, unless `cut` drops it with its connections;
- one byte of one connection is changed, and `flipped` says so once it went out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Literal, Self

Side = Literal["requests", "answers"]
_BLOCK = 64 << 10
_FLIP = 0x01


class Middleman:
    """Stands between those who connect to `address` and whoever listens at `target` ("host:port")."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: dict[Side, threading.Event] = {"requests": threading.Event(), "answers": threading.Event()}
        self.release()
        self._mutex = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._refusing = False
        self._flip_at: int | None = None
        self.flipped = threading.Event()
        self.reached = threading.Event()  # somebody connected
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60.0)

    def hold(self, *sides: Side) -> None:
        """From now on what comes from the askers ("requests") or to them ("answers") waits here."""
        for side in sides:
            self._open[side].clear()

    def release(self) -> None:
        for side in self._open.values():
            side.set()

    def cut(self) -> None:
        """Ends every connection, what was held included, and takes no new one until `mend`."""
        with self._mutex:
            self._refusing = True
            for sock in self._socks:
                _shut(sock)

    def mend(self) -> None:
        with self._mutex:
            self._refusing = False
        self.release()

    def flip(self, answer_byte: int) -> None:
        """Changes one bit of that byte of the answers on the next connection that gets so far."""
        self._flip_at = answer_byte

    def _accept(self) -> None:
        while True:
            try:
                asker, _ = self._listener.accept()
            except OSError:
                return
            self.reached.set()
            thread = threading.Thread(target=self._serve, args=(asker,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, asker: socket.socket) -> None:
        host, _, port = self._target.rpartition(":")
        with asker, contextlib.suppress(OSError), socket.create_connection((host, int(port)), 2.0) as holder:
            holder.settimeout(None)
            with self._mutex:
                if self._refusing:
                    return
                self._socks |= {asker, holder}
            back = threading.Thread(target=self._pump, args=(holder, asker, "answers"))
            back.start()
            self._pump(asker, holder, "requests")
            back.join()
            with self._mutex:
                self._socks -= {asker, holder}

    def _pump(self, source: socket.socket, target: socket.socket, side: Side) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(_BLOCK):
                self._open[side].wait()
                target.sendall(self._changed(data, passed) if side == "answers" else data)
                passed += len(data)
        for sock in (source, target):
            _shut(sock)

    def _changed(self, data: bytes, passed: int) -> bytes:
        with self._mutex:
            at = None if self._flip_at is None else self._flip_at - passed
            if at is None or not 0 <= at < len(data):
                return data
            self._flip_at = None
            self.flipped.set()
        return data[:at] + bytes([data[at] ^ _FLIP]) + data[at + 1 :]


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
