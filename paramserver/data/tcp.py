"""The fetching side of the data port over plain TCP sockets, which are received straight into the mapped pool."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from paramserver.core.records import Manifest
from paramserver.core.transfer import Want
from paramserver.data import arrival, frames
from paramserver.data.frames import Greeting, Header, Kind, LinkBroken
from paramserver.data.secured import DataAccess, open_connection
from paramserver.data.transport import Arrived, Begun, Source, tell_nobody

CONNECT_TIMEOUT_S = 2.0

RECORD_S = 20.0
"""A wait for bytes that may be handed out ends so long after a silence would have, although some come: whoever stands
in between can let a record of a sealed connection trickle, and it would hold its stripe for hours.

A record has 256 KiB at most, so 13 KiB/s is enough. It is generous, as other traffic may share a slow link.
"""


class DialTcp(Protocol):
    """A `Dial` whose links are of this kind."""

    def __call__(self, source: Source, greeting: Greeting, begun: Begun = ..., /) -> TcpLink: ...


class TcpLink:
    """A connection on which silence longer than `silence_s` counts as death.

    Bytes and ALIVE are signs of life. So is what arrives behind a lost packet, which the kernel keeps back until that
    one was sent again: on a slow link with losses that takes longer than `silence_s`.
    """

    transport = "tcp"

    def __init__(
        self,
        source: Source,
        greeting: Greeting,
        *,
        silence_s: float = frames.SILENCE_S,
        bind_host: str = "",
        access: DataAccess | None = None,
        begun: Begun = tell_nobody,
    ) -> None:
        """`access`: with which the connection is opened and protected; None: it is neither."""
        self.source = source
        self.silence_s = silence_s
        self._requested: deque[Want] = deque()
        self._num_behind_lost = 0
        opened = open_connection(source.address, CONNECT_TIMEOUT_S, greeting, access, bind_host=bind_host)
        self._sock, self.rtt_s = opened
        self._ending = threading.Lock()  # or a descriptor that another has meanwhile would be shut down
        try:
            begun(self)
            self.welcome = frames.receive_welcome(self._sock, silence_s=silence_s)
        except BaseException:
            self.close()
            raise
        frames.wait_in_kernel(self._sock, frames.HEARTBEAT_S)

    @property
    def manifest(self) -> Manifest:
        return self.welcome.manifest

    def fileno(self) -> int:
        return self._sock.fileno()

    def request(self, want: Want) -> None:
        self.send_request(want)
        self._requested.append(want)

    def send_request(self, want: Want) -> None:
        flags = frames.FLAG_SUSPECT if want.suspect else 0
        frames.send_all(self._sock, frames.REQUEST.pack(Kind.GET, flags, want.index, want.from_byte))

    def taken(self, index: int) -> None:
        frames.send_all(self._sock, frames.REQUEST.pack(Kind.TAKEN, 0, index, 0))

    def alive(self) -> None:
        frames.send_all(self._sock, frames.REQUEST.pack(Kind.ALIVE, 0, 0, 0))

    def receive(self, place: Callable[[int], memoryview], received: Callable[[int, int], None]) -> Arrived:
        while (header := self.header()).kind is Kind.ALIVE:
            pass
        want = self._requested.popleft()
        target = place(want.index)
        if header.kind is not Kind.DATA or (header.index, header.from_byte, header.from_byte + header.length) != (
            want.index,
            want.from_byte,
            len(target),
        ):  # else a damaged header would have bytes written over another chunk
            raise LinkBroken(f"{header} answers chunk {want.index} from byte {want.from_byte}")
        began_at = time.monotonic()
        upto = header.from_byte
        chunk = arrival.begin(self._sock, target, upto)
        while upto < len(target):
            upto += self._some(chunk.receive)
            received(header.index, upto)
        return Arrived(header.index, header.digest, header.length, began_at, chunk.digest())

    def break_off(self) -> None:
        with self._ending, contextlib.suppress(OSError):  # the other end has left already, or this one
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._ending:
            self._sock.close()

    def header(self) -> Header:
        """The header of the next frame. Raises the error of a refusal."""
        buffer = bytearray(frames.HEADER.size)
        filled = 0
        while filled < len(buffer):
            rest = memoryview(buffer)[filled:]
            filled += self._some(functools.partial(self._sock.recv_into, rest, 0, socket.MSG_WAITALL))
        kind, index, from_byte, length, digest = frames.HEADER.unpack(buffer)
        if kind == Kind.REFUSED:
            self._sock.settimeout(self.silence_s)
            raise frames.receive_refusal(self._sock, Header(Kind.REFUSED, length=length))
        if kind not in (Kind.DATA, Kind.ALIVE, Kind.READY):
            raise LinkBroken(f"unexpected frame kind {kind}")
        return Header(Kind(kind), index, from_byte, length, digest)

    def raise_refusal(self, timeout_s: float) -> None:
        """Raises what ends the connection within `timeout_s`: a refusal, or LinkBroken; returns when nothing does."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if frames.readable([self._sock], left):
                self.header()

    def _some(self, receive: Callable[[], int]) -> int:
        """At least one byte by `receive`, sending ALIVE while none comes; LinkBroken after `silence_s` without any, or
        `RECORD_S` later where some come and none may be handed out.

        Silence is a sum of waits, each of a heartbeat at most, and no difference of times: a process that was itself
        stopped for a while, perhaps with its whole host, must read what came meanwhile before it calls the peer dead.
        """
        waited_from, silent_s, held_s = time.monotonic(), 0.0, 0.0
        while True:
            try:
                num = receive()
            except BlockingIOError as error:
                now = time.monotonic()
                waited_s, waited_from = min(now - waited_from, frames.LOOK_S_MAX), now
                silent_s, held_s = silent_s + waited_s, held_s + waited_s
                if self._is_sign_of_life(error):
                    silent_s = 0.0
                self._check_wait(silent_s, held_s)
                if not isinstance(error, frames.Partly):
                    self.alive()
            except OSError as error:
                raise LinkBroken(f"{self.source.name}: {error}") from error
            else:
                if num == 0:
                    raise LinkBroken(f"{self.source.name} closed the connection")
                return num

    def _is_sign_of_life(self, error: BlockingIOError) -> bool:
        if isinstance(error, frames.Partly):
            return True
        before, self._num_behind_lost = self._num_behind_lost, frames.out_of_order(self._sock)
        return self._num_behind_lost != before

    def _check_wait(self, silent_s: float, held_s: float) -> None:
        if silent_s > self.silence_s:
            raise LinkBroken(f"{self.source.name} was silent for {self.silence_s} s") from None
        if held_s > self.silence_s + RECORD_S:
            raise LinkBroken(f"no record of {self.source.name} was whole within {held_s:.0f} s") from None


def dialer(silence_s: float = frames.SILENCE_S, *, access: DataAccess | None = None) -> DialTcp:
    def dial(source: Source, greeting: Greeting, begun: Begun = tell_nobody) -> TcpLink:
        return TcpLink(source, greeting, silence_s=silence_s, access=access, begun=begun)

    return dial
