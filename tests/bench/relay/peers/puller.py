"""Takes a version from one holder, verified, and keeps none of it: a receiver of the star; a round for each line.

Run as `python -m tests.bench.relay.peers.puller --holder HOST:PORT --model M`; each line is a version's number.
"""

from __future__ import annotations

import argparse
import sys
import time

from paramserver.core.records import ChunkMap
from paramserver.data import tcp
from paramserver.data.fetch import Fetch
from paramserver.data.frames import Greeting
from paramserver.data.transport import Source
from tests.bench.relay.peers.common import say

SLOTS = 64  # more chunks than can be in flight at once


class Discard:
    """A sink whose chunks share few places; each stays until it is verified."""

    def __init__(self, chunks: ChunkMap) -> None:
        self.chunks = chunks
        self._slots = [memoryview(bytearray(chunks.chunk_bytes)) for _ in range(SLOTS)]

    def place(self, index: int) -> memoryview:
        return self._slots[index % SLOTS][: self.chunks.chunk(index).length]

    def present(self, index: int, chunk_digest: bytes) -> None:
        """Verified; its place may be used again."""

    def missing(self) -> list[int]:
        return list(range(self.chunks.num_chunks))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--holder", required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    source = Source("holder", args.holder)
    say({"ready": True})
    for line in sys.stdin:
        greeting = Greeting("fetch", args.model, int(line), "puller")
        started = time.perf_counter()
        link = tcp.dialer()(source, greeting)
        link.close()
        sink = Discard(ChunkMap.of(link.manifest))
        assert Fetch(sink, greeting, lambda: [[source]], tcp.dialer(), num_stripes=2).run()
        say({"seconds": time.perf_counter() - started})


if __name__ == "__main__":
    main()
