"""An export: the sessions of a store that are wanted, to a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.store.damage import leaving_out
from gateway.tables.progress import progress
from gateway.tables.schema import Leaf, leaves_of
from gateway.tables.sources import Source, Wanted, source_of
from gateway.tables.writer import TableWriter

__all__ = ["Exported", "Wanted", "export_table"]


@dataclass(frozen=True, slots=True)
class Exported:
    """`last`: the highest number among them. `num_gone`: used up while the export ran. `num_rounded`: logprobs that
    float32 does not hold exactly."""

    num_sessions: int
    num_rows: int
    num_tokens: int
    num_damaged: int
    num_gone: int
    num_rounded: int
    last: int

    def described(self, out: Path) -> str:
        lines = [
            f"{out}: {self.num_sessions} sessions, {self.num_rows} trajectories, {self.num_tokens} tokens"
            + (f"; the last session's number is {self.last}" if self.last else "")
        ]
        if self.num_gone:
            lines.append(f"{self.num_gone} more were used up while the export ran")
        if self.num_rounded:
            lines.append(f"{self.num_rounded} logprobs had more digits than float32 and were rounded to it")
        return "\n".join(lines)


def export_table(store: str, out: Path, wanted: Wanted, *, force: bool = False) -> Exported:
    """Writes `out`. `store`: as `source_of` takes it. Conflict if `out` is there, unless `force`; NotFound, Unavailable
    for a store that cannot be read."""
    with source_of(store) as source:
        return _export(source, out, wanted, force)


def _export(source: Source, out: Path, wanted: Wanted, force: bool) -> Exported:
    last = num_gone = num_damaged = 0
    with TableWriter(out, source.kept_for, force=force) as table, progress(source.count(wanted.after)) as step:
        for offer in source.offers(wanted.after):
            step()
            if not wanted.has(offer):
                continue
            stored = source.read(offer)
            if stored is None:
                num_gone += 1
                continue
            leaves: list[Leaf] = []
            with leaving_out("trajectory_bodies", offer.seq):
                leaves = leaves_of(stored, source.kept_for.model)
            if not leaves:
                num_damaged += 1
                continue
            table.add(leaves)
            last = offer.seq
            if table.num_sessions == wanted.limit:
                break
    return Exported(
        table.num_sessions,
        table.num_rows,
        table.num_tokens,
        num_damaged + source.num_damaged,
        num_gone,
        table.rounded,
        last,
    )
