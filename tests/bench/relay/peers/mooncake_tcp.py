"""Mooncake's transfer engine over TCP: a batch of `pieces` reads, or one. Verifies nothing."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from common import Other, arguments, end_with_stdin, mapped, ranges, rounds, say

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("GLOG_minloglevel", "2")


def engine(memory: Any) -> tuple[Any, int]:
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert made.register_memory(base, len(memory)) == 0
    return made, base


def main() -> None:
    args = arguments()
    for key, value in args.settings.get("env", {}).items():
        os.environ[key] = value
    if args.role == "sender":
        memory = mapped(args.source)
        mine, base = engine(memory)
        say({"address": base, "session": f"127.0.0.1:{mine.get_rpc_port()}"})
        end_with_stdin()
    memory = mapped(args.target)
    mine, base = engine(memory)
    said = Other(args).said
    parts = ranges(len(memory), args.settings.get("pieces", 1))
    lengths = [end - start for start, end in parts]
    here, there = [base + start for start, _ in parts], [said["address"] + start for start, _ in parts]

    def transfer() -> None:
        assert mine.batch_transfer_sync_read(said["session"], here, there, lengths) == 0

    rounds(transfer)
    os._exit(0)


if __name__ == "__main__":
    main()
