"""`make bench-gateway`: the gateway's figures. `ARGS="cpu prefix"` runs parts; each adds to its JSON."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from tests.bench.figures import Figure, keep, show
from tests.bench.kinds import processor
from tests.bench.needs import stop_if_lacking, stop_if_unmeasured

PARTS = {
    "chat": "tests.bench.gateway.chat",
    "request": "tests.bench.gateway.request",
    "cpu": "tests.bench.gateway.cpu",
    "streams": "tests.bench.gateway.streams",
    "journal": "tests.bench.gateway.journal",
    "kill": "tests.bench.gateway.kill",
    "prefix": "tests.bench.gateway.prefix",
    "tools": "tests.bench.gateway.tools",
    "telemetry": "tests.bench.gateway.telemetry",
    "port": "tests.bench.gateway.engine_port",
}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="make bench-gateway ARGS=...", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"any of: {', '.join(PARTS)} (default: all)")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # everything that was started is ended on the way out
    found: list[Figure] = []
    modules = {part: importlib.import_module(PARTS[part]) for part in parts}
    stop_if_lacking("bench-gateway", modules.values())
    for part, module in modules.items():
        print(f"== {part}", flush=True)
        for figure in module.run():
            found.append(figure)
            keep("gateway", [figure], processor=processor())  # what a later part breaks does not take it away
            print(f"{figure.key}: {figure.value} {figure.verdict} {figure.details}", flush=True)
    show("gateway", found)
    stop_if_unmeasured("bench-gateway", found)


if __name__ == "__main__":
    main(sys.argv[1:])
