"""Our versions and a trainer's own count of weight syncs, mapped both ways."""

from __future__ import annotations

import threading
from bisect import bisect_right


class VersionMap:
    """Written by the trainer's thread, read by those of rollouts.

    Both grow. A sync that published nothing has no version of its own: what is sampled meanwhile counts for the sync
    before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: list[int] = []
        self._versions: list[int] = []

    def synced(self, count: int, version: int) -> None:
        """With its sync number `count` the trainer published `version`."""
        with self._lock:
            if not self._versions or (version > self._versions[-1] and count > self._counts[-1]):
                self._counts.append(count)
                self._versions.append(version)

    def count_of(self, version: int) -> int:
        """The sync whose weights `version` has: the newest no newer than it; 0 for one from before the first."""
        with self._lock:
            found = bisect_right(self._versions, version)
            return self._counts[found - 1] if found else 0

    def version_of(self, count: int) -> int:
        """The version that engines can have after the sync `count`; 0 before the first."""
        with self._lock:
            found = bisect_right(self._counts, count)
            return self._versions[found - 1] if found else 0
