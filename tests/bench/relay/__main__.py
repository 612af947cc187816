"""`make bench-relay`: the relay tier's figures. `ARGS="hop publish"` runs parts; each adds to its JSON."""

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
    "hop": "tests.bench.relay.hop",
    "publish": "tests.bench.relay.publish",
    "step": "tests.bench.relay.step",
    "links": "tests.bench.relay.links.chain",
    "faults": "tests.bench.relay.faults",
    "join": "tests.bench.relay.join",
    "memory": "tests.bench.relay.memory",
    "security": "tests.bench.relay.security",
}
KEPT_APART = {"security": "protection"}
"""Parts whose figures have a file of their own. Those of protection have no bar: on a kind of processor where nothing
else was run they leave the bars of the others as they are."""


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="make bench-relay ARGS=...", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"any of: {', '.join(PARTS)} (default: all)")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # everything that was started is ended on the way out
    found: list[Figure] = []
    modules = {part: importlib.import_module(PARTS[part]) for part in parts}
    stop_if_lacking("bench-relay", modules.values())
    for part, module in modules.items():
        print(f"== {part}", flush=True)
        for figure in module.run():
            found.append(figure)
            # At once: what a later part breaks does not take it away.
            keep(KEPT_APART.get(part, "relay"), [figure], processor=processor())
            print(f"{figure.key}: {figure.value} {figure.verdict} {figure.note}", flush=True)
    show("relay tier", found)
    stop_if_unmeasured("bench-relay", found)


if __name__ == "__main__":
    main(sys.argv[1:])
