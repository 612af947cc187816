"""Experience as a torch `IterableDataset`: each item is a batch of tensors.

    dataset = ExperienceDataset("http://127.0.0.1:8080", groups=4, group_size=8)
    for batch in DataLoader(dataset, batch_size=None):
        train(batch)
        dataset.trainer_version = publisher.publish(model.state_dict(), step=step).version

Invariants:
- an item is acknowledged when the next one is requested, and given back when the iteration is left before: so a
  `DataLoader` must not run ahead of the training loop by workers of its own. The reader's `prefetch` does that, in the
  background of this process, without acknowledging anything early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

from torch.utils.data import IterableDataset, get_worker_info

from protos.errors import InvalidRequest
from trainer_client.experience import ExperienceReader
from trainer_client.trajectories import PackedTensors, PaddedTensors
from trainer_client.wanted import Wanted, reader_state


class ExperienceDataset(IterableDataset[PackedTensors | PaddedTensors]):
    """An endless dataset: what `ExperienceReader.batches` gives, as tensors. `padded`: rows of one length, else packed.

    `wanted`: as `ExperienceReader.sample` takes it. Several iterations may run at once: each has a reader, and no
    trajectory is in two of them.
    """

    def __init__(
        self,
        gateway: str,
        *,
        reader: str = "trainer",
        trainer_version: int = 0,
        prefetch: int = 1,
        padded: bool = False,
        pad_id: int = 0,
        length: int | None = None,
        api_key: str | None = None,
        **wanted: Unpack[Wanted],
    ) -> None:
        self.trainer_version = trainer_version
        self._gateway, self._reader, self._prefetch, self._api_key = gateway, reader, prefetch, api_key
        self._padded, self._pad_id, self._length = padded, pad_id, length
        self._wanted = wanted
        self._in_use: set[str] = set()  # leases of the items that iterations are at
        self._resumed: Mapping[str, Any] | None = None  # a state that the next iteration goes on from

    def state_dict(self) -> dict[str, Any]:
        """As `ExperienceReader.state_dict`, with the current item's batch as used: take it after the step on it."""
        return {"reader": self._reader, "trainer_version": self.trainer_version, "used": sorted(self._in_use)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins with `ExperienceReader.resume(state)`."""
        self.trainer_version = max(self.trainer_version, reader_state(state).trainer_version)
        self._resumed = state

    def __iter__(self) -> Iterator[PackedTensors | PaddedTensors]:
        if get_worker_info() is not None:
            raise InvalidRequest(
                "workers of a DataLoader would acknowledge batches before they are used",
                hint="pass num_workers=0 to the DataLoader, and `prefetch` to the dataset",
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        with ExperienceReader(
            self._gateway, reader=self._reader, trainer_version=self.trainer_version, api_key=self._api_key
        ) as reader:
            if self._resumed is not None:
                reader.resume(self._resumed)
                self._resumed = None
            for batch in reader.batches(prefetch=self._prefetch, **self._wanted):
                arrays = batch.pack()
                self._in_use.add(batch.lease_id)
                try:
                    yield arrays.padded(self._length, pad_id=self._pad_id).torch() if self._padded else arrays.torch()
                finally:
                    self._in_use.discard(batch.lease_id)
                reader.trainer_version = self.trainer_version
