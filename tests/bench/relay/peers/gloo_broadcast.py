"""One rank of a gloo broadcast from rank 0, on a host of its own; a round for each line read."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from common import rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--store")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    whole = torch.full((args.bytes,), args.rank, dtype=torch.uint8)
    dist.init_process_group("gloo", init_method=args.store, rank=args.rank, world_size=args.ranks)
    dist.barrier()
    rounds(lambda: dist.broadcast(whole, 0))
    assert int(whole[-1]) == 0  # rank 0's bytes came


if __name__ == "__main__":
    main()
