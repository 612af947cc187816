"""NIXL over UCX's TCP: one transfer of `pieces` descriptors, read or written. Verifies nothing."""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
import time
from typing import Any

from common import Other, arguments, end_with_stdin, mapped, ranges, rounds, say

os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_LOG_LEVEL", "error")


def address(of: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(of))


def agent(name: str, memory: mmap.mmap) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    made.register_memory(made.get_reg_descs([(address(memory), len(memory), 0, "")], "DRAM"))
    return made


def pieces(base: int, total: int, count: int) -> list[tuple[int, int, int]]:
    return [(base + start, end - start, 0) for start, end in ranges(total, count)]


def main() -> None:
    args = arguments()
    for key, value in args.settings.get("env", {}).items():
        os.environ[key] = value
    writes = args.settings.get("op", "READ") == "WRITE"
    if args.role == "sender":
        memory = mapped(args.source)
        mine = agent("sender", memory)
        say({"address": address(memory), "metadata": base64.b64encode(mine.get_agent_metadata()).decode()})
        if not writes:
            end_with_stdin()
        peer, target = input().split()
        mine.add_remote_agent(base64.b64decode(peer))
        drive(mine, address(memory), int(target), len(memory), args.settings, "receiver", "WRITE")
    memory = mapped(args.target)
    mine = agent("receiver", memory)
    other = Other(args)
    if writes:
        other.tell(f"{base64.b64encode(mine.get_agent_metadata()).decode()} {address(memory)}")
        assert other.hear()["ready"]
        rounds(lambda: (other.tell("go"), other.hear()["seconds"])[1])
        return
    mine.add_remote_agent(base64.b64decode(other.said["metadata"]))
    drive(mine, address(memory), other.said["address"], len(memory), args.settings, "sender", "READ")


def drive(mine: Any, local: int, remote: int, total: int, settings: dict[str, Any], peer: str, op: str) -> None:
    count = settings.get("pieces", 1)
    here = mine.get_xfer_descs(pieces(local, total, count), "DRAM")
    there = mine.get_xfer_descs(pieces(remote, total, count), "DRAM")
    handle = mine.initialize_xfer(op, here, there, peer, b"done")

    def transfer() -> None:
        state = mine.transfer(handle)
        while state == "PROC":
            time.sleep(0.0005)  # the progress thread works; spinning here would take a core from it
            state = mine.check_xfer_state(handle)
        assert state == "DONE", state

    rounds(transfer)
    os._exit(0)


if __name__ == "__main__":
    main()
