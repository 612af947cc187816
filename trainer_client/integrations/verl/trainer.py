"""verl's separate asynchronous trainer with engines outside verl: the trainer mode `laminar`.

    VERL_USE_EXTERNAL_MODULES=trainer_client.integrations.verl.trainer
    trainer.v1.trainer_mode=laminar
    transfer_queue.enable=True
    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.rollout.name=laminar

It is verl's `PPOTrainerSeparateAsync` without inference servers: an update of weights is a publish, by the checkpoint
engine `laminar`, and rollouts are the agent loop's. `rollout.name` says that there is no server, where verl would
otherwise import one. The settings of `trainer.v1.separate_async` hold.
"""

from __future__ import annotations

from typing import Any

from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from protos.errors import InvalidRequest
from trainer_client.integrations.verl.manager import LaminarCheckpointEngineManager

MODE = "laminar"

RolloutReplicaRegistry.register(MODE, lambda: RolloutReplica)  # of which none is made


@register_trainer(MODE)
class LaminarTrainer(PPOTrainerSeparateAsync):  # type: ignore[misc]
    """All of verl's GPUs train."""

    def __init__(self, config: Any) -> None:
        if config.actor_rollout_ref.get("hybrid_engine", True):
            raise InvalidRequest(
                "the trainer mode `laminar` has no inference servers", hint="set actor_rollout_ref.hybrid_engine=False"
            )
        with open_dict(config):
            if config.trainer.v1.get(MODE) is None:
                config.trainer.v1[MODE] = config.trainer.v1.separate_async
            rollout = config.actor_rollout_ref.rollout  # verl wants to hear of servers, of which none is started
            rollout.nnodes = rollout.nnodes or 1
        super().__init__(config)

    def _setup(self) -> None:
        # Not the parent's, which starts inference servers. The base class makes an empty manager of servers.
        PPOTrainer._setup(self)
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        self.standalone_server_manager = self.llm_server_manager
        self.standalone_checkpoint_manager = LaminarCheckpointEngineManager(engine, self.actor_rollout_wg, replicas=[])
        self.current_mode = HybridEngineMode.TRAINER
