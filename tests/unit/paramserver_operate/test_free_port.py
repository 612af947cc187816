"""Ports that are chosen for an etcd of one's own: free now, and free when it comes back to them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paramserver.membership import local
from paramserver.membership.local import free_port


def test_nobody_listens_on_it_and_the_kernel_gives_it_to_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "EPHEMERAL_PORTS", tmp_path / "range")
    local.EPHEMERAL_PORTS.write_text("25000\t60999\n")
    for _ in range(20):
        port = free_port()
        assert local.PORT_MIN <= port < 25_000
        socket.create_server(("127.0.0.1", port)).close()


def test_one_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        taken = listener.getsockname()[1]
        free = free_port(besides=taken)
        monkeypatch.setattr(local.random.SystemRandom, "sample", lambda *_: [taken, free - 1, free])
        assert free_port(besides=free - 1) == free


@pytest.mark.parametrize("told", ["", "1024 65535"])
def test_where_the_kernel_leaves_no_room_it_is_a_usual_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str
) -> None:
    monkeypatch.setattr(local, "EPHEMERAL_PORTS", tmp_path / "range")
    if told:
        local.EPHEMERAL_PORTS.write_text(told)
    assert local.PORT_MIN <= free_port() < local.EPHEMERAL_PORT_USUAL
