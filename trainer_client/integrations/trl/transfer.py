"""The `weight_transfer` of TRL's `AsyncGRPOTrainer`: each sync publishes a version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from torch import Tensor

from protos.errors import StaleEpoch, Unavailable
from trainer_client import Publisher, TensorMeta, Wait

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 600.0
MISSED_MAX = 2
"""Syncs in a row that may fail for a relay that is away, before the trainer gets the error."""


def _nothing() -> Iterable[tuple[str, Tensor]]:
    return ()


class LaminarWeightTransfer:
    """Publishes what TRL streams, one tensor in memory at a time; engines load it when it suits them, nothing pauses.

    TRL leaves frozen parameters out of its stream: `frozen` gives them, called for each version (pairs of name and
    tensor). The first sync keeps the tensors in the host's memory, to know their shapes; later ones keep none.

    A sync whose relay is away is missed with a warning, twice in a row at most: rollouts go on under the version
    before.
    """

    def __init__(
        self,
        relay: str,
        model: str = "policy",
        *,
        frozen: Callable[[], Iterable[tuple[str, Tensor]]] = _nothing,
        wait: Wait = "sealed",
    ) -> None:
        self.version = 0
        """The newest version published; 0 before the first."""
        self._relay, self._model, self._frozen, self._wait = relay, model, frozen, wait
        self._publisher: Publisher | None = None
        self._manifest: tuple[TensorMeta, ...] = ()
        self._syncs = self._missed = 0

    def init_weight_transfer(self) -> None:
        self._publisher = Publisher(self._relay, self._model)

    def pause(self) -> None:
        """Nothing: engines take a version between sessions."""

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publishes a version; drains `iterator` in any case, since taking a tensor is a collective of all ranks."""
        self._syncs += 1
        try:
            self._send(iterator)
        except (Unavailable, StaleEpoch) as error:
            self._missed += 1
            if not self.version or self._missed > MISSED_MAX:
                raise
            log.warning("sync %d published nothing, rollouts stay on version %d: %s", self._syncs, self.version, error)

    def destroy(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _send(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        assert self._publisher is not None, "TRL calls init_weight_transfer first"
        tensors: Iterable[tuple[str, Tensor]] = chain(iterator, self._frozen())
        if not self._manifest:
            kept = [(name, tensor.cpu()) for name, tensor in tensors]
            self._manifest = tuple(TensorMeta(name, str(t.dtype), tuple(t.shape)) for name, t in kept)
            tensors = kept
        ticket = self._publisher.publish_stream(
            self._manifest, iter(tensors), step=self._syncs, wait=self._wait, timeout_s=PUBLISH_TIMEOUT_S
        )
        self.version, self._missed = ticket.version, 0
