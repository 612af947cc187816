"""Which engines could not load which version, and why: what gateways report, for the tickets of those who publish.

Invariants:
- of each model the newest VERSIONS_MAX versions with a report are kept, of each version ENGINES_MAX engines;
- one entry for an engine and a version: its last error, and how often it was refused; a load that succeeds removes it.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS_MAX = 16
ENGINES_MAX = 64
TEXT_MAX = 500
"""Characters of an error or a name that are kept."""


def _plain(text: str) -> str:
    """Text from the network as one line without control characters: it goes to logs and terminals."""
    return "".join(character if character.isprintable() else " " for character in text[:TEXT_MAX])


@dataclass(frozen=True, slots=True)
class RefusedLoad:
    """An engine did not load a version; `error` is the last reason."""

    version: int
    engine: str
    error: str
    times: int
    unix_s: float


class RefusedLoads:
    """Owned by the relay's event loop."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int, dict[str, RefusedLoad]]] = {}

    def refused(self, model: str, version: int, engine: str, error: str, unix_s: float) -> RefusedLoad:
        versions = self._models.setdefault(model, {})
        engines = versions.setdefault(version, {})
        engine = _plain(engine)
        before = engines.pop(engine, None)
        one = RefusedLoad(version, engine, _plain(error), before.times + 1 if before else 1, unix_s)
        engines[engine] = one
        while len(engines) > ENGINES_MAX:
            del engines[next(iter(engines))]
        for old in sorted(versions)[:-VERSIONS_MAX]:
            del versions[old]
        return one

    def loaded(self, model: str, version: int, engine: str) -> None:
        versions = self._models.get(model, {})
        versions.get(version, {}).pop(_plain(engine), None)
        if not versions.get(version):
            versions.pop(version, None)
        if not versions:
            self._models.pop(model, None)

    def of(self, model: str, version: int | None = None) -> list[RefusedLoad]:
        """The refused loads of one version, or of all, by version and engine."""
        found = [
            one
            for number, engines in self._models.get(model, {}).items()
            if version in (None, number)
            for one in engines.values()
        ]
        return sorted(found, key=lambda one: (one.version, one.engine))

    def warning(self, model: str, version: int) -> str:
        """A warning for the next publisher; empty when no engine refused that version."""
        found = self.of(model, version)
        if not found:
            return ""
        engines = ", ".join(one.engine for one in found[:3]) + (" ..." if len(found) > 3 else "")
        newest = max(found, key=lambda one: one.unix_s)
        return f"version {version} of {model} was refused by {len(found)} engines ({engines}): {newest.error}"
