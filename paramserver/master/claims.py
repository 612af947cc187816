"""Claims: which run publishes to which model, for as long as its publishers stay connected.

Invariants:
- one run per model at a time; the ranks of a run claim together;
- a claim ends with its epoch: a master whose lease ran out and who was elected again may have had others in between;
- what a publisher that left was writing is given up.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paramserver.core.records import SOLE, Epoch, Rank, check_model_name, check_words
from paramserver.master.drafts import Drafts
from paramserver.master.sealer import Sealer
from paramserver.relay.changes import Changes
from paramserver.relay.elections import Elections
from protos.errors import Conflict, StaleEpoch

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RunClaim:
    """A publisher, or one rank of it, that is connected and has claimed a model for its run."""

    run: str
    publisher: str
    epoch: Epoch
    rank: Rank = SOLE
    client: str = ""  # who may take it over, since it is the same life of the same program; "": nobody


class RunClaims:
    """Owned by the relay's event loop."""

    def __init__(self, elections: Elections, drafts: Drafts, sealer: Sealer, changes: Changes) -> None:
        self._elections, self._drafts, self._sealer, self._changes = elections, drafts, sealer, changes
        self._claims: dict[str, dict[int, RunClaim]] = {}  # by model and rank

    def claim(self, model: str, run: str, publisher: str, rank: Rank = SOLE, *, client: str = "") -> RunClaim:
        """Claims the model for a run. Conflict when another publisher is connected; ranks of one run claim together.

        A client whose connection broke without this side's notice takes its own claim over.
        """
        check_model_name(model)
        check_words("a run", run)
        check_words("a publisher", publisher)
        epoch = self._elections.epoch_as_master(model)
        claims = self._claims.setdefault(model, {})
        for held in [held for held in claims.values() if held.epoch != epoch]:
            self._end(model, held)  # its own stream notices the new epoch only later
        for held in claims.values():
            if held.run == run and held.rank.count == rank.count and held.rank.index != rank.index:
                continue
            if client and (held.client, held.run, held.rank) == (client, run, rank):
                log.info("%s claims %s again: its connection had broken", publisher, model)
                self.release(model, held)
                self._changes.notify()  # the stream of the old claim ends
                break
            raise Conflict(
                f"model {model} has a publisher already: {held.publisher} (run {held.run})",
                hint="end that one first, or publish under another model name",
            )
        claims[rank.index] = RunClaim(run, publisher, epoch, rank, client)
        return claims[rank.index]

    def release(self, model: str, claim: RunClaim) -> None:
        """The publisher is gone: what it was writing cannot be finished."""
        if self._claims.get(model, {}).get(claim.rank.index) is claim:  # else it was claimed again, and is in use
            self._end(model, claim)

    def _end(self, model: str, claim: RunClaim) -> None:
        del self._claims[model][claim.rank.index]
        for draft in self._drafts.writing(model):
            if draft.manifest.run == claim.run:
                self._sealer.fail(draft, f"its publisher {claim.publisher} left before it was committed")

    def holds(self, model: str, claim: RunClaim) -> bool:
        """Whether the claim holds; not when its owner claimed the model again, nor in another epoch."""
        held = self._claims.get(model, {}).get(claim.rank.index)
        return held is claim and claim.epoch == self._elections.epoch(model)

    def of(self, model: str) -> list[RunClaim]:
        return list(self._claims.get(model, {}).values())

    def forget(self, model: str) -> None:
        self._claims.pop(model, None)

    def check(self, model: str, run: str, rank: Rank) -> None:
        """StaleEpoch when the rank has not claimed the model for this run."""
        claim = self._claims.get(model, {}).get(rank.index)
        if claim is None or claim.run != run or claim.rank != rank:
            raise StaleEpoch(
                f"run {run} has not claimed model {model}, or its claim ended",
                hint="open HoldRun first, and again when its stream ends; the SDK does",
            )

    def check_all(self, model: str, run: str, num_ranks: int) -> None:
        """StaleEpoch when any rank of the run is gone."""
        claims = self._claims.get(model, {})
        for rank in range(num_ranks):
            if rank not in claims or claims[rank].run != run:
                raise StaleEpoch(f"rank {rank} of run {run} left before its version of {model} could begin")
