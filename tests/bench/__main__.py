"""`make bench`: runs the benchmarks named (all by default). Each prints a table and writes bench-results/NAME.json."""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHES = {
    "relay": "tests.bench.relay.__main__",
    "gateway": "tests.bench.gateway.__main__",
    "engine": "tests.bench.engine_vs_vllm",
    "gpu": "tests.bench.gpu",
    "data": "tests.bench.data",
    "core": "tests.bench.core.__main__",
    "repack": "tests.bench.repack.__main__",
    "learning": "tests.bench.learning.__main__",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], help=f"any of: {', '.join(BENCHES)}")
    failed: list[str] = []
    for name in parser.parse_args().names or BENCHES:
        print(f"== {name}", flush=True)
        try:
            importlib.import_module(BENCHES[name]).main()
        except SystemExit as end:  # what one of them lacks does not cost the others
            if end.code:
                failed.append(name)
                print(end.code, flush=True)
    if failed:
        sys.exit(f"make bench: {', '.join(failed)} ended with an error: see above")


if __name__ == "__main__":
    main()
