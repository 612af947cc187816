"""One engine, synchronous: requests in, steps that yield deltas out. The model loop owns it; nothing here waits.

A step: the scheduler's KV copies, then one or more forward passes over its segments, then sampling. In
batch-invariant mode every forward pass, and the head after it, has exactly INVARIANT_ROWS rows and attention goes token
by token, so that no kernel ever sees a shape that depends on the rest of the batch. Then a sequence's results are a
function of its own tokens, and a turn cut anywhere and resumed from its ids continues exactly as it would have.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gateway.engines.embedded.batching.blocks import BlockPool
from gateway.engines.embedded.batching.scheduler import Scheduler, SchedulerCounters, Segment
from gateway.engines.embedded.batching.sequence import Delta, FinishReason, GenerationRequest, Sequence, Token
from gateway.engines.embedded.compute.attention import Span
from gateway.engines.embedded.compute.kv import KvMemory
from gateway.engines.embedded.compute.model import DecoderModel
from gateway.engines.embedded.compute.sampling import SamplingRow, sample
from gateway.engines.embedded.compute.shape import ModelShape, read_shape
from gateway.engines.embedded.compute.weights import Snapshot
from gateway.engines.embedded.config import INVARIANT_ROWS, EngineConfig
from protos.errors import InvalidRequest, LaminarError

log = logging.getLogger(__name__)

HEAD = "lm_head.weight"
PAD_ROWS = 16
"""Outside batch-invariant mode, larger batches are padded to multiples of this: fewer kernel shapes to prepare."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The statistics of /metrics, /load and tests: a consistent copy taken between steps."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int

    @property
    def kv_usage(self) -> float:
        return self.num_blocks_used / self.num_blocks


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise InvalidRequest(f"unknown device {name!r}", hint="auto, cpu or cuda") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device cuda: torch sees no GPU", hint="use --device cpu or auto")
    return device


