"""The same hop over the transports that this project has: NIXL's reads (over TCP here) against its own sockets.

There is no RDMA card here, so the figure says what the library costs where it cannot shine, and bars nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from subprocess import TimeoutExpired
from typing import Any

from tests.bench.figures import Figure, median
from tests.bench.relay.contenders import Contender, ContenderFailed, Files, best_settings, interleave, project
from tests.support.nixl import installed

KEY = "hop_over_nixl_transport"
WHAT = "this project's hop over tcp, its time over that of the same hop with --transport nixl (UCX_TLS=tcp)"
MIB = 1 << 20
CANDIDATES = [
    {"transport": "nixl", "stripes": stripes, "chunk_bytes": chunk}
    for stripes in (1, 2)
    for chunk in (MIB, 4 * MIB, 16 * MIB)
]


def lacking() -> list[str]:
    try:
        installed()
    except (RuntimeError, TimeoutExpired) as error:
        return [f"{error} (see `pip config list`, and run this again)"]
    return []


def over_nixl(where: Files, settings: Mapping[str, Any], *, rounds: int) -> Figure:
    """`settings`: those of the hop over tcp."""
    try:
        best, tried = best_settings(project("ours"), CANDIDATES, where)
        with Contender(project("ours"), settings, where) as tcp, Contender(project("ours"), best, where) as nixl:
            pairs = interleave(tcp, nixl, rounds)
    except ContenderFailed as error:
        return Figure(KEY, WHAT, None, better="reported", note=str(error))
    seconds = {
        "bytes": where.source.stat().st_size,
        "tcp_s": [round(t, 4) for t, _ in pairs],
        "nixl_s": [round(n, 4) for _, n in pairs],
    }
    return median(
        KEY,
        WHAT,
        [tcp_s / nixl_s for tcp_s, nixl_s in pairs],
        better="reported",
        details={**seconds, "settings": best, "tried_s": tried, "tcp": settings},
    )
