"""The experience buffer: finished trajectories under leases, in memory and in the gateway's database."""

from gateway.experience.buffer import BufferStatistics, ExperienceBuffer

__all__ = ["BufferStatistics", "ExperienceBuffer"]
