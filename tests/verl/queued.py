"""Rollouts by verl's `AgentLoopManagerTQ`, as its v1 trainers make them: rows go through TransferQueue, and the replay
buffer of the asynchronous trainers gives them out, by group and by staleness."""

from __future__ import annotations

import argparse
import uuid
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils import tensordict_utils as tu

from tests.support.training.ratios import Row, Weights
from tests.verl.rollouts import configuration
from tests.verl.task import PROMPTS

PARTITION = "train"


class QueuedRollouts:
    """verl's manager with one worker, whose sessions have two branches each."""

    def __init__(self, flags: argparse.Namespace) -> None:
        config = configuration(flags, "two_branches")
        config.transfer_queue.enable = True
        # One that does not fit on Ray's processors is waited for without end; the default is 8.
        config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
        tq.init(config.transfer_queue)
        self._manager = AgentLoopManagerTQ.create(config, llm_client=None)
        self._buffer = ReplayBufferAsync(
            trainer_mode="separate_async",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=2,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({}),
            poll_interval=0.2,
            refill_fn=self.submit,
        )
        self._step = 0

    def submit(self, num_prompts: int) -> None:
        """As `PPOTrainer._submit_batch_to_rollout`."""
        raw = np.empty(num_prompts, dtype=object)
        raw[:] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:num_prompts]]
        uids = np.array([str(uuid.uuid4()) for _ in range(num_prompts)], dtype=object)
        index = np.array([str(number) for number in range(num_prompts)], dtype=object)
        batch = tu.get_tensordict({"raw_prompt": raw, "uid": uids, "index": index})
        tu.assign_non_tensor_data(batch, "global_steps", self._step)
        tag = {"is_prompt": True, "status": "pending", "global_steps": self._step}
        tq.kv_batch_put(keys=list(uids), partition_id=PARTITION, tags=[dict(tag) for _ in uids])
        self._manager.generate_sequences(batch)

    def report(self, step: int, weights: Weights) -> dict[str, Any]:
        """One batch for the trainer's `step`, against the published weights and against those before."""
        self._step = step
        self.submit(len(PROMPTS))
        sampled, _ = self._buffer.sample(step, PARTITION, len(PROMPTS))
        found = tq.kv_batch_get_by_meta(sampled)
        rows = [
            Row(ids.tolist(), [0] * len(prompt) + mask.tolist(), [0.0] * len(prompt) + logprobs.tolist())
            for ids, prompt, mask, logprobs in zip(
                found["input_ids"],
                found["prompts"],
                found["response_mask"],
                found["rollout_log_probs"],
                strict=True,
            )
        ]
        tq.kv_clear(keys=list(sampled.keys), partition_id=PARTITION)
        return {
            "queued_step": step,
            "rows_of_sessions": sorted(key.split("_", 1)[1] for key in sampled.keys),
            "rewards": [round(float(scores.sum()), 4) for scores in found["rm_scores"]],
            "min_global_steps": sorted({tag["min_global_steps"] for tag in sampled.tags}),
            "max_global_steps": sorted({tag["max_global_steps"] for tag in sampled.tags}),
            "ratio_off": weights.deviation(rows, weights.now),
            "ratio_off_version_before": weights.deviation(rows, weights.before),
        }

    def close(self) -> None:
        tq.close()
