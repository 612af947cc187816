"""Which registry versions come from, and whether another one may go on with their numbers.

Invariants:
- the numbers of a model mean something within one lineage of registries: the first, and those that an operator adopted
  in the place of the one before;
- a registry of another lineage is refused however high its numbers are, and so is a number that goes back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """The registry of a version: its id ("": an older relay does not send it), and those that it continues."""

    store_id: str = ""
    continues: frozenset[str] = frozenset()

    @classmethod
    def of(cls, store_id: str, continues: Collection[str]) -> Origin:
        return cls(store_id, frozenset(continues))


UNKNOWN = Origin()
"""The origin of versions at an older relay, which does not send its registry's id."""


@dataclass
class Lineage:
    """The registries and numbers that one reader or publisher of a model has seen."""

    store_id: str = ""
    newest: int = 0  # that was seen, whether or not it was sealed
    sealed: int = 0  # that is known to be sealed: no master of the lineage gives its number again

    def refuses(self, origin: Origin, number: int | None = None) -> str:
        """Why versions of that registry are refused; empty when it is the same, or goes on with it.

        `number` was given to a new version there.
        """
        if origin.store_id and self.store_id and self.store_id not in {origin.store_id, *origin.continues}:
            return (
                f"the registry was replaced: it is {origin.store_id}, "
                f"and versions up to {self.newest} are of {self.store_id}"
            )
        if number is not None and number <= self.sealed:
            return f"the registry went back: it gives number {number}, and version {self.sealed} was sealed"
        return ""

    def saw(self, origin: Origin, version: int) -> bool:
        """Notes a version that was not refused. Whether it changed anything."""
        before = (self.store_id, self.newest)
        self.store_id, self.newest = origin.store_id or self.store_id, max(self.newest, version)
        return before != (self.store_id, self.newest)

    def remedy(self, model: str, relay: str = "HOST:PORT") -> str:
        """The command by which an operator goes on with the registry that is there now."""
        return (
            f"bring registry {self.store_id} back (its etcd's data), or go on with this one by "
            f"`paramserver adopt --relay {relay} --continues {self.store_id} --model {model} --above {self.newest}`"
        )
