"""`paramserver push`: a checkpoint directory becomes a version, its tensors and plain files as they are.

Invariants: the version is reported once it is sealed, or further, and never before; a directory that cannot be
published is refused before anything moves.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from paramserver.client.checkpoint import plain_files, read_checkpoint
from paramserver.client.progress import bytes_progress
from paramserver.client.publisher import publish
from paramserver.client.relay import RelayClient
from paramserver.client.sources import FileSource, TensorSource
from paramserver.config import show_bytes
from protos import terminal
from protos.terminal import say
from protos.version_labels import VersionLabels

FORMAT = {"format": "pt"}
"""`transformers` requires it of a file's metadata; the directory's own metadata comes over it."""


async def push(
    relay: RelayClient,
    directory: Path,
    model: str,
    *,
    step: int,
    run: str | None,
    copies: int,
    allow_change: bool,
    wait_s: float,
    **labels: Unpack[VersionLabels],
) -> None:
    """Publishes `directory` and waits until it is sealed, and `copies` relays hold it verified. Closes the client."""
    console = terminal.console(stderr=True)
    checkpoint, files = read_checkpoint(directory), plain_files(directory)
    sizes = [one.spec.size_bytes for one in checkpoint.tensors]
    run = run or f"push-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    with bytes_progress(console) as progress:
        bar = progress.add_task(model, total=sum(sizes))
        tensors = [
            dataclasses.replace(one, read=_counted(one, lambda num: progress.advance(bar, num)))
            for one in checkpoint.tensors
        ]
        async with relay as client:
            ticket = await publish(
                client,
                model,
                tensors,
                step=step,
                run=run,
                metadata={**FORMAT, **checkpoint.metadata},
                refuse_change=not allow_change,
                files=files,
                **labels,
            )
            await ticket.wait_copies(copies, wait_s)
            holders = await ticket.holders()
    say(
        f"{model} version {ticket.version} (step {step}, run {run}) is sealed, on {', '.join(holders)}: "
        f"{len(tensors)} tensors, {show_bytes(sum(sizes))}, and {_named(files)}{_left(checkpoint.left_behind)}",
        err=True,
    )


def _counted(source: TensorSource, count: Callable[[int], None]) -> Callable[[], memoryview]:
    def read() -> memoryview:
        view = source.read()
        count(view.nbytes)
        return view

    return read


def _named(files: tuple[FileSource, ...]) -> str:
    return ", ".join(file.name for file in files) or "no other files"


def _left(names: tuple[str, ...]) -> str:
    return f"; not of its weights, and left behind: {', '.join(names)}" if names else ""
