"""The versions that relays keep for sessions that continue under no other. Pure.

Invariants:
- at most `versions_max` versions are kept at once: each needs as much memory on relays as any other version;
- a version is kept from its first such session until the last one ends. Where there are too many (only after a restart
  with a lower bound), those whose sessions came first are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.core.types import NO_VERSION, SessionId, Version


@dataclass(slots=True)
class PinnedVersions:
    versions_max: int
    _of: dict[SessionId, Version] = field(default_factory=dict)
    _sessions: dict[Version, int] = field(default_factory=dict)  # how many; in the order in which they came

    def note(self, session_id: SessionId, version: Version | None) -> None:
        """The session continues under `version` only; None: it accepts others, or has ended."""
        before = self._of.pop(session_id, None)
        if before is not None:
            self._sessions[before] -= 1
        if version is not None and version != NO_VERSION:  # no relay has what an engine was started with
            self._of[session_id] = version
            self._sessions[version] = self._sessions.get(version, 0) + 1
        if before is not None and not self._sessions[before]:
            del self._sessions[before]

    def versions(self) -> list[Version]:
        """The versions that relays should keep."""
        return list(self._sessions)[: self.versions_max]

    def room_for(self, version: Version) -> bool:
        """Whether another session may insist on `version`."""
        return version == NO_VERSION or version in self._sessions or len(self._sessions) < self.versions_max

    @property
    def full(self) -> str:
        """Why there is no room."""
        kept = ", ".join(map(str, sorted(self._sessions))) or "none"
        return f"sessions insist on versions {kept} already, and at most {self.versions_max} are kept for them"
