"""TRL on a Laminar fleet (extra `trl`, TRL 1.16). See docs/trl.md.

`grpo` is for its synchronous `GRPOTrainer`, `transfer` and `worker` for `AsyncGRPOTrainer`.
"""

from trainer_client.integrations.rollouts import Agent, single_turn
from trainer_client.integrations.trl.grpo import LaminarRollouts, gateway_reward
from trainer_client.integrations.trl.transfer import LaminarWeightTransfer
from trainer_client.integrations.trl.worker import LaminarRolloutWorker
from trainer_client.sessions import Outcome, Session

__all__ = [
    "Agent",
    "LaminarRolloutWorker",
    "LaminarRollouts",
    "LaminarWeightTransfer",
    "Outcome",
    "Session",
    "gateway_reward",
    "single_turn",
]
