"""How fast bytes get from a publisher to the end of a chain, against a bare memcpy measured in the same run.

    python -m tests.bench.relay_hop [--mib 256] [--relays 1 2 3] [--versions 4]

The first versions of each run are left out: the publisher maps each file of the pool for the first time then.
On a machine with few cores a chain
shares them, so the figure to read is the ratio, and that the chain's time hardly grows with its length.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paramserver.client import RelayClient, TensorSource, publish
from tests.bench.results import write
from tests.support.etcd import start_etcd
from tests.support.relays import Relays

MIB = 1 << 20
WARM_UP = 5  # the pool's four warm files, and one over


def memcpy_gb_s(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    took = []
    for _ in range(5):
        started = time.perf_counter()
        target[:] = source
        took.append(time.perf_counter() - started)
    return num_bytes / min(took) / 1e9


async def measure(relays: Relays, count: int, num_bytes: int, versions: int, *, tcp: bool) -> tuple[float, float]:
    """Median seconds to *copied* and to *on all relays*."""
    daemons = [relays.start(f"r{count}{'t' if tcp else 'm'}{i}", pool_bytes=str(5 * num_bytes)) for i in range(count)]
    content = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
    sources = [TensorSource("w", "U8", content.shape, lambda: memoryview(content))]
    copied, everywhere = [], []
    async with RelayClient(daemons[0].ready["grpc"]) as head:
        for step in range(WARM_UP + versions):
            started = time.perf_counter()
            ticket = await publish(head, f"policy{count}{tcp}", sources, step=step, run="bench", force_tcp=tcp)
            copied.append(time.perf_counter() - started)
            await ticket.wait_all(120.0)
            everywhere.append(time.perf_counter() - started)
    for daemon in daemons:
        daemon.stop()
    return statistics.median(copied[WARM_UP:]), statistics.median(everywhere[WARM_UP:])


def run_all(options: argparse.Namespace, directory: Path) -> list[dict[str, float | int | str]]:
    """One row per chain length and way of publishing, printed as it comes."""
    num_bytes = options.mib * MIB
    base = memcpy_gb_s(num_bytes)
    print(f"memcpy of {options.mib} MiB: {base:.2f} GB/s; rates below as GB/s and as a share of it")
    print(
        f"{'relays':>6} {'into':>5} {'copied s':>9} {'GB/s':>6} {'share':>6} {'on all s':>9} {'GB/s':>6} {'share':>6}"
    )
    rows: list[dict[str, float | int | str]] = []
    etcd = start_etcd(directory)
    relays = Relays(etcd.ready["etcd"], directory)
    for count in options.relays:
        for tcp in (False, True):
            copied, everywhere = asyncio.run(measure(relays, count, num_bytes, options.versions, tcp=tcp))
            fast, all_of_it = num_bytes / copied / 1e9, num_bytes / everywhere / 1e9
            way = "tcp" if tcp else "shm"
            print(
                f"{count:>6} {way:>5} {copied:>9.3f} {fast:>6.2f} {fast / base:>6.2f} "
                f"{everywhere:>9.3f} {all_of_it:>6.2f} {all_of_it / base:>6.2f}"
            )
            rows.append(
                {
                    "relays": count,
                    "into": way,
                    "copied_s": round(copied, 4),
                    "on_all_s": round(everywhere, 4),
                    "memcpy_gb_s": round(base, 2),
                }
            )
    relays.close()
    etcd.stop()
    return rows


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--relays", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        rows = run_all(options, Path(scratch))
    write("relay", {"mib": options.mib, "versions": options.versions, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
