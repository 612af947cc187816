"""vLLM's trainer side of weight transfer, the engine `laminar` of its factory. Importing this module registers it. Each
`send_weights` publishes a version to a relay, and no inference engine is waited for.

    engine = WeightTransferTrainerFactory.trainer_init(
        LaminarTrainerInitInfo(relay="127.0.0.1:7070", rank=rank), client=None, source=ModuleSource(model)
    )
    engine.send_weights()  # on every rank, after each step

Invariants:
- rank 0 publishes, one tensor in memory at a time; the other ranks take every tensor of their source and let it go,
  since taking one may be a collective;
- every rank goes through its source to the end, whatever happens to the publish;
- `client` is not used: the fleet's gateway makes its engines load, and no inference server is called from here.

Written for vLLM 0.32 (`vllm/distributed/weight_transfer/base.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from protos.errors import InvalidRequest
from trainer_client.publisher import Publisher
from trainer_client.streaming.manifest import TensorMeta

BACKEND = "laminar"
TIMEOUT_S = 600.0
"""For a version to be sealed."""


@dataclass
class LaminarTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Where to publish. `rank` (by keyword) is this process's; 0 publishes.

    `relay`: "host:port" of a relay, best one on rank 0's host; default: $LAMINAR_RELAY. `model`: the name to publish
    under. `run`: the run's id; default: one made of the time. `timeout_s`: the deadline of one version.
    """

    backend: ClassVar[str] = BACKEND

    relay: str = ""
    model: str = "policy"
    run: str | None = None
    timeout_s: float = TIMEOUT_S


class LaminarTrainerEngine(TrainerWeightTransferEngine[LaminarTrainerInitInfo]):  # type: ignore[misc]
    """One per rank. `version` is the newest that this rank published; 0 before the first, and on the other ranks."""

    init_info_cls = LaminarTrainerInitInfo

    def __init__(self, init_info: LaminarTrainerInitInfo, *, client: Any, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._timeout_s = init_info.timeout_s
        self._publisher: Publisher | None = None
        self._sent = 0
        self.version = 0
        if self.is_sender:
            relay = init_info.relay or os.environ.get("LAMINAR_RELAY", "")
            if not relay:
                raise InvalidRequest(
                    "the trainer engine `laminar` was given no relay",
                    hint="pass LaminarTrainerInitInfo(relay=HOST:PORT), or set $LAMINAR_RELAY",
                )
            self._publisher = Publisher(relay, init_info.model, run=init_info.run)

    @classmethod
    def trainer_init(
        cls, init_info: LaminarTrainerInitInfo, *, client: Any = None, source: WeightSource | None = None
    ) -> LaminarTrainerEngine:
        """Called on every rank. Nothing is called over the network; the first `send_weights` connects."""
        if source is None:
            raise InvalidRequest(
                "the trainer engine `laminar` publishes whole versions, and was given no source",
                hint="pass source=ModuleSource(model), or another WeightSource",
            )
        return cls(init_info, client=client, source=source)

    def send_weights(self, step: int | None = None) -> None:
        """Publishes one version on rank 0, and returns once it is sealed; called on every rank.

        `step` is the version's label; default: how often this was called. Raises what `Publisher.publish_stream` does,
        on rank 0 alone.
        """
        self._sent += 1
        metadata = self.source.metadata()  # a collective as well, with some sources
        taking = iter(self.source)  # only once, on each rank alike: a publish that fails is not begun again by itself
        try:
            if self._publisher is not None:
                ticket = self._publisher.publish_stream(
                    [TensorMeta(meta.name, str(meta.dtype), tuple(meta.shape)) for meta in metadata],
                    taking,
                    step=self._sent if step is None else step,
                    wait="sealed",
                    timeout_s=self._timeout_s,
                )
                self.version = ticket.version
        finally:
            for _ in taking:
                pass

    def shutdown(self) -> None:
        """Gives up the trainer's claim on the model. A process that ends does so as well."""
        if self._publisher is not None:
            self._publisher.close()


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, LaminarTrainerEngine)
