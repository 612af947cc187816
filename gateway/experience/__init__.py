"""The experience buffer: finished trajectories under leases, kept in the gateway's database or in memory."""

from gateway.experience.buffer import BufferStatistics, ExperienceBuffer

__all__ = ["BufferStatistics", "ExperienceBuffer"]
