"""torch.distributed over gloo: `groups` send/recv pairs at once, each with a connection. Verifies nothing."""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from common import Other, arguments, mapped, ranges, rounds, say


def join(rank: int, store: str, groups: int) -> list[dist.ProcessGroup]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return [dist.new_group([0, 1], backend="gloo") for _ in range(groups)]


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    groups = args.settings.get("groups", 1)
    mine = args.source if args.role == "sender" else args.target
    whole = torch.frombuffer(mapped(mine), dtype=torch.uint8)
    parts = [whole[start:end] for start, end in ranges(len(whole), groups)]
    pool = ThreadPoolExecutor(groups)
    if args.role == "sender":
        say({"begun": True})
        made = join(0, args.info, groups)
        for _ in sys.stdin:
            list(pool.map(lambda job: dist.send(job[0], 1, group=job[1]), zip(parts, made, strict=True)))
        return
    store = tempfile.mktemp(prefix="gloo-")
    other = Other(args, store)
    made = join(1, store, groups)
    end = lambda: list(pool.map(lambda job: dist.recv(job[0], 0, group=job[1]), zip(parts, made, strict=True)))  # noqa: E731

    def transfer() -> None:
        other.tell("go")
        end()

    rounds(transfer)


if __name__ == "__main__":
    main()
