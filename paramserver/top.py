"""`paramserver top`: a relay in a terminal, as its status changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live

from paramserver.cli_views import describe, show_status
from paramserver.client.relay import RelayClient, RelayStatus
from paramserver.config import show_bytes
from protos import terminal
from protos.errors import LaminarError, Unavailable
from protos.terminal import line

LOOK_S = 1.0
"""Between two requests for the status."""


@dataclass(slots=True)
class Arrivals:
    """How fast versions come to the relay, from one look to the next."""

    at: float = 0.0
    done: Mapping[tuple[str, int], int] = field(default_factory=dict)
    rates: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def look(self, status: RelayStatus, now: float) -> None:
        """Bytes per second of each version that was on its way at the look before, too."""
        done = {(one.model, one.version): one.bytes_done for one in status.transfers}
        passed = now - self.at
        self.rates = {key: (n - self.done[key]) / passed for key, n in done.items() if key in self.done and passed > 0}
        self.at, self.done = now, done


async def run(client: RelayClient, *, only_once: bool) -> None:
    """Until cancelled. Raises LaminarError where the relay does not respond at first."""
    if only_once:
        show_status(await client.status(), as_json=False)
        return
    console = terminal.console()
    if not console.is_terminal:
        raise LaminarError("standard output is no terminal", hint="add --once")
    await _follow(client, console)


async def _follow(client: RelayClient, console: Console) -> None:
    status, arrivals, away = await client.status(), Arrivals(), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*view(status, arrivals, away)), refresh=True)
            await asyncio.sleep(LOOK_S)
            try:
                status, away = await client.status(), ""
                arrivals.look(status, time.monotonic())
            except Unavailable as e:
                away = f"no response, this is what it said last: {e}"


def view(status: RelayStatus, arrivals: Arrivals, away: str = "") -> Iterator[RenderableType]:
    """`away`: why there is nothing newer."""
    if away:
        yield line(away, "bold red")
    yield from describe(status)
    for (model, version), rate in arrivals.rates.items():
        yield line(f"{model} version {version} comes at {show_bytes(int(rate))}/s", "cyan")
