"""verl's checkpoint engine `laminar`: weights go through relays, and no process group is formed.

    actor_rollout_ref.rollout.checkpoint_engine.backend=laminar
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.laminar.relay=127.0.0.1:7070

Rank 0 of the trainer publishes each `global_steps` to the relay of its host as a version with that step. Each rollout
worker reads the version from the relay of its own host, so `relay` is an address that is right on every host.

Invariants:
- a receiver takes the version that the sender makes in this very update: of its run, of that step, and newer than the
  sender's last one. Runs that resumed at the same step, and steps that are sent twice, are told apart;
- on the trainer's other ranks nothing is kept: they take their tensors, as the collective demands, and let them go.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

from paramserver.client import RelayClient
from protos.errors import InvalidRequest, NotFound
from trainer_client.integrations.verl.receiving import arrived, made_by, tensors
from trainer_client.integrations.verl.sending import Sender, Weights, WeightSender, drain

BACKEND = "laminar"
TIMEOUT_S = 600.0
"""For a version to be sealed, and to arrive at a rollout worker's relay."""


class LaminarCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]
    """One per process of verl's. `bucket_size` is not used: tensors are read from memory that the host shares.

    Args:
        relay: "host:port" of the relay on this process's host; default: $LAMINAR_RELAY.
        model: the name that the weights are published under.
        run: the run's id on the trainer; default: one made of the time.
        timeout_s: the deadline of one update, on either side.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        relay: str = "",
        model: str = "policy",
        run: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._relay = relay or os.environ.get("LAMINAR_RELAY", "")
        if not self._relay:
            raise InvalidRequest(
                "the checkpoint engine `laminar` was given no relay",
                hint="set rollout.checkpoint_engine.engine_kwargs.laminar.relay=HOST:PORT, or $LAMINAR_RELAY",
            )
        self._model, self._timeout_s = model, timeout_s
        self._sender = WeightSender(self._relay, model, run=run, timeout_s=timeout_s) if is_master else None
        self._awaited: Sender | None = None

    # ---- before and after each update, called by verl's manager on every worker

    def prepare(self) -> dict[str, Any]:
        """What the receivers will know the version by; empty from all but the sender."""
        if self._sender is None:
            return {}
        sender = self._sender.next
        return {"run": sender.run, "after": sender.after}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tells every worker of the sender; there is no other topology."""
        [sender] = [found for found in metadata if found]
        kwargs = [
            {name: [value] * size for name, value in sender.items()}
            for size in (actor_wg_world_size, rollout_world_size)
        ]
        return kwargs[0], kwargs[1]

    def init_process_group(self, run: str, after: int) -> None:
        self._awaited = Sender(run, after)

    def finalize(self) -> None:
        """The publisher stays: its connection is the trainer's claim on the model."""
        self._awaited = None

    # ---- weights

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, float]:
        """Publishes one version, on rank 0; the other ranks take their tensors and let them go.

        Tensors are taken on the calling thread. Returns verl's metrics once the version is sealed.
        """
        if self._sender is None:
            drain(iter(weights))
            return {}
        return self._sender.send(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """The tensors of the version that is being sent; waits for it. Valid until the next one is taken."""
        if self._awaited is None:
            raise InvalidRequest(
                "receive_weights without init_process_group: nothing says which trainer sends",
                hint="use verl's CheckpointEngineManager, or get_weights for the newest version",
            )
        async with RelayClient(self._relay) as relay:
            wanted = made_by(self._awaited, global_steps)
            version = await arrived(relay, self._model, wanted, self._timeout_s)
            async for pair in tensors(relay, self._model, version.version):
                yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """The tensors of the newest version that this host's relay holds, without a word to the trainer."""
        async with RelayClient(self._relay) as relay:
            newest = await relay.newest(self._model)
            if newest is None:
                raise NotFound(f"the relay at {self._relay} holds no version of {self._model} yet")
            async for pair in tensors(relay, self._model, newest.version):
                yield pair

    def close(self) -> None:
        """Gives up the trainer's claim on the model. A process that ends does so as well."""
        if self._sender is not None:
            self._sender.close()


CheckpointEngineRegistry.register(BACKEND)(LaminarCheckpointEngine)
