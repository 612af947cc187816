"""`gateway faultkit`: scripted engines to test a gateway, a router or a client with."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import click

from gateway.faultkit.engine import ScriptedEngine
from gateway.faultkit.script import RESUMABLE, Cut, CutKind, cuts_by_seed
from protos.errors import LaminarError
from protos.options import PORT, PORT_MAX
from protos.process import cannot_listen, write_ready_file
from protos.terminal import Failed


@click.command(epilog="A seed's draws are the same in every run, request by request of an engine.")
@click.option("--engines", "num_engines", type=click.IntRange(min=1, max=64), default=2, help="Engines to start.")
@click.option("--port", type=PORT, default=0, help="Port of the first engine; the others follow. 0: free ones.")
@click.option("--seed", default=0, help="Seed of the draws; each engine has its own from it.")
@click.option("--cuts", "share", type=click.FloatRange(0, 1), default=0.5, help="Share of requests that are cut.")
@click.option("--after-max", type=click.IntRange(min=1), default=64, help="A cut comes before this token.")
@click.option("--kinds", default=",".join(RESUMABLE), help="Kinds of cuts, separated by commas.")
@click.option("--chunk", type=click.IntRange(min=1), default=4, help="Tokens in an event.")
@click.option("--pause-s", type=click.FloatRange(min=0), default=0.02, help="Time before every event.")
@click.option(
    "--revive-s", type=click.FloatRange(min=0), default=1.0, help="Time after which a dead engine comes back."
)
@click.option("--vocab-size", type=click.IntRange(min=4), default=1000, help="Token ids are below it.")
@click.option("--version", default="0", help="The weight version that the engines hold, and report.")
@click.option("--version-told", help="The version that streams report instead: one that changed in mid-request.")
@click.option("--ready-file", type=click.Path(dir_okay=False, path_type=Path), help="JSON with the addresses, once up.")
def faultkit(
    num_engines: int,
    port: int,
    seed: int,
    share: float,
    after_max: int,
    kinds: str,
    ready_file: Path | None,
    **how: object,
) -> None:
    """Scripted engines in vLLM's dialect that die, hang, repeat, shorten, abort or break off, by seed.

    Every token and logprob follows from the ids before it, so an answer through a gateway can be compared with the
    uncut one (`gateway.faultkit.script.said`): a lost or doubled token changes everything after it.

    \b
    Kinds of cuts, by what a client of the engine sees:
      500, 503, 400, silent     a status and no stream; 400 is the request's fault; no answer at all
      reset, closed, torn_500   the connection breaks, between or within events, or within an error's body
      eof, done, abort          the stream ends, but without a finish reason, or with "abort"
      error_event, hang         an error as the last event; nothing more, with the connection open
      malformed, not_utf8, huge_line, huge_id, no_logprobs    events that cannot be decoded
      repeat, shorten           an event comes twice, or lacks a token, then nothing: the count in its usage shows it
      death                     as kill -9, for all its streams; back after --revive-s, as another incarnation
      version                   no cut: ends whole, and reports another version for its later tokens
    400 and version are drawn only when they are named.

    \b
      gateway faultkit --engines 2 --port 9000 --seed 7
      gateway serve --model policy --tokenizer DIR --stall-timeout-s 2 \\
          --engine e0=vllm=http://127.0.0.1:9000 --engine e1=vllm=http://127.0.0.1:9001
    """
    chosen = _kinds(kinds)
    if port and port + num_engines - 1 > PORT_MAX:
        raise click.BadParameter(f"{num_engines} engines from {port} on end above {PORT_MAX}", param_hint="--port")
    engines = [
        ScriptedEngine(
            f"e{i}",
            port=port and port + i,
            draw=cuts_by_seed(seed * num_engines + i, share, after_max, chosen),
            **how,  # type: ignore[arg-type]  # fields of the engine, by click's types
        )
        for i in range(num_engines)
    ]
    try:
        asyncio.run(_serve(engines, ready_file))
    except LaminarError as e:
        raise Failed(str(e)) from e


def _kinds(text: str) -> tuple[CutKind, ...]:
    known = get_args(CutKind)
    chosen = tuple(kind for kind in text.split(",") if kind)
    if unknown := [kind for kind in chosen if kind not in known]:
        raise click.BadParameter(f"no {', '.join(unknown)}; there are {', '.join(known)}", param_hint="--kinds")
    if not chosen:
        raise click.BadParameter("no cut is named; --cuts 0 leaves streams whole", param_hint="--kinds")
    return chosen  # type: ignore[return-value]  # each is one of the literal's


async def _serve(engines: list[ScriptedEngine], ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    drawn: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            engine.draw = _counting(engine, drawn)
            try:
                await stack.enter_async_context(engine)
            except OSError as error:
                raise cannot_listen("127.0.0.1", engine.port, error) from error
            click.echo(f"{engine.name} at {engine.url}")
        write_ready_file(ready_file, {engine.name: engine.url for engine in engines})
        await stop.wait()
    num_requests = sum(len(engine.requests) for engine in engines)
    click.echo(f"{num_requests} requests; " + ", ".join(f"{kind} {count}" for kind, count in sorted(drawn.items())))


def _counting(engine: ScriptedEngine, drawn: Counter[str]) -> Callable[[], Cut | None]:
    draw = engine.draw
    assert draw is not None

    def counted() -> Cut | None:
        cut = draw()
        drawn[cut.kind if cut is not None else "whole"] += 1
        return cut

    return counted
