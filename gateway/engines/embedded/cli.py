"""`gateway engine`: the embedded engine as a daemon. torch is imported only once it really starts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from gateway.core.dtypes import SERVING, TRAINING, Choice, Dtype, table
from gateway.engines.embedded.config import EngineConfig
from protos.access.listening import check_listening, warn_insecure
from protos.errors import LaminarError
from protos.extras import install, lacking
from protos.imports import uncollected
from protos.options import LOG_LEVEL, PORT, config_from, config_options, log_format_option
from protos.process import cannot_listen, setup_logging, write_ready_file
from protos.telemetry import options as telemetry_options
from protos.telemetry.options import Telemetry
from protos.terminal import Failed

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5.0
OF_EXTRA = ("torch", "transformers", "safetensors")
"""What the extra `engine` brings."""


@click.command()
@config_options(EngineConfig)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=PORT, default=0, help="Port to listen on; 0 takes a free one.")
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON with the address, written once it serves.",
)
@click.option("--log-level", type=LOG_LEVEL, default="info", help="The least severe messages that are logged.")
@log_format_option
def engine(host: str, port: int, ready_file: Path | None, log_level: str, log_format: str, **options: Any) -> None:
    """Run one inference engine that speaks vLLM's HTTP dialect, without vLLM.

    \b
    Try it:
      gateway engine --model ~/models/smollm2 --port 8100
      curl localhost:8100/v1/completions -d '{"prompt": "The sum of 2 and 3 is", "max_tokens": 8}'
    """
    setup_logging(log_level, log_format, model=options["served_model_name"])
    try:
        check_listening(
            "gateway engine",
            host,
            insecure=options["insecure"],
            mend="give --insecure, in a closed network alone: its routes load weights",
        )
        if options["insecure"]:
            warn_insecure(log, "gateway engine", host)
        if options["dtype"] == "auto":
            options["dtype"] = _best_dtype(options["model"], options["device"])
        config = config_from(EngineConfig, options)
        log.info("%s", config)
        asyncio.run(_serve(config, host, port, ready_file))
    except LaminarError as e:
        log.error("%s", e)
        sys.exit(1)
    except ModuleNotFoundError as e:
        _without_extra(e)


def _without_extra(error: ModuleNotFoundError) -> NoReturn:
    """Ends the process for a package of the extra that is not installed; raises any other error."""
    if (error.name or "").partition(".")[0] not in OF_EXTRA:
        raise error
    names = lacking("engine") or [error.name or ""]
    raise Failed(f"the embedded engine needs {', '.join(names)}: {install('engine')}") from error


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model directory whose shapes are measured; without it those of a Llama of 135 million parameters.",
)
@click.option("--train", is_flag=True, help="Count a trainer's steps, too: it runs on the same processor.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def engine_dtype(model: Path | None, train: bool, as_json: bool) -> None:
    """Measure what this processor computes a model fastest in: float32 or bfloat16, one thread or two.

    Takes about a second for a small model. The figures are of matrix products alone, in tokens per second of the whole
    model, so an engine reaches less: they are for comparing. Dtypes are compared by processor time, so a busy machine
    gives the same answer; threads by wall time.

    \b
    Try it:
      gateway engine-dtype --model ~/models/smollm2
      gateway engine --model ~/models/smollm2 --dtype auto      # takes the dtype that this would print
    """
    try:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: two threads that spin for
        choice = _measure(model, train=train)  # each other on a busy machine would last seconds
    except LaminarError as e:
        click.echo(f"gateway engine-dtype: {e}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as e:
        _without_extra(e)
    if as_json:
        click.echo(msgspec.json.encode(choice))
        return
    for line in table(choice):
        click.echo(line)
    click.echo(f"\n{choice.reason}.\nUse --dtype {choice.dtype} --threads {choice.threads} for an engine alone here;")
    click.echo("with several engines on these cores, one thread each.")


def _measure(model: Path | None, *, train: bool, cores: int | None = None) -> Choice:
    from gateway.engines.embedded.compute.speed import SMALL, measure, shapes_of

    return measure(SMALL if model is None else shapes_of(model), TRAINING if train else SERVING, cores=cores)


def _best_dtype(model: Path, device: str) -> Dtype:
    """The dtype of `--dtype auto`: measured on a processor, bf16 on a GPU."""
    from gateway.engines.embedded.engine import pick_device

    if pick_device(device).type != "cpu":
        return "bfloat16"
    choice = _measure(model, train=False, cores=1)  # threads are --threads' to say
    log.info("--dtype auto: %s: %s", choice.dtype, choice.reason)
    for line in table(choice):
        log.info("%s", line)
    return choice.dtype


async def _serve(config: EngineConfig, host: str, port: int, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    config.check()
    check_free(host, port)
    telemetry = telemetry_options.start(config.telemetry, "laminar-engine", model=config.served_model_name)
    try:
        await _serve_until(stop, config, host, port, ready_file, telemetry)
    finally:
        await asyncio.to_thread(telemetry.close)


def check_free(host: str, port: int) -> None:
    """Binds the address and lets it go: loading a model takes long, and a port in use should be reported before.
    Raises Conflict."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


async def _serve_until(
    stop: asyncio.Event, config: EngineConfig, host: str, port: int, ready_file: Path | None, telemetry: Telemetry
) -> None:
    with uncollected():
        from aiohttp import web

        from gateway.engines.embedded.compute.selfcheck import check_invariance
        from gateway.engines.embedded.engine import Engine
        from gateway.engines.embedded.server import make_app
        from gateway.engines.embedded.service import EngineService
        from gateway.engines.embedded.text import Text

    text = Text(config.model)
    engine = Engine(config)
    if config.batch_invariant:
        check_invariance(engine)
        engine.reset_counters()
    service = EngineService(engine)
    service.loop.start()
    # handler_cancellation: a client that goes away cancels its handler, which aborts its request.
    runner = web.AppRunner(
        make_app(service, text, telemetry.tracer),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        bound = runner.addresses[0]
        url = f"http://{bound[0]}:{bound[1]}"
        write_ready_file(ready_file, {"url": url})
        log.info("serving %s on %s", config.served_model_name, url)
        await stop.wait()
        log.info("stopping")
        await site.stop()  # 1. no new connections
        service.loop.abort(None)  # 2. requests in flight end with finish_reason "abort"
    finally:
        await runner.cleanup()  # 3. their last bytes go out
        service.loop.stop()  # 4. the model's thread ends
