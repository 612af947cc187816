"""A TLS connection that is cut without close_notify does not look like one that the peer has ended."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

from gateway.engines.base import system_tls
from protos.access.credentials import Credentials
from protos.access.tls import new_context, with_true_ends

IGNORED = ssl.OP_IGNORE_UNEXPECTED_EOF


def as_python_3_11_2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.options |= IGNORED
    return context


def read_to_the_cut(reading: ssl.SSLContext, cutting: ssl.SSLContext) -> bytes:
    """What `reading` reads once the other end is cut."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60.0)
        theirs.settimeout(60.0)

        def serve() -> None:
            with cutting.wrap_socket(theirs, server_side=True) as served:
                served.sendall(b"half")
                os.close(served.detach())  # without close_notify

        server = threading.Thread(target=serve)
        server.start()
        with reading.wrap_socket(ours, server_hostname="localhost", suppress_ragged_eofs=False) as sock:
            assert sock.recv(4) == b"half"
            server.join()
            return sock.recv(1)


def test_a_cut_is_no_end_where_python_would_have_it_so(fleet: Path) -> None:
    cutting = new_context(Credentials(fleet / "relay").material, serving=True)
    reading = as_python_3_11_2(new_context(Credentials(fleet / "gateway").material, serving=False))
    assert read_to_the_cut(reading, cutting) == b""
    with pytest.raises(ssl.SSLError, match="EOF"):  # SSLEOFError in releases after 3.11.2
        read_to_the_cut(with_true_ends(reading), cutting)


@pytest.mark.parametrize("serving", [False, True])
def test_contexts_of_a_fleet_tell_a_cut_from_an_end(fleet: Path, serving: bool) -> None:
    assert not new_context(Credentials(fleet / "relay").material, serving=serving).options & IGNORED


def test_so_do_those_of_the_hosts_cas() -> None:
    assert not system_tls().options & IGNORED
