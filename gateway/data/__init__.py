"""What the gateway keeps: partial responses, finished trajectories, the timeline. One SQLite file, one owner thread."""

from gateway.data.database import Database
from gateway.data.experience import BufferStatistics, ExperienceBuffer
from gateway.data.partial import PartialResponsePool, PoolStatistics
from gateway.data.timeline import Timeline, TimelineEvent

__all__ = [
    "BufferStatistics",
    "Database",
    "ExperienceBuffer",
    "PartialResponsePool",
    "PoolStatistics",
    "Timeline",
    "TimelineEvent",
]
