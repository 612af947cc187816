"""What the gateway keeps on disk: partial responses, sessions, groups, the timeline. One SQLite file, one thread."""

from gateway.store.database import Database
from gateway.store.partial import PartialResponsePool, PoolStatistics
from gateway.store.timeline import Timeline, TimelineEvent

__all__ = [
    "Database",
    "PartialResponsePool",
    "PoolStatistics",
    "Timeline",
    "TimelineEvent",
]
