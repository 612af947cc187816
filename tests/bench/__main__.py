"""`make bench`: runs the benchmarks named (all by default). Each prints a table and writes bench-results/NAME.json."""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "relay": "tests.bench.relay.__main__",
    "gateway": "tests.bench.gateway.__main__",
    "engine": "tests.bench.engine_vs_vllm",
    "gpu": "tests.bench.gpu",
    "repack": "tests.bench.repack.__main__",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], help=f"any of: {', '.join(BENCHES)}")
    for name in parser.parse_args().names or BENCHES:
        print(f"== {name}", flush=True)
        importlib.import_module(BENCHES[name]).main()


if __name__ == "__main__":
    main()
