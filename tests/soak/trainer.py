"""The trainer of the soak: publishes the weights of one step after the other, and uses up experience.

`python -m tests.soak.trainer --relay HOST:PORT --gateway URL ... --journal FILE`, with a trainer's key in
`LAMINAR_API_KEY`. Its journal is its checkpoint, as docs/experience.md and docs/publishing.md have it: a batch and the
reader's state that names its lease are one entry, written before the batch is acknowledged. Killed and started again,
it resumes from the last one; the step that it was at is published `once`.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from protos.errors import LaminarError, NotFound, Unavailable
from protos.process import setup_logging
from protos.trajectories import Trajectory
from tests.soak.journal import Follower, Journal
from tests.soak.work import MODEL, Run
from tests.support.tiny_model import weights
from trainer_client import Batch, ExperienceReader, Publisher

log = logging.getLogger("soak.trainer")

T = TypeVar("T")
AGAIN_S = 0.5
STEPS_KEPT = 16
"""Of a publisher's state in the journal: this program asks for none of them."""


@dataclass
class Checkpoint:
    """What the last life left. `step`: the one that was begun and is not published, or the next."""

    step: int = 1
    publisher: dict[str, Any] | None = None
    reader: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Checkpoint:
        found = cls()
        for entry in Follower(path).entries():
            match entry["did"]:
                case "published":
                    found.step, found.publisher = entry["step"] + 1, entry["publisher"]
                case "life":
                    found.publisher = entry["publisher"]
                case "used":
                    found.reader = entry["reader"]
        return found


def runs_of(trajectory: Trajectory) -> list[Run]:
    """Where tokens were sampled, and under which version."""
    runs, at = [], 0
    for (mask, version), tokens in groupby(zip(trajectory.loss_mask, trajectory.versions, strict=True)):
        end = at + sum(1 for _ in tokens)
        if mask:
            runs.append((at, end, version))
        at = end
    return runs


class Trainer:
    def __init__(self, options: argparse.Namespace, journal: Journal) -> None:
        self._options, self._journal = options, journal
        self._readers = [ExperienceReader(url, reader="soak", timeout_s=15.0) for url in options.gateway]

    def train(self, publisher: Publisher, checkpoint: Checkpoint) -> None:
        """For ever: a version every `publish_s`, and batches in between."""
        if checkpoint.publisher is not None:
            publisher.load_state_dict(checkpoint.publisher)
        self._journal.add(did="life", publisher=self._state(publisher))  # the next one has to know this run
        states = [checkpoint.reader] if checkpoint.reader else []
        given_back = self._by_any(lambda reader: reader.resume(*states))
        log.info("resumed at step %d, %d trajectories given back", checkpoint.step, given_back)
        step, next_at = checkpoint.step, time.monotonic()
        while True:
            if time.monotonic() >= next_at:
                if self._publish(publisher, step):
                    step, next_at = step + 1, time.monotonic() + self._options.publish_s
                else:
                    next_at = time.monotonic() + AGAIN_S
            self._use()

    def _publish(self, publisher: Publisher, step: int) -> bool:
        try:
            ticket = publisher.publish(weights("llama", "float32", step), step=step, wait="sealed", once=True)
        except LaminarError as error:
            log.warning("step %d is not published yet: %s", step, error)
            return False
        self._journal.add(did="published", step=step, version=ticket.version, publisher=self._state(publisher))
        for reader in self._readers:
            reader.trainer_version = ticket.version
        return True

    def _state(self, publisher: Publisher) -> dict[str, Any]:
        state = publisher.state_dict()
        return {**state, "steps": state["steps"][-STEPS_KEPT:]}

    def _use(self) -> None:
        """Samples a batch, writes it down with the lease, and acknowledges it."""
        try:
            batch = self._readers[0].sample(trajectories=self._options.batch, wait_s=1.0, lease_s=self._options.lease_s)
        except LaminarError as error:
            log.warning("no batch: %s", error)
            self._readers.append(self._readers.pop(0))
            time.sleep(AGAIN_S)
            return
        if not batch:
            return
        used = [_entry(trajectory) for trajectory in batch.trajectories]
        self._journal.add(did="used", lease=batch.lease_id, used=used, reader=self._readers[0].state_dict(batch))
        self._acknowledge(batch)

    def _acknowledge(self, batch: Batch) -> None:
        try:
            self._by_any(lambda reader: reader.ack(batch))
        except NotFound as error:
            self._journal.add(did="late", lease=batch.lease_id, why=str(error))

    def _by_any(self, call: Callable[[ExperienceReader], T]) -> T:
        """By the first gateway that answers, however long none does."""
        while True:
            for reader in self._readers:
                try:
                    return call(reader)
                except Unavailable as error:
                    log.warning("%s", error)
            time.sleep(AGAIN_S)


def _entry(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "session": trajectory.session_id,
        "reward": trajectory.reward,
        "leaf": trajectory.leaf,
        "leaves": trajectory.leaves,
        "ids": trajectory.token_ids,
        "runs": runs_of(trajectory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains in a soak.")
    parser.add_argument("--relay", required=True, help="host:port of a relay")
    parser.add_argument("--gateway", action="append", required=True, help="base URL; given once for each gateway")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--publish-s", type=float, required=True, help="from one version to the next")
    parser.add_argument("--batch", type=int, default=8, help="trajectories")
    parser.add_argument("--lease-s", type=float, default=600.0)
    options = parser.parse_args()
    setup_logging("info")
    checkpoint = Checkpoint.of(options.journal)
    with Journal(options.journal) as journal:
        while True:
            try:
                with Publisher(options.relay, MODEL) as publisher:
                    Trainer(options, journal).train(publisher, checkpoint)
            except Unavailable as error:  # the relay is away as this begins
                log.warning("%s", error)
                time.sleep(AGAIN_S)
                checkpoint = Checkpoint.of(options.journal)


if __name__ == "__main__":
    main()
