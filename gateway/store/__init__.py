"""The gateway's store: partial responses, sessions, groups and the timeline, in one SQLite file owned by one thread."""

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