class Engine:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config.check()
        self.shape: ModelShape = read_shape(config.model)
        if config.max_model_len > self.shape.context:
            raise InvalidRequest(
                f"max_model_len {config.max_model_len} exceeds the model's context of {self.shape.context}",
                hint=f"lower --max-model-len to at most {self.shape.context}",
            )
        torch.set_num_threads(config.threads)
        self.weight_version = config.weight_version
        device = pick_device(config.device)
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self._model = DecoderModel(self.shape, dtype, device, config.max_model_len)
        with self._open(config.model) as snapshot:
            self._model.load(snapshot.__getitem__)
        self._kv = KvMemory(
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            num_rows=config.max_num_seqs,
            max_len=config.max_model_len,
            num_blocks=config.num_blocks,
            dtype=dtype,
            device=device,
        )
        self.scheduler = Scheduler(BlockPool(config.num_blocks), config.max_num_seqs, config.max_batched_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    # -- requests --

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def add(self, request: GenerationRequest) -> None:
        """Queues a request; its lengths were checked against `max_model_len` by the caller."""
        assert len(request.prompt_ids) + request.params.max_tokens <= self.config.max_model_len
        assert request.request_id not in self._sequences
        sequence = Sequence(request, self._arrivals)
        self._arrivals += 1
        self._prompt_tokens += len(request.prompt_ids)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_ids: list[str] | None = None) -> list[Delta]:
        """Ends these requests (None: all) and frees their KV; unknown ids are passed over."""
        ids = list(self._sequences) if request_ids is None else request_ids
        return [self._end(self._sequences[id], "abort") for id in ids if id in self._sequences]

    def reset_counters(self) -> None:
        """Counts from zero again, and forgets cached prefixes: after a start-up check or a warm-up."""
        self._prompt_tokens = self._generation_tokens = 0
        self.scheduler.counters = SchedulerCounters()
        self.scheduler.new_epoch()

    def statistics(self) -> EngineStatistics:
        scheduler = self.scheduler
        return EngineStatistics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.blocks.num_blocks,
            num_blocks_used=scheduler.blocks.num_used,
            num_blocks_cached=scheduler.blocks.num_cached,
            preemptions=scheduler.counters.preemptions,
            prefix_queries=scheduler.counters.prefix_queries,
            prefix_hits=scheduler.counters.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    # -- weights --

    def check_weights(self, directory: Path) -> None:
        """InvalidRequest or NotFound unless `directory` holds exactly this model's tensors; touches no weight."""
        self._open(directory).__exit__(None, None, None)

    def load_weights(self, directory: Path) -> None:
        """Replaces every weight. Checks all before it touches the first; an error after that leaves a mixed model."""
        started = time.monotonic()
        with self._open(directory) as snapshot:
            self.scheduler.new_epoch()
            self._model.load(snapshot.__getitem__)
        log.info("loaded weights from %s in %.2f s", directory, time.monotonic() - started)

    def _open(self, directory: Path) -> Snapshot:
        snapshot = Snapshot(directory)
        try:
            snapshot.check(self.shape.layout, ignored=frozenset({HEAD}) if self.shape.tied else frozenset())
            if self.shape.tied:
                snapshot.check_tied(HEAD, "model.embed_tokens.weight")
        except LaminarError:
            snapshot.__exit__(None, None, None)
            raise
        return snapshot

    # -- stepping --

    def step(self) -> list[Delta]:
        """Computes one step and returns its deltas."""
        segments = self.scheduler.plan()
        self._kv.apply(self.scheduler.take_effects())
        sampled: list[tuple[Sequence, torch.Tensor]] = []
        for batch in self._batches(segments):
            sampled += self._forward(batch)
        for segment in segments:
            self.scheduler.computed(segment)
        deltas = self._sample(sampled) if sampled else []
        self._kv.apply(self.scheduler.take_effects())
        return deltas

    def _batches(self, segments: list[Segment]) -> list[list[tuple[Sequence, Span]]]:
        """Cuts the step into forward passes: one, or passes of at most INVARIANT_ROWS rows."""
        rows_max = INVARIANT_ROWS if self.config.batch_invariant else self.config.max_batched_tokens
        batches: list[list[tuple[Sequence, Span]]] = []
        room = 0
        for segment in segments:
            sequence = segment.sequence
            assert sequence.slot is not None
            start, end = sequence.num_computed, sequence.num_computed + segment.num_tokens
            while start < end:
                if room == 0:
                    batches.append([])
                    room = rows_max
                count = min(room, end - start)
                batches[-1].append((sequence, Span(sequence.slot, start, count)))
                start += count
                room -= count
        return batches

    def _forward(self, batch: list[tuple[Sequence, Span]]) -> list[tuple[Sequence, torch.Tensor]]:
        """One forward pass; returns the logits of the sequences whose last token is in it."""
        invariant = self.config.batch_invariant
        token_ids = [id for seq, span in batch for id in seq.token_ids[span.start : span.start + span.count]]
        spans = [span for _, span in batch]
        padding = INVARIANT_ROWS - len(token_ids) if invariant else _padding(len(token_ids))
        if padding:
            spans.append(Span(self._kv.padding_row, 0, padding))
            token_ids += [0] * padding
        hidden = self._model.forward(self._kv, token_ids, spans, by_token=invariant)
        last_row: dict[int, Sequence] = {}
        row = -1
        for sequence, span in batch:
            row += span.count
            if span.start + span.count == len(sequence.token_ids):
                last_row[row] = sequence
        if not last_row:
            return []
        rows = list(last_row)
        logits = self._model.logits(hidden)[rows] if invariant else self._model.logits(hidden[rows])
        return list(zip(last_row.values(), logits, strict=True))

    def _sample(self, sampled: list[tuple[Sequence, torch.Tensor]]) -> list[Delta]:
        sequences = [sequence for sequence, _ in sampled]
        rows = [
            SamplingRow(s.request.params, len(s.token_ids), self._forbidden(s), s.token_ids, len(s.request.prompt_ids))
            for s in sequences
        ]
        tokens = sample(
            torch.stack([logits for _, logits in sampled]),
            rows,
            processed_logprobs=self.config.logprobs_mode == "processed_logprobs",
        )
        self._generation_tokens += len(tokens)
        return [self._append(sequence, token) for sequence, token in zip(sequences, tokens, strict=True)]

    def _forbidden(self, sequence: Sequence) -> tuple[int, ...]:
        params = sequence.request.params
        if sequence.num_generated >= params.min_tokens:
            return ()
        return tuple(params.stop_token_ids | self.shape.eos_ids)

    def _append(self, sequence: Sequence, token: Token) -> Delta:
        sequence.token_ids.append(token.id)
        params = sequence.request.params
        if token.id in params.stop_token_ids:
            return self._end(sequence, "stop", token, stop_reason=token.id)
        if token.id in self.shape.eos_ids and not params.ignore_eos:
            return self._end(sequence, "stop", token)
        if sequence.num_generated >= params.max_tokens:
            return self._end(sequence, "length", token)
        return self._delta(sequence, token)

    def _end(
        self, sequence: Sequence, reason: FinishReason, token: Token | None = None, stop_reason: int | None = None
    ) -> Delta:
        self.scheduler.finish(sequence)
        del self._sequences[sequence.request.request_id]
        return replace(self._delta(sequence, token), finish_reason=reason, stop_reason=stop_reason)

    def _delta(self, sequence: Sequence, token: Token | None) -> Delta:
        return Delta(sequence.request.request_id, token, self.weight_version, cached_tokens=sequence.num_cached)


def _padding(num_rows: int) -> int:
    return -num_rows % PAD_ROWS if num_rows > PAD_ROWS else 0
