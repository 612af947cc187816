"""Rolls out environments: where samples come from, their rollouts, what is recorded of them.

It speaks HTTP to a gateway, or to any OpenAI-compatible server, and is the same code with tasks of an environment's own
and with those of a gateway's prompt pool.
"""

from agents_env.runner.plan import Plan
from agents_env.runner.records import Failure, Record, Statistics
from agents_env.runner.rollouts import Runner

__all__ = ["Failure", "Plan", "Record", "Runner", "Statistics"]
