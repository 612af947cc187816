"""`python -m paramserver.data.nixl.process FD`: a process of its own in which the NIXL library moves chunks.

Invariants:
- it maps only the files it was given, so a peer that requests a wrong address reaches nothing else, and a library that
  aborts takes nothing along but one link;
- what was not confirmed to have ended ends with the process: afterwards nothing is read from or written into the pool;
- it ends with the relay: the other end of its socket closes then.

Standard library, msgspec and NIXL only: it starts in well under a second.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import mmap
import os
import secrets
import select
import socket
import sys
from typing import Any

import msgspec

from protos.decoding import decode_json

VARIANTS = ("nixl_cu13", "nixl_cu12")  # by name: the package `nixl` would import torch to choose between them
POLL_S = 0.0002  # the library moves bytes only within calls: so often while some are on their way
MESSAGE_BYTES_MAX = 1 << 20
FDS_PER_MESSAGE = 128


class Map(msgspec.Struct, frozen=True, tag=True):
    """Files of these sizes, whose descriptors come along; `more` follow in another message."""

    sizes: list[int]
    more: bool


class Peer(msgspec.Struct, frozen=True, tag=True):
    """Whose memory is going to be read, as NIXL describes it."""

    metadata: bytes


class Read(msgspec.Struct, frozen=True, tag=True):
    """From the peer's memory at `address` into the own file `file` at `offset`, on behalf of chunk `index`."""

    index: int
    file: int
    offset: int
    address: int
    length: int


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Whether the peer may be reading now: it is served while it may."""

    now: bool


class Unmap(msgspec.Struct, frozen=True, tag=True):
    """Forget files and peer; nothing is on its way."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The library works."""


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The other side's means of reading: NIXL's metadata, and where each file begins (0: it is empty)."""

    metadata: bytes
    addresses: list[int]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The read for chunk `index` has ended well."""

    index: int


class Unmapped(msgspec.Struct, frozen=True, tag=True):
    """Ready for another link."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The error with which the process ends."""

    why: str


Order = Map | Peer | Read | Lend | Unmap
Answer = Started | Mapped | Done | Unmapped | Failed


class NixlAgent:
    """One NIXL agent and the files it may touch."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(MESSAGE_BYTES_MAX))
        self._api = _load()
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = self._api.nixl_agent(f"laminar-{secrets.token_hex(8)}", config)
        self._maps: list[mmap.mmap | None] = []
        self._addresses: list[int] = []
        self._registered: list[Any] = []
        self._peer: str = ""
        self._reads: dict[int, Any] = {}
        self._lending = False

    def run(self) -> None:
        self._send(Started())
        while True:
            busy = self._reads or self._lending
            if select.select([self._sock], [], [], POLL_S if busy else None)[0]:
                length, fds = _receive(self._sock, self._buffer)
                if not length:
                    return
                self._obey(decode_json(self._buffer[:length], Order), fds)
            if self._reads:
                self._progress()
            elif self._lending:
                self._agent.get_new_notifs()

    def _obey(self, order: Order, fds: list[int]) -> None:
        match order:
            case Map(sizes, more):
                self._map(sizes, fds)
                if not more:
                    self._send(Mapped(self._agent.get_agent_metadata(), self._addresses))
            case Peer(metadata):
                self._peer = self._agent.add_remote_agent(metadata)
            case Read():
                self._begin(order)
            case Lend(now):
                self._lending = now
            case Unmap():
                self._unmap()
                self._send(Unmapped())

    def _map(self, sizes: list[int], fds: list[int]) -> None:
        for size, fd in zip(sizes, fds, strict=True):
            found = mmap.mmap(fd, size) if size else None
            os.close(fd)
            address = _address(found) if found is not None else 0
            if address:
                rows = self._agent.get_reg_descs([(address, size, 0, "")], "DRAM")
                self._registered.append(self._agent.register_memory(rows))
            self._maps.append(found)
            self._addresses.append(address)

    def _begin(self, order: Read) -> None:
        here = self._agent.get_xfer_descs([(self._addresses[order.file] + order.offset, order.length, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(order.address, order.length, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", here, there, self._peer)
        self._reads[order.index] = handle
        self._note(order.index, self._agent.transfer(handle))

    def _progress(self) -> None:
        for index, handle in list(self._reads.items()):
            self._note(index, self._agent.check_xfer_state(handle))

    def _note(self, index: int, state: str) -> None:
        if state == "ERR":
            raise RuntimeError(f"the read for chunk {index} failed")
        if state == "DONE":
            self._agent.release_xfer_handle(self._reads.pop(index))
            self._send(Done(index))

    def _unmap(self) -> None:
        assert not self._reads, "reads are under way"
        self._lending = False
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
            self._peer = ""
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        for found in self._maps:
            if found is not None:
                found.close()
        self._maps, self._addresses, self._registered = [], [], []

    def _send(self, answer: Answer) -> None:
        self._sock.send(msgspec.json.encode(answer))


def _load() -> Any:
    for name in VARIANTS:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise RuntimeError("the package nixl is not installed")


def _address(found: mmap.mmap) -> int:
    """The export that ctypes takes is given back at once, so that the mapping can be closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(found))


def _receive(sock: socket.socket, buffer: memoryview) -> tuple[int, list[int]]:
    """The length of the next message in `buffer` (0: the relay is gone), and the descriptors that came with it."""
    fds = array.array("i")
    length, control, _, _ = sock.recvmsg_into([buffer], socket.CMSG_SPACE(FDS_PER_MESSAGE * fds.itemsize))
    for level, kind, body in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    return length, list(fds)


def main() -> None:
    given = int(sys.argv[1])
    sock = socket.socket(fileno=os.dup(given))  # the lowest number: in the relay it may be one that select refuses
    os.close(given)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")  # a core or a backtrace of it helps nobody
    try:
        NixlAgent(sock).run()
    except Exception as error:  # noqa: BLE001  (reported, whatever the library raised)
        try:
            sock.send(msgspec.json.encode(Failed(f"{type(error).__name__}: {error}")))
        except OSError:
            os._exit(1)
    os._exit(0)  # the library's own end has been seen to crash


if __name__ == "__main__":
    main()
