"""One hop: 1 GiB from one relay's pool into another's, verified, against what people would use instead.

Method. Every contender moves the same random bytes between two processes over loopback, from memory that is warm into
memory that is warm (files in shared memory; Ray: its own store). Each is first tried with several settings (this
project with several numbers of stripes, in chunks as two relays choose them) and goes on with its best. Then rounds are
interleaved, ours and the peer's in turn, after one warm-up each; the figure is the median of the rounds' ratios.
`best_over_best` compares the fastest rounds of both. Every contender's TCP connections begin under the congestion
control that relays choose, as far as this user may set it. No peer verifies what it received; this project's time
includes the digest of every chunk. Bytes are compared once outside the timing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.environment import Environment, peers
from tests.bench.figures import Figure, median
from tests.bench.needs import compiler, libraries, packages
from tests.bench.relay import transports
from tests.bench.relay.contenders import (
    PEERS,
    Contender,
    ContenderFailed,
    Files,
    best_settings,
    files,
    interleave,
    project,
)

NUM_BYTES = 1 << 30
MIB = 1 << 20
INTERLEAVED = 7
OURS = [{"stripes": 1}, {"stripes": 2}, {"stripes": 4}]
BARE_PIECES = (1 << 18, 1 << 20, 1 << 30)


@dataclass(frozen=True, slots=True)
class Peer:
    """What the hop is compared with."""

    key: str
    script: str
    packages: tuple[str, ...]
    bar: float
    candidates: Sequence[Mapping[str, Any]]


_PIECES = [{"pieces": 1}, {"pieces": 16}, {"pieces": 256}]
_CHUNK = "RAY_object_manager_default_chunk_size"
ALL = (
    Peer("hop_vs_grpc", "grpc_stream.py", ("grpcio",), 1.8, [{"streams": 1}, {"streams": 2}, {"streams": 4}]),
    Peer(
        "hop_vs_nixl_tcp",
        "nixl_tcp.py",
        ("nixl", "nixl-cu12"),
        1.0,
        [*({**p, "op": op} for op in ("READ", "WRITE") for p in _PIECES)],
    ),
    Peer("hop_vs_mooncake_tcp", "mooncake_tcp.py", ("mooncake-transfer-engine-non-cuda",), 1.5, _PIECES),
    Peer("hop_vs_gloo", "gloo.py", ("torch",), 1.0, [{"groups": 1}, {"groups": 2}, {"groups": 4}]),
    Peer("hop_vs_ray", "ray_store.py", ("ray",), 5.0, [{}, {"env": {_CHUNK: str(32 << 20)}}]),
)


def lacking() -> list[str]:
    names = [name for peer in ALL for name in peer.packages]
    return [*packages(peers(PEERS / "requirements.txt"), *names), *libraries(), *compiler(), *transports.lacking()]


def run() -> Iterator[Figure]:
    environment = peers(PEERS / "requirements.txt")
    with files(NUM_BYTES) as where:
        settings, tried = best_settings(project("ours"), OURS, where)
        print(f"ours: {settings} of {tried}", flush=True)
        yield _bare(where, settings)
        yield _bare_that_copies(where, settings)
        yield transports.over_nixl(where, settings, rounds=INTERLEAVED)
        for peer in ALL:
            try:
                yield _against(peer, environment, where, settings, tried)
            except ContenderFailed as error:
                yield _absent(peer, str(error))


def _bare(where: Files, settings: Mapping[str, Any]) -> Figure:
    """With the same stripes as ours, the best size of pieces, and the better of send and sendfile."""
    what = "a bare socket loop's time over ours, {stripes} stripes each, digests only in ours"
    return _over_bare("hop_vs_bare_socket", what.format(**settings), where, settings, (False, True), bar=0.8)


def _bare_that_copies(where: Files, settings: Mapping[str, Any]) -> Figure:
    """As the figure was defined before: chunks of 1 MiB here, and the bare loop copies what it sends."""
    settings = {**settings, "chunk_bytes": MIB}
    what = "the same with chunks of 1 MiB, over a bare loop that copies what it sends"
    return _over_bare("hop_vs_bare_socket_copied", what, where, settings, (False,), better="reported")


def _over_bare(
    key: str, what: str, where: Files, settings: Mapping[str, Any], pages: Sequence[bool], **more: Any
) -> Figure:
    command = project("bare")
    of = {"stripes": settings["stripes"]}
    candidates = [{**of, "piece": piece, "pages": sent} for piece in BARE_PIECES for sent in pages]
    best, tried = best_settings(command, candidates, where)
    with Contender(project("ours"), settings, where) as ours, Contender(command, best, where) as bare:
        pairs = interleave(ours, bare, INTERLEAVED)
    details = {**_details(pairs), "settings": best, "tried_s": tried, "ours": settings}
    return median(
        key, what, [theirs / mine for mine, theirs in pairs], **{"better": "more", "details": details, **more}
    )


def _against(
    peer: Peer, environment: Environment, where: Files, settings: Mapping[str, Any], ours_tried: dict[str, float]
) -> Figure:
    command = [str(environment.python), str(PEERS / peer.script)]
    best, tried = best_settings(command, peer.candidates, where)
    if peer.script != "ray_store.py" and not where.compare():
        raise ContenderFailed("it delivered other bytes than it was given")
    with Contender(project("ours"), settings, where) as ours, Contender(command, best, where) as theirs:
        pairs = interleave(ours, theirs, INTERLEAVED)
    details = {**_details(pairs), "settings": best, "tried_s": tried, "ours": settings, "ours_tried_s": ours_tried}
    return median(
        peer.key,
        f"speed-up over {peer.packages[0]} at its best ({json.dumps(best)}), which verifies nothing",
        [theirs_s / mine_s for mine_s, theirs_s in pairs],
        bar=peer.bar,
        better="more",
        details=details,
    )


def _absent(peer: Peer, why: str) -> Figure:
    return Figure(peer.key, f"speed-up over {peer.packages[0]}", None, peer.bar, "more", note=why)


def _details(pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    mine, theirs = [m for m, _ in pairs], [t for _, t in pairs]
    return {
        "bytes": NUM_BYTES,
        "ours_s": [round(s, 4) for s in mine],
        "theirs_s": [round(s, 4) for s in theirs],
        "best_over_best": round(min(theirs) / min(mine), 3),
    }
