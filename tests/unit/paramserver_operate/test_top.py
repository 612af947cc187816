"""`paramserver top`: a relay in a terminal, once and as it goes on."""

from __future__ import annotations

import dataclasses
import io

from click.testing import CliRunner
from rich.console import Console, Group

from paramserver.cli import cli
from paramserver.client import TransferStatus
from paramserver.top import Arrivals, view
from tests.unit.paramserver_operate.test_views import MIB, STATUS


def printed(arrivals: Arrivals, away: str = "") -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(Group(*view(STATUS, arrivals, away)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_view_has_what_status_has_and_the_rate_of_what_comes() -> None:
    arrivals = Arrivals()
    arrivals.look(STATUS, now=10.0)
    assert arrivals.rates == {}, "one look is no rate"
    later = (TransferStatus("policy", 9, "", 15 * MIB, 20 * MIB), TransferStatus("policy", 11, "b", 1, 20 * MIB))
    arrivals.look(dataclasses.replace(STATUS, transfers=later), now=12.0)
    assert arrivals.rates == {("policy", 9): 5 * MIB}
    text = printed(arrivals)
    assert "policy version 9 comes at 5 MiB/s" in text
    assert "at the tail: c" in text
    assert "engine e0 refused version 8" in text


def test_a_relay_that_is_away_is_said_above_what_it_said_last() -> None:
    first, *rest = printed(Arrivals(), away="no response, this is what it said last: gone").splitlines()
    assert first.startswith("no response")
    assert any(line.startswith("relay m") for line in rest)


def test_without_a_terminal_or_a_relay_it_says_so() -> None:
    told = CliRunner().invoke(cli, ["top", "--relay", "127.0.0.1:9"])
    assert told.exit_code == 1
    assert "add --once" in told.output
    nobody = CliRunner().invoke(cli, ["top", "--relay", "127.0.0.1:9", "--once"])
    assert nobody.exit_code == 1
    assert "error: " in nobody.output
