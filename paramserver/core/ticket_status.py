"""The status of one published version, as one relay can report it: the stages of its ticket.

Invariants:
- `lost` refers to the version of the query, never to another one that had its number;
- a version that this relay has not seen yet is unknown, never lost;
- a version is reported as sealed only by a relay that has seen its record.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from paramserver.core.records import Epoch
from paramserver.core.versions import VersionState

Stage = Literal["copied", "sealed", "k_relays", "all", "lost"]


@dataclass(frozen=True, slots=True)
class TicketQuery:
    """The ticket of the query: the run that published, and the epoch in which the number was given (None: unknown)."""

    run: str
    epoch: Epoch | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A version of that number that this relay, as its master, gave up, and why."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class TicketStatus:
    """`holders` have it verified; `chain` is the order in which it travels."""

    stage: Stage
    reason: str = ""
    holders: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()


def ticket_status(
    query: TicketQuery, state: VersionState | None, given_up: GivenUp | None, members: Collection[str], store_id: str
) -> TicketStatus | None:
    """The stage; None when this relay does not know the version of the query (yet). `store_id`: of its registry now."""
    if given_up is not None and query.epoch in (None, given_up.epoch):
        return TicketStatus("lost", given_up.reason)
    if state is None:
        return None
    begun = state.announced.manifest.epoch if state.announced is not None else None
    if begun is not None and query.epoch is not None and begun != query.epoch:
        if _is_later(query.epoch, begun, store_id):
            return None
        return TicketStatus("lost", f"that number was given again in epoch {begun}")
    run = state.sealed.run if state.sealed else state.announced.manifest.run if state.announced else query.run
    if state.ended is not None or run != query.run:
        return TicketStatus("lost", state.ended.reason if state.ended else f"that number belongs to run {run}")
    chain = state.announced.plan.order if state.announced else ()
    if state.sealed is None:
        return TicketStatus("copied", chain=chain)
    living = [name for name in chain if name in members]
    everywhere = bool(state.holders) and all(name in state.holders for name in living)
    stage: Stage = "all" if everywhere else "k_relays" if len(state.holders) > 1 else "sealed"
    return TicketStatus(stage, holders=tuple(sorted(state.holders)), chain=chain)


def _is_later(one: Epoch, other: Epoch, store_id: str) -> bool:
    """Revisions compare within one registry only; of two registries the present one is the later."""
    if one.store_id == other.store_id:
        return one.revision > other.revision
    return one.store_id == store_id
