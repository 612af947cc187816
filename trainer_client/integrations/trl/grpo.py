"""TRL's `GRPOTrainer` on a Laminar fleet: weights through a relay, rollouts through the gateway.

    rollouts = LaminarRollouts(relay="127.0.0.1:7070", gateway="http://127.0.0.1:8080", agent=agent)
    trainer = GRPOTrainer(model, reward_funcs=gateway_reward, args=args, train_dataset=rows, rollout_func=rollouts)
    rollouts.attach(trainer)
    trainer.train()
    rollouts.close()

TRL calls `sync_weights` before the first rollouts of a step, and then the rollout function, on every rank.

Invariants:
- rollouts of a step are sampled under the version that was published for it, or at most `staleness_max` before;
- each prompt becomes one session and one row: its tokens, logprobs and mask are the gateway's record;
- what fails on the rank that publishes is raised on every rank.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from trl import GRPOTrainer

from protos.errors import InvalidRequest
from trainer_client import Publisher, TorchRanks, gathered, manifest_of
from trainer_client.experience import ExperienceReader
from trainer_client.integrations.rollouts import Agent, Planned, Rollouts, single_turn
from trainer_client.integrations.rows import one_row_each
from trainer_client.integrations.trl.weights import merged, named
from trainer_client.sessions import Sessions

WAIT_S = 120.0
"""For the trajectories of sessions that have finished: they are in the buffer when `finish` returns."""
PUBLISH_TIMEOUT_S = 600.0


def gateway_reward(prompts: Sequence[Any], reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """A reward function of TRL: the reward that each session's agent gave."""
    return list(reward)


class LaminarRollouts:
    """The `rollout_func` of a `GRPOTrainer`, and its weight sync (`attach`).

    `agent` plays one session of a task and returns its reward (see `rollouts.Agent`); the default asks the prompt in
    one turn and leaves the reward to TRL's own reward functions. The task is `{"prompt": ...}`: TRL passes no more.
    """

    def __init__(
        self,
        relay: str,
        gateway: str,
        agent: Agent | None = None,
        *,
        model: str = "policy",
        concurrency: int = 16,
        attempts: int = 3,
        staleness_max: int = 0,
    ) -> None:
        self.__name__ = "laminar_rollouts"  # TRL logs it
        self._relay, self._model = relay, model
        self._staleness_max = staleness_max
        self._client = Sessions(gateway, model, connections=concurrency)
        self._rollouts = Rollouts(self._client, agent or single_turn(), concurrency=concurrency, attempts=attempts)
        self._reader = ExperienceReader(gateway, reader=f"trl-{secrets.token_hex(4)}")
        self._publisher: Publisher | None = None
        self._sync: WeightSync | None = None

    def attach(self, trainer: GRPOTrainer) -> None:
        """Makes TRL publish before it rolls out, and correct for what was sampled by the logprobs that come back.

        Call it after the trainer was constructed (with `use_vllm=False`) and before `train`. It sets what TRL would set
        for a vLLM server of its own. Raises InvalidRequest for arguments under which the ratio of TRL's and the
        engines' probabilities would be wrong.
        """
        _check(trainer)
        self._publisher = Publisher(self._relay, self._model)
        self._sync = WeightSync(trainer, self._publisher)
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        trainer.vllm_generation, trainer._last_loaded_step = self._sync, -1

    @property
    def version(self) -> int:
        """The newest version published, 0 before the first."""
        return 0 if self._sync is None else self._sync.version

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        if self._sync is None or not self._sync.version:
            raise InvalidRequest("no weights were published yet", hint="call attach(trainer) before trainer.train()")
        planned = [self._plan(prompt, index, trainer) for index, prompt in enumerate(prompts)]
        sampling = {"temperature": trainer.args.temperature, "max_tokens": trainer.args.max_completion_length}
        names = self._rollouts.play(planned, sampling)
        self._reader.trainer_version = self._sync.version
        batch = self._reader.sample(session_ids=names, wait_s=WAIT_S)
        rows = one_row_each(names, batch.trajectories)
        self._reader.ack(batch)
        return {
            "prompt_ids": [row.token_ids[: row.begin] for row in rows],
            "completion_ids": [row.token_ids[row.begin :] for row in rows],
            "logprobs": [row.logprobs[row.begin :] for row in rows],
            "env_mask": [row.mask[row.begin :] for row in rows],
            "reward": [row.reward for row in rows],
            "version": [row.version for row in rows],
        }

    def close(self) -> None:
        self._rollouts.close()
        self._client.close()
        self._reader.close()
        if self._publisher is not None:
            self._publisher.close()

    def _plan(self, prompt: Any, index: int, trainer: GRPOTrainer) -> Planned:
        """TRL passes each prompt once for each of its samples, and each rank its slice: so the group's name is made of
        the prompt and the step, not counted."""
        assert self._sync is not None
        evaluates = not trainer.model.training
        digest = hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()[:12]
        step = trainer.state.global_step
        fields = {
            "group_id": f"{self._sync.run}-{'eval' if evaluates else 'step'}{step}-{digest}",
            "group_size": trainer.num_generations_eval if evaluates else trainer.num_generations,
            "sample_index": trainer.accelerator.process_index * 100_000 + index,
            "min_version": max(0, self._sync.version - self._staleness_max),
            "tags": {"trainer": "trl", "step": str(step), "purpose": "evaluation" if evaluates else "training"},
        }
        return Planned({"prompt": prompt}, fields)


class WeightSync:
    """What stands in for TRL's own vLLM client: `sync_weights` publishes a version. `version` is the newest one."""

    def __init__(self, trainer: GRPOTrainer, publisher: Publisher) -> None:
        self._trainer, self._publisher = trainer, publisher
        self.version = 0
        self.run = ""

    def sync_weights(self) -> None:
        """Called on every rank. Returns once the version is sealed; raises the same error on every rank."""
        accelerator = self._trainer.accelerator
        model = accelerator.unwrap_model(self._trainer.model)
        with merged(model):
            ticket = self._publisher.publish_stream(
                manifest_of(named(model)),
                lambda: gathered(named(model)),
                step=self._trainer.state.global_step,
                ranks=TorchRanks() if accelerator.num_processes > 1 else None,
                wait="sealed",
                timeout_s=PUBLISH_TIMEOUT_S,
            )
        self.version, self.run = ticket.version, ticket.run


def _check(trainer: GRPOTrainer) -> None:
    args = trainer.args
    neutral = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
    for name, allowed in neutral.items():
        if getattr(args, name) not in allowed:
            raise InvalidRequest(
                f"{name}={getattr(args, name)}: engines report logprobs after it and TRL computes them without",
                hint="leave it at its default; the temperature may be any",
            )
    if args.use_vllm:
        raise InvalidRequest("use_vllm=True starts a vLLM client of TRL's own", hint="leave it off: attach() sets it")
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise InvalidRequest("weights under DeepSpeed cannot be gathered here", hint="train with DDP or FSDP2")
    if getattr(trainer, "is_fsdp_enabled", False) and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise InvalidRequest("weights under FSDP1 cannot be gathered here", hint="set fsdp_version to 2")
