"""The models of one relay: each one's versions as they are here, and what was measured of its hops.

Invariants:
- the relay's event loop alone changes anything; `holders` is also read from the threads of fetches;
- a model is known here from its first event on until nothing of it is left, here and in the registry.
"""

from __future__ import annotations

import time

from paramserver.core.copies import MissingCopies, PinnedVersion
from paramserver.core.pins import keepers
from paramserver.core.records import Manifest, Sealed
from paramserver.core.stragglers import Stragglers
from paramserver.core.versions import ModelVersions, Notify
from paramserver.core.view import View
from protos.errors import UnknownModel

VERSIONS_KEPT = 64  # numbers of old versions remembered, for tickets that are queried late


class ModelTable:
    """The models of relay `relay`. `retain`: versions of each that are kept without any pin."""

    def __init__(self, relay: str, view: View, *, retain: int) -> None:
        self._relay, self._view, self._retain = relay, view, retain
        self._versions: dict[str, ModelVersions] = {}
        self._stragglers: dict[str, Stragglers] = {}
        self._missing: dict[str, MissingCopies] = {}

    def __contains__(self, model: str) -> bool:
        return model in self._versions

    def get(self, model: str) -> ModelVersions | None:
        return self._versions.get(model)

    def of(self, model: str) -> ModelVersions:
        """A model's versions; the model is known here from now on."""
        if model not in self._versions:
            self._versions[model] = ModelVersions(model, retain=self._retain)
            self._versions[model].skip_to(self._view.dropped.get(model, 0))
        return self._versions[model]

    def items(self) -> list[tuple[str, ModelVersions]]:
        return sorted(self._versions.items())

    def stragglers(self, model: str) -> Stragglers:
        return self._stragglers.setdefault(model, Stragglers())

    def forget_relays_that_left(self) -> None:
        for stragglers in self._stragglers.values():
            stragglers.forget(frozenset(self._view.members))

    def forget(self, model: str) -> None:
        self._versions.pop(model, None)
        self._stragglers.pop(model, None)
        self._missing.pop(model, None)

    def unused(self) -> set[str]:
        """Models of which neither this relay nor the registry has anything: dropped, or never published to."""
        candidates = self._view.keyless() | (self._versions.keys() - self._view.models)
        return {model for model in candidates if model not in self._versions or self._versions[model].empty}

    def shown(self, model: str) -> list[Sealed]:
        """The versions that may be acquired here, ascending. UnknownModel when nobody has used the model."""
        if model not in self._versions and model not in self._view.models:
            raise UnknownModel(
                f"no model {model!r} here", hint=f"known: {', '.join(sorted(self._view.models)) or 'none yet'}"
            )
        found = self._versions.get(model)
        return found.shown() if found else []

    def events(self, model: str) -> list[Notify]:
        """The versions sealed and available now, as the events that a new watch begins with."""
        known = self._versions.get(model)
        states = [state for _, state in known.items() if not state.ended] if known else []
        return [Notify("available" if s.stage == "shown" else "sealed", s.sealed) for s in states if s.sealed]

    def has_announced(self, manifest: Manifest) -> bool:
        """Whether this very version was announced, and not another of its number."""
        known = self._versions.get(manifest.model)
        state = known.get(manifest.version) if known else None
        return state is not None and state.announced is not None and state.announced.manifest == manifest

    def holders(self, model: str, version: int) -> set[str]:
        """The relays that hold a version complete and verified, as far as this relay knows."""
        known = self._versions.get(model)
        state = known.get(version) if known else None
        return state.holders if state is not None else set()

    def is_kept_for_the_fleet(self, record: Sealed) -> bool:
        """Whether this relay is among those that keep a version that is pinned for the fleet."""
        pinned = self._view.pinned(record.model, record.version)
        if not pinned:
            return False
        # This relay is a holder, whether or not the registry has its key yet.
        holders = self.holders(record.model, record.version) | {self._relay}
        return self._relay in keepers(pinned, holders & self._view.places().keys())

    def copies_due(self, model: str) -> set[int]:
        """Versions pinned for the fleet that this relay is to copy, since a holder of one died."""
        pinned = {}
        for version in self._view.pinned_versions(model):
            state = self.of(model).get(version)
            if state is not None and state.ended is None:
                copies = max(self._view.pinned(model, version).values())
                pinned[version] = PinnedVersion(copies, state.holders & self._view.members.keys())
        missing = self._missing.setdefault(model, MissingCopies())
        return missing.due(self._relay, pinned, self._view.places().keys(), time.monotonic())
