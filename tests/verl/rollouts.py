"""Rollouts by verl's `AgentLoopManager` on local Ray, each session played by `tests.verl.task.two_turns`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopManager

from tests.support.training.ratios import Row, Weights
from tests.verl.task import PROMPTS

LOOP = """\
- name: laminar
  _target_: trainer_client.integrations.verl.agent_loop.LaminarAgentLoop
  gateway: {gateway}
  relay: {relay}
  agent: tests.verl.task.{agent}
"""
SAMPLES = 2
"""Of each prompt."""


def configuration(flags: argparse.Namespace, agent: str, **settings: Any) -> Any:
    """verl's, for rollouts whose sessions are played by `tests.verl.task.AGENT`; `settings` by their dotted names."""
    loops = Path(flags.directory) / f"{agent}.yaml"
    loops.write_text(LOOP.format(gateway=flags.gateway, relay=flags.relay, agent=agent))
    rollout = {
        "name": "vllm",
        "n": SAMPLES,
        "prompt_length": 128,
        "response_length": 128,
        "calculate_log_probs": True,
        "agent.num_workers": 1,
        "agent.agent_loop_config_path": loops,
        "agent.default_agent_loop": "laminar",
    }
    overrides = {f"actor_rollout_ref.rollout.{name}": value for name, value in rollout.items()} | settings
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [f"actor_rollout_ref.model.path={flags.model}", *(f"{name}={value}" for name, value in overrides.items())],
        )


class Rollouts:
    """verl's manager with one worker, and the published weights of the newest two versions."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._manager = AgentLoopManager.create(configuration(flags, "two_turns"), llm_client=None)
        self._model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32)
        self.weights = Weights(self._model)

    def published(self, tensors: dict[str, torch.Tensor]) -> None:
        """The version that the next rollouts are to be sampled under."""
        _, unexpected = self._model.load_state_dict(tensors, strict=False)
        assert not unexpected, unexpected
        self._model.tie_weights()
        self.weights.published(self._model)

    def report(self, step: int) -> dict[str, Any]:
        """One batch of rollouts, against the published weights and against those before."""
        found = self._manager.generate_sequences(_prompts(step))
        rows = _rows(found)
        extra = found.non_tensor_batch
        return {
            "step": step,
            "rows": len(rows),
            "min_global_steps": sorted(set(extra["min_global_steps"].tolist())),
            "max_global_steps": sorted(set(extra["max_global_steps"].tolist())),
            "sampled_tokens": int(found.batch["response_mask"].sum()),
            "masked_tokens": sum(len(row.mask) - sum(row.mask) for row in rows) - _prompt_tokens(found),
            "rewards": [round(reward, 4) for reward in found.batch["rm_scores"].sum(dim=1).tolist()],
            "ratio_off": self.weights.deviation(rows, self.weights.now),
            "ratio_off_version_before": self.weights.deviation(rows, self.weights.before),
        }


def _prompts(step: int) -> DataProto:
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS for _ in range(SAMPLES)]
    count = len(messages)
    raw = np.empty(count, dtype=object)
    raw[:] = messages
    return DataProto.from_dict(
        tensors={"dummy": torch.zeros(count, 1)},
        non_tensors={"raw_prompt": raw, "index": np.arange(count) // SAMPLES},
        meta_info={"global_steps": step, "validate": False},
    )


def _prompt_tokens(found: DataProto) -> int:
    return int(found.batch["attention_mask"][:, : found.batch["prompts"].shape[1]].sum())


def _rows(found: DataProto) -> Sequence[Row]:
    """Without verl's padding; its logprobs and masks begin with the response."""
    rows = []
    length = found.batch["prompts"].shape[1]
    for ids, present, mask, logprobs in zip(
        found.batch["input_ids"],
        found.batch["attention_mask"].bool(),
        found.batch["response_mask"],
        found.batch["rollout_log_probs"],
        strict=True,
    ):
        prompt, response = int(present[:length].sum()), present[length:]
        rows.append(
            Row(
                ids[present].tolist(),
                [0] * prompt + mask[response].tolist(),
                [0.0] * prompt + logprobs[response].tolist(),
            )
        )
    return rows
