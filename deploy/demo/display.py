"""Where the view goes: a live screen on a terminal, lines of text anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from deploy.demo.recording import Recording
from deploy.demo.screen import Progress, events, line, screen

LINE_INTERVAL_S = 5.0


class Display(Protocol):
    """Shows a run while it lasts; entered once, updated often."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, recording: Recording, progress: Progress) -> None: ...


class LiveDisplay:
    """The whole view, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, recording: Recording, progress: Progress) -> None:
        self._live.update(screen(recording, progress), refresh=True)


class PlainDisplay:
    """Each event once, and a line of state every few seconds: for logs and pipes."""

    def __init__(self) -> None:
        self._shown: set[tuple[float, str]] = set()
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.flush()

    def update(self, recording: Recording, progress: Progress) -> None:
        for t, event in events(recording):
            if (t, event) not in self._shown:
                self._shown.add((t, event))
                print(f"[{t - progress.zero_unix_s:5.0f} s] {event}")
        now = time.monotonic()
        if now >= self._next_line_s:
            self._next_line_s = now + LINE_INTERVAL_S
            print(line(recording, progress))
        sys.stdout.flush()


def choose_display() -> Display:
    """Live on a terminal, plain otherwise."""
    console = Console()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay()
