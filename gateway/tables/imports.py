"""An import: the sessions of a table that a store does not have, to that store."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gateway.tables.progress import progress
from gateway.tables.reader import TableReader
from gateway.tables.sources import database_path
from gateway.tables.targets import DatabaseTarget, Target


@dataclass(frozen=True, slots=True)
class Imported:
    num_added: int
    num_present: int

    def described(self, table: Path) -> str:
        return f"{table}: {self.num_added} sessions added, {self.num_present} were there already"


async def import_table(table: Path, store: Path) -> Imported:
    """Adds what `store` lacks. InvalidRequest, with row and column, for a file that is wrong anywhere, before anything
    is added; Conflict if a gateway runs on the store, or its ids are of another model or vocabulary."""
    with closing(TableReader(table)) as found:
        num_sessions = found.check()
        async with DatabaseTarget(database_path(store), found.kept_for) as target:
            return await _import(found, target, num_sessions)


async def _import(found: TableReader, target: Target, num_sessions: int) -> Imported:
    num_added = num_present = 0
    groups: set[str] = set()
    with progress(num_sessions) as step:
        for leaves in found.sessions():
            if await target.add(leaves):
                num_added += 1
                groups.add(leaves[0].group_id)
            else:
                num_present += 1
            step()
    for group_id in sorted(groups & found.ended_groups.keys()):
        await target.close_group(group_id, found.ended_groups[group_id])
    return Imported(num_added, num_present)
