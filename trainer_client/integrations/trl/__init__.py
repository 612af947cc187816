"""TRL on a Laminar fleet (extra `trl`, TRL 1.16): `grpo` for its synchronous `GRPOTrainer`. See docs/trl.md."""

from trainer_client.integrations.rollouts import Agent, Outcome, Session, single_turn
from trainer_client.integrations.trl.grpo import LaminarRollouts, gateway_reward

__all__ = ["Agent", "LaminarRollouts", "Outcome", "Session", "gateway_reward", "single_turn"]
