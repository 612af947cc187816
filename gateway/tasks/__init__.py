"""The prompt pool: tasks that wait to be rolled out, and the leases under which runners have them."""

from gateway.tasks.pool import PromptPool, PromptPoolStatistics

__all__ = ["PromptPool", "PromptPoolStatistics"]
