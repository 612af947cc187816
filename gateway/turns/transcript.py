"""The transcript of a turn: its record as tokens come, mirrored in the partial-response pool and on the timeline.

Invariants:
- a token is in the record and in the pool once, in order, and belongs to the last segment;
- a segment is of one engine incarnation under one version. Where the engine reports another version with its tokens,
  the report is recorded, and the difference is counted and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from gateway.core.fleet.labels import FOREIGN, version_of
from gateway.core.fleet.state import EngineState
from gateway.core.sampling import sampled_with, segment_sampling
from gateway.core.types import Evidence, FinishReason, LogprobsKind, SegmentCause, TopLogprob, TurnRecord, Version
from gateway.engines.base import EngineChunk, StreamCut
from gateway.runtime.clock import unix_s
from gateway.runtime.counters import Counters
from gateway.store import PartialResponsePool, Timeline
from protos.foreign_text import quoted
from protos.trajectories import Segment

log = logging.getLogger(__name__)


class Transcript:
    """`eos_ids`: tokens that end the turn, unless its sampling ignores them. `vocab_size`: every id of the tokenizer,
    and of the model's embedding beyond it, is below it."""

    def __init__(
        self,
        record: TurnRecord,
        *,
        pool: PartialResponsePool,
        timeline: Timeline,
        counters: Counters,
        eos_ids: frozenset[int],
        vocab_size: int,
        logprobs_kind: LogprobsKind,
    ) -> None:
        self.record, self.request = record, record.request
        self._pool, self._timeline, self._counters = pool, timeline, counters
        self._eos_ids, self._vocab_size, self._logprobs_kind = eos_ids, vocab_size, logprobs_kind
        self.finish: FinishReason | None = None  # reported by the engine; its stream is about to end
        self._started_with = ""  # the label of the last segment's engine for its first weights
        self._labels: set[str] = set()  # that came with the last segment's tokens, whichever event

    def take(self, chunk: EngineChunk) -> None:
        """Records one token or more. Raises StreamCut, and records nothing, for tokens that cannot be this turn's."""
        record, sampling, token_ids, logprobs = self.record, self.request.sampling, chunk.token_ids, chunk.logprobs
        if len(token_ids) > sampling.max_tokens - len(record.token_ids):
            raise StreamCut("protocol", f"an engine sent more than the {self.left} tokens left of the budget")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise StreamCut(
                "protocol", f"an engine sampled token id {wrong}, and the vocabulary has {self._vocab_size}"
            )
        top = self._alternatives(chunk) if sampling.top_logprobs else ()
        try:
            self._pool.append(self.request.turn_id, token_ids, logprobs, top)
        except OverflowError as e:
            raise StreamCut("protocol", f"it sent an id outside of any vocabulary: {e}") from e
        record.token_ids += token_ids
        record.logprobs += logprobs
        if top:
            record.top_logprobs += top
        self._counters.tokens_generated += len(token_ids)

    def _alternatives(self, chunk: EngineChunk) -> tuple[tuple[TopLogprob, ...], ...]:
        """One list for each token; none need be reported. StreamCut for what no engine may report."""
        top, most = chunk.top_logprobs or ((),) * len(chunk.token_ids), self.request.sampling.top_logprobs + 1
        if len(top) != len(chunk.token_ids):
            raise StreamCut(
                "protocol", f"an engine sent {len(top)} lists of alternatives to {len(chunk.token_ids)} tokens"
            )
        for alternatives in top:
            if len(alternatives) > most:  # the sampled one stands among them in some dialects
                raise StreamCut(
                    "protocol", f"an engine sent {len(alternatives)} alternatives where {most} are the most"
                )
            for one in alternatives:
                if not 0 <= one.token_id < self._vocab_size:
                    known = f"the vocabulary has {self._vocab_size}"
                    raise StreamCut(
                        "protocol", f"an engine sent token id {one.token_id} as an alternative, and {known}"
                    )
        return top

    @property
    def version(self) -> Version:
        return Version(self.record.segments[-1].version)

    @property
    def last_segment(self) -> int:
        return len(self.record.segments) - 1

    def open_segment(self, engine: EngineState, cause: SegmentCause) -> None:
        now, at = unix_s(), len(self.record.token_ids)
        sampling = segment_sampling(self.request, at)
        self._counters.turns_unseeded += sampling.seed is not None and not engine.seeds
        segment = Segment(
            turn=self.request.turn_index,
            engine=engine.name,
            incarnation=engine.incarnation,
            version=engine.version,
            start=at,
            end=at,
            cause=cause,
            started_unix_s=now,
            ended_unix_s=now,
            seed=sampling.seed if engine.seeds else None,
            sampled_with=sampled_with(sampling, self._logprobs_kind, engine.kind),
            dtype=engine.dtype,
        )
        self.record.segments.append(segment)
        self._labels, self._started_with = set(), engine.started_with
        self._pool.open_segment(self.request.turn_id, segment)

    def close_segment(self, end: str, group_id: str) -> None:
        segment = msgspec.structs.replace(
            self.record.segments[-1], end=len(self.record.token_ids), ended_unix_s=unix_s()
        )
        self.record.segments[-1] = segment
        self._pool.close_segment(self.request.turn_id, segment)
        self._timeline.add(
            "segment",
            session_id=self.request.session_id,
            group_id=group_id,
            turn=self.request.turn_index,
            engine=segment.engine,
            version=segment.version,
            dtype=segment.dtype,
            started_unix_s=segment.started_unix_s,
            ended_unix_s=segment.ended_unix_s,
            tokens=segment.end - segment.start,
            cause=segment.cause,
            end=end,
        )

    def note_versions(self, chunk: EngineChunk) -> None:
        """Before its tokens are recorded. Cuts a stream whose first tokens report another version."""
        reported = self._versions(chunk.versions)
        if reported - {self.version} and self.record.segments[-1].start == len(self.record.token_ids):
            raise StreamCut("version", f"sent to version {self.version}, sampled by {_listed(chunk.versions)}")
        self._labels.update(chunk.versions)

    def _versions(self, labels: Iterable[str]) -> set[Version]:
        return {version_of(label, self._started_with) for label in labels}

    def check_version(self) -> bool:
        """Records the version that the engine reported with the last segment's tokens, however that ended. False: it is
        not the fleet state's."""
        reported = self._versions(self._labels)
        if not reported:
            return True
        agrees = reported == {self.version}
        if not agrees:
            self._counters.version_mismatches += 1
            sampled_by = _listed(self._labels)
            log.error("turn %s: sent to version %d, sampled by %s", self.request.turn_id, self.version, sampled_by)
        evidence: Evidence = "told" if len(reported) == 1 and FOREIGN not in reported else "contradicted"
        version = max(reported - {FOREIGN}, default=self.version)
        last = msgspec.structs.replace(self.record.segments[-1], version=version, evidence=evidence)
        self.record.segments[-1] = last
        return agrees

    @property
    def complete(self) -> bool:
        """Nothing is left to generate, whether an engine reported the finish or not."""
        return self.finish is not None or self.left == 0 or self.stopped

    @property
    def stopped(self) -> bool:
        """Its last token ended it: an engine must not continue after it."""
        record, sampling = self.record, self.request.sampling
        if not record.token_ids or len(record.token_ids) <= sampling.min_tokens:
            return False
        last = record.token_ids[-1]
        return last in sampling.stop_token_ids or (last in self._eos_ids and not sampling.ignore_eos)

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.request.sampling.max_tokens - len(self.record.token_ids)


def _listed(labels: Iterable[str]) -> str:
    return ", ".join(map(quoted, sorted(labels)))
