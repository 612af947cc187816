"""Which groups a trainer would learn nothing from: all their rewards are equal, so no member is better than another."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from gateway.experience.leases import Entry
from gateway.store.damage import leaving_out


class _Rewarded(msgspec.Struct):
    """All that is read of a trajectory."""

    reward: float


_decode = msgspec.msgpack.Decoder(list[_Rewarded]).decode


def of_equal_rewards(connection: sqlite3.Connection, entries: Sequence[Entry]) -> list[Entry]:
    """The members of such groups; late rewards count, as they are on disk."""
    rewards: dict[str, set[float]] = {}
    for entry in entries:
        [body] = connection.execute("SELECT body FROM trajectories WHERE seq=?", (entry.seq,)).fetchone()
        with leaving_out("trajectories", entry.seq):
            rewards.setdefault(entry.group_id, set()).update(leaf.reward for leaf in _decode(body))
    return [entry for entry in entries if len(rewards.get(entry.group_id, ())) == 1]
