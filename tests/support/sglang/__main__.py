"""`python -m tests.support.sglang --model DIR --port 0 --ready-file PATH`: the stand-in as a process."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path

from aiohttp import web

from protos.process import write_ready_file
from tests.support.sglang.engine import Engine
from tests.support.sglang.server import Server
from tests.support.sglang.weights import read_directory


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--served-model-name", default="policy")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--custom-weight-loader", nargs="*", default=[])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--hold-file", type=Path)
    flags = parser.parse_args()
    engine = Engine(
        read_directory(flags.model),
        flags.weight_version,
        flags.served_model_name,
        tp_size=flags.tp,
        loaders=tuple(flags.custom_weight_loader),
        step_s=flags.step_s,
        hold=flags.hold_file,
    )
    server = Server(engine, incremental=flags.incremental_streaming_output, disconnect_s=0.5)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", flags.port).start()
    write_ready_file(flags.ready_file, {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ends = [asyncio.create_task(event.wait()) for event in (stop, server.died)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if engine.died:
        os._exit(1)  # at once, whatever runs
    engine.draining = True
    await server.drained()
    await runner.cleanup()


asyncio.run(main())
