"""How large a version's chunks should be, from the formula of the Laminar paper (appendix D) and measured hops.

The time to bring M bytes in k chunks down a chain of p nodes is T(p, k) = (p + k - 2) * (M / k * T_byte + T_start),
least at k* = sqrt((p - 2) * M * T_byte / T_start). Here the publisher counts as a node: it copies chunk by chunk, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CHUNK_BYTES_MIN = 256 << 10
"""Below this the digest and the frame of a chunk cost more than its bytes."""
CHUNK_BYTES_MAX = 16 << 20
"""Above this nearly nothing is gained (docs/decisions/02-bytes-by-plain-sockets.md), and threads that copy, stripes and
holders would share few chunks."""
NUM_RELAYS_MIN = 2
"""A relay that is alone counts as two: others may join, and a version in few chunks is copied by few threads."""
WAKE_S = 1e-4
"""The time in which a relay notices that a chunk is there, and begins to send it."""


@dataclass(frozen=True, slots=True)
class HopCost:
    """One hop as measured: bytes per second over all its stripes, and the network's round trip in seconds."""

    rate_bytes_s: float = 1e9
    rtt_s: float = 2e-4

    @property
    def start_s(self) -> float:
        return WAKE_S + self.rtt_s / 2


def typical(hops: Sequence[HopCost]) -> HopCost:
    """The middle of what was measured; the defaults where nothing was."""
    if not hops:
        return HopCost()
    return HopCost(median(hop.rate_bytes_s for hop in hops), median(hop.rtt_s for hop in hops))


def transfer_s(num_nodes: int, num_bytes: int, chunk_bytes: int, hop: HopCost) -> float:
    """T(p, k) of the paper, in seconds."""
    k = max(1, -(-num_bytes // chunk_bytes))
    return (num_nodes + k - 2) * (num_bytes / k / hop.rate_bytes_s + hop.start_s)


def choose_chunk_bytes(num_bytes: int, num_relays: int, hop: HopCost) -> int:
    """The power of two whose T is least, within the bounds."""
    sizes = [1 << bits for bits in range(CHUNK_BYTES_MIN.bit_length() - 1, CHUNK_BYTES_MAX.bit_length())]
    num_nodes = 1 + max(num_relays, NUM_RELAYS_MIN)
    return min(sizes, key=lambda size: (transfer_s(num_nodes, num_bytes, size, hop), size))
