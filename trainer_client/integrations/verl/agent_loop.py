"""verl's agent loop on a Laminar fleet: a sample is a session of the gateway, played by an agent of the user's.

    # agent_loops.yaml, for rollout.agent.agent_loop_config_path; with rollout.agent.default_agent_loop=laminar
    - name: laminar
      _target_: trainer_client.integrations.verl.agent_loop.LaminarAgentLoop
      gateway: http://127.0.0.1:8080
      relay: 127.0.0.1:7070
      agent: my_package.my_module.my_agent

Invariants:
- token ids, masks and logprobs are the gateway's record; nothing is tokenized here;
- `min_global_steps` and `max_global_steps` are the steps of the versions that sampled the row's tokens;
- a session that an agent failed in is played again, and its row never reaches verl.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from paramserver.client import RelayClient
from protos.errors import InvalidRequest, Unavailable
from protos.trajectories import Trajectory
from trainer_client.experience import AsyncExperienceReader
from trainer_client.integrations.rollouts import Agent, Planned, Rollouts, single_turn
from trainer_client.integrations.rows import row_of
from trainer_client.integrations.verl.steps import Steps
from trainer_client.loop import LoopThread
from trainer_client.sessions import Sessions

WAIT_S = 120.0
"""For the trajectories of a session that has finished: they are in the buffer when `finish` returns."""


class Fleet:
    """One gateway and one relay, for all agent loops of a process."""

    def __init__(self, gateway: str, relay: str, model: str, agent: str, concurrency: int, attempts: int) -> None:
        self._model = model
        self._rollouts = Rollouts(
            Sessions(gateway, model, connections=concurrency),
            _agent(agent),
            concurrency=concurrency,
            attempts=attempts,
        )
        self._loop = LoopThread("laminar-verl")  # both clients belong to one event loop, and verl's may change
        self._reader = AsyncExperienceReader(gateway, reader=f"verl-{secrets.token_hex(4)}")
        self._relay = RelayClient(relay)
        self.steps = Steps()

    async def play(
        self, task: Mapping[str, Any], sampling: Mapping[str, Any], staleness_max: int, tags: Mapping[str, str]
    ) -> list[Trajectory]:
        """One session under the newest version, or at most `staleness_max` before; its trajectories, one a leaf."""
        await self._look()
        fields = {"min_version": max(1, self.steps.newest - staleness_max), "tags": dict(tags)}
        [playing] = self._rollouts.start([Planned(task, fields)], sampling)
        name = await asyncio.wrap_future(playing)
        await self._look()
        return await asyncio.wrap_future(self._loop.start(self._collect(name)))

    async def _look(self) -> None:
        held = await asyncio.wrap_future(self._loop.start(self._relay.versions(self._model)))
        self.steps.seen((version.version, version.step) for version in held)

    async def _collect(self, name: str) -> list[Trajectory]:
        self._reader.trainer_version = self.steps.newest
        batch = await self._reader.sample(session_ids=[name], wait_s=WAIT_S)
        await self._reader.ack(batch)
        if not batch.trajectories:
            raise Unavailable(
                f"session {name} has finished and did not come back",
                hint="another reader took it, or it was staler than the gateway's --staleness-max",
            )
        return list(batch.trajectories)


fleet = functools.lru_cache(maxsize=8)(Fleet)
"""verl makes an agent loop for each sample; those with the same settings share one fleet."""


def _agent(name: str) -> Agent:
    if not name:
        return single_turn()
    module, _, function = name.rpartition(".")
    try:
        found: Agent = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(f"agent {name!r}: {error}", hint="name a function: my_package.my_module.agent") from error
    return found


class LaminarAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Rolls out one sample. verl's own engines, tokenizer and server client are not used.

    Args:
        gateway: its base URL.
        relay: "host:port" of a relay, which knows the steps of versions.
        agent: the dotted name of a function `agent(session, task) -> reward` (see `rollouts.Agent`). The task is the
            row of the data set, with the messages as `prompt`. Default: one turn, rewarded by verl.
        concurrency: sessions at once, of one agent loop worker.
        staleness_max: how many versions behind the newest a session may begin.
    """

    def __init__(
        self,
        trainer_config: Any,
        *_: Any,
        gateway: str,
        relay: str,
        model: str = "policy",
        agent: str = "",
        concurrency: int = 64,
        attempts: int = 3,
        staleness_max: int = 0,
        **__: Any,
    ) -> None:
        # Not verl's own: it builds a tokenizer's token builder, and refuses models that it does not know.
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self._staleness_max = staleness_max
        self._fleet = fleet(gateway, relay, model, agent, concurrency, attempts)

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        """One row, or a list of rows if the session has branches: verl's v1 trainers take those."""
        begun = time.monotonic()
        sampling = {name: sampling_params[name] for name in ("temperature", "top_p", "top_k")}
        sampling["max_tokens"] = self.rollout_config.response_length
        task = {**fields, "prompt": [dict(message) for message in fields["raw_prompt"]]}
        tags = {"trainer": "verl", "uid": str(fields.get("uid", ""))}
        trajectories = await self._fleet.play(task, sampling, self._staleness_max, tags)
        outputs = self._outputs(trajectories, time.monotonic() - begun)
        return outputs[0] if len(outputs) == 1 else outputs

    def _outputs(self, trajectories: Sequence[Trajectory], took_s: float) -> list[Any]:
        outputs = [found for one in trajectories if (found := self._output(one, took_s)) is not None]
        if not outputs:
            raise InvalidRequest(
                f"session {trajectories[0].session_id} has no sampled token",
                hint="an agent calls the model once at least",
            )
        return outputs

    def _output(self, trajectory: Trajectory, took_s: float) -> Any:
        row = row_of(trajectory)
        if row is None:
            return None
        if row.begin > self.rollout_config.prompt_length:
            raise InvalidRequest(
                f"session {row.session_id} begins with {row.begin} tokens, and rollout.prompt_length is "
                f"{self.rollout_config.prompt_length}",
                hint="raise it: a prompt cut afterwards is not what the tokens were sampled after",
            )
        sampled_under = [version for version in trajectory.versions if version >= 0]
        response = slice(row.begin, row.begin + self.rollout_config.response_length)
        return AgentLoopOutput(
            prompt_ids=row.token_ids[: row.begin],
            response_ids=row.token_ids[response],
            response_mask=row.mask[response],
            response_logprobs=row.logprobs[response],
            reward_score=row.reward,
            num_turns=2 * trajectory.turns,
            metrics=AgentLoopMetrics(generate_sequences=took_s),
            extra_fields={
                "min_global_steps": self._fleet.steps.of(min(sampled_under)),
                "max_global_steps": self._fleet.steps.of(max(sampled_under)),
                "laminar_session_id": row.session_id,
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {},
            },
        )
