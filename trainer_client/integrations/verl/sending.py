"""The trainer's side of the checkpoint engine: one pass through verl's weights becomes one version.

verl hands over a generator of (name, tensor), and says nothing beforehand of what will come. To take the next tensor is
a collective, so every rank goes through its generator to the end, whatever happens to the publish.

Invariants:
- the first pass of a run is copied to host memory, for nobody knows names, dtypes and shapes yet; later passes are
  announced by those of the first, and hold one tensor at a time;
- a version's step is verl's `global_steps`;
- a pass that failed published nothing, and its error is raised.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from protos.errors import InvalidRequest
from trainer_client.publisher import Publisher
from trainer_client.streaming.manifest import Manifest, manifest_of
from trainer_client.tickets import Ticket

Weights = Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Sender:
    """What receivers need to know the next version by: it is of `run`, and newer than `after`."""

    run: str
    after: int


def drain(weights: Iterator[Any]) -> None:
    """Takes the rest of the tensors, and lets them go."""
    for _ in weights:
        pass


class WeightSender:
    """One run of one model. `announced`: what the passes so far consisted of."""

    def __init__(self, relay: str, model: str, *, run: str | None, timeout_s: float) -> None:
        self._publisher = Publisher(relay, model, run=run)
        self._timeout_s = timeout_s
        self._announced: Manifest | None = None
        self._newest: Ticket | None = None

    @property
    def next(self) -> Sender:
        return Sender(self._publisher.run, 0 if self._newest is None else self._newest.version)

    def send(self, weights: Weights, step: int | None) -> dict[str, float]:
        """Publishes one version and returns once it is sealed. `step` None: one more than the last."""
        begun = time.monotonic()
        taking = iter(weights)
        try:
            self._newest = self._publish(taking, self._step(step))
        finally:
            drain(taking)
        return {"laminar/version": float(self._newest.version), "laminar/publish_s": time.monotonic() - begun}

    def close(self) -> None:
        self._publisher.close()

    def _step(self, step: int | None) -> int:
        if step is not None:
            return int(step)
        return 0 if self._newest is None else self._newest.step + 1

    def _publish(self, taking: Iterator[tuple[str, Any]], step: int) -> Ticket:
        if self._announced is None:
            kept = _copied(taking)
            manifest = manifest_of(kept)
            ticket = self._publisher.publish_stream(
                manifest, lambda: iter(kept.items()), step=step, wait="sealed", timeout_s=self._timeout_s
            )
            self._announced = manifest
            return ticket
        try:
            return self._publisher.publish_stream(
                self._announced, taking, step=step, wait="sealed", timeout_s=self._timeout_s
            )
        except InvalidRequest:  # the model is another than it was: the next pass is taken as a first one
            self._announced = None
            raise


def _copied(taking: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Copies in host memory. They are copies there too: a generator may fill one buffer again and again."""
    kept: dict[str, Any] = {}
    for name, tensor in taking:
        if name in kept:
            raise InvalidRequest(f"tensor {name!r} came twice", hint="every name is published once")
        kept[name] = tensor.detach().to("cpu", copy=True)
    return kept
