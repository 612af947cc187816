"""verl's `global_steps` of our versions: the steps under which the trainer published them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.errors import Unavailable

VERSIONS_MAX = 1024
"""Remembered; a trajectory's versions are among the newest few."""


@dataclass
class Steps:
    """The step of each version that was seen at the relay, which itself forgets retired ones."""

    _step_of: dict[int, int] = field(default_factory=dict)

    def seen(self, versions: Iterable[tuple[int, int]]) -> None:
        """Pairs (version, step)."""
        self._step_of.update(versions)
        for version in sorted(self._step_of)[:-VERSIONS_MAX]:
            del self._step_of[version]

    @property
    def newest(self) -> int:
        """Unavailable before the first version."""
        if not self._step_of:
            raise Unavailable("no weights were published yet", hint="verl publishes them before its first rollouts")
        return max(self._step_of)

    def of(self, version: int) -> int:
        """The step of `version`. One that retired before it was seen has that of the version before it: staleness is
        then over-estimated, never under-estimated. Unavailable if there is none."""
        known = [seen for seen in self._step_of if seen <= version]
        if not known:
            raise Unavailable(
                f"version {version} has no step at this relay",
                hint="engines serve it from before the trainer's first publish: set staleness_max",
            )
        return self._step_of[max(known)]
