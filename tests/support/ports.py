"""Ports of loopback that stay a test's own though nobody listens there for a while; as a pytest plugin, too.

Tests beside this one take free ports all the time: one that a killed process listened on may be another's before the
process is there again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Self

import pytest


class KeptPorts:
    """By name, for processes that are started, or started again, under a known address: `with KeptPorts() as ports`.

    Each is bound and not listened on. So whoever connects is refused, whoever asks for it by its number gets it (with
    SO_REUSEADDR, as servers do), and the system gives it to nobody else.
    """

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(self, name: str) -> int:
        """The same at every call."""
        if name not in self._held:
            holder = self._held[name] = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        port: int = self._held[name].getsockname()[1]
        return port

    def close(self) -> None:
        for holder in self._held.values():
            holder.close()


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is the test's own until its end."""
    with KeptPorts() as ports:
        yield ports.of("only")
