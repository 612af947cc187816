"""Sixteen scripted engines in one process, over real HTTP in vLLM's dialect: `python -m tests.bench.repack.engines`.

An engine decodes one scripted token (32 of the paper's) of every running sequence in a round, which takes what 32 steps
take by the committed curve for its batch, divided by the time scale. Who arrives is prefilled at once, as engines do
between two steps (of 10 to 18 ms, where a round takes half a second), while decoding waits, and decodes from the next
round on. KV is counted, and the youngest sequence waits when it is full. Tokens follow from the trajectory and the
place alone, so nothing may differ by mode. (The scripted engine of `gateway.faultkit` has no rounds, KV or queue.)

Invariants:
- a request whose prompt is not a trajectory's prompt and its true tokens is refused: nothing lost, nothing twice;
- while it is paused an engine computes nothing, and its clock of decoded rounds stands still.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from tests.bench.repack.trace import COMMITTED, TOKENS_PER_UNIT, decode_ms, lengths, token, units
from tests.support.scripted_engine import LOAD_STEPS, MODEL

BASE = 997
PROMPT_UNITS = units(COMMITTED["trace"]["prompt_tokens"])
BUDGET_UNITS = units(COMMITTED["trace"]["cap_tokens"])
KV_UNITS = COMMITTED["kv_capacity_tokens"] // TOKENS_PER_UNIT
EVENT_UNITS = 4
"""Scripted tokens per event: 128 of the paper's."""
PREFILL_UNITS_AT_ONCE = 512
"""At most so much prefill in one go; then it is seen who else came."""
TRACE_LENGTH = 200_000
_counter = itertools.count()
_encode = msgspec.json.Encoder().encode


def prompt_of(trajectory: int) -> list[int]:
    return [3 + trajectory // BASE, 3 + trajectory % BASE, *([1] * (PROMPT_UNITS - 2))]


def answer_of(trajectory: int, length: int) -> list[int]:
    return [token(trajectory, k) for k in range(length)]


@dataclass(eq=False)
class Sequence:
    trajectory: int
    generated: int  # of earlier segments
    left: int
    arrived: float
    events: asyncio.Queue[tuple[int, int, str | None]] = field(default_factory=asyncio.Queue)
    first_round: int = 0  # rounds before the first in which it decodes
    sent: int = 0  # of this request
    number: int = field(default_factory=lambda: next(_counter))
    state: str = "waiting"  # waiting | running | gone


@dataclass
class Statistics:
    """Since the start, in the paper's tokens and this process's seconds."""

    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    again_tokens: int = 0  # prefilled again, for moves and preemptions
    kv_share_s: float = 0.0
    running_s: float = 0.0
    busy_s: float = 0.0
    preempted: int = 0
    loads: int = 0
    late_s: float = 0.0  # rounds that ended later than scripted: the machine was too slow


class Engine:
    def __init__(self, name: str, scale: float, trace: list[int], records: Records) -> None:
        self.name, self.scale, self.trace, self.records = name, scale, trace, records
        self.statistics = Statistics()
        self.version = "0"
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._due: list[tuple[int, int, Sequence]] = []
        self._round = 0  # those that have ended
        self._under_way = False
        self._kv = 0  # units held by running sequences
        self._awake = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._started_unix_s = time.time()
        self._looked_at = time.monotonic()

    # -- HTTP

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/is_paused", self._is_paused)
        for path in sorted(set(LOAD_STEPS)):
            app.router.add_route("*", path, self._control)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": PROMPT_UNITS + BUDGET_UNITS + 1}]})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self._open.is_set()})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f"process_start_time_seconds {self._started_unix_s}\n"
            f'vllm:num_requests_running{{engine="0"}} {len(self._running)}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {sum(s.state == "waiting" for s in self._waiting)}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self._kv / KV_UNITS}\n'
            f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{KV_UNITS}"}} 1\n'
        )

    async def _control(self, request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else {}
        match request.path:
            case "/pause":
                self._open.clear()
                for sequence in [*self._running.values(), *self._waiting]:
                    sequence.events.put_nowait((0, 0, "abort"))
            case "/update_weights":
                await asyncio.sleep(COMMITTED["load_s"] / self.scale)
            case "/finish_weight_update":
                self.version = body["weight_version"]
                self.statistics.loads += 1
            case "/resume":
                self._open.set()
                self._awake.set()
        return web.json_response({"weight_version": self.version})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        trajectory = (prompt[0] - 3) * BASE + prompt[1] - 3
        generated = len(prompt) - PROMPT_UNITS
        length = units(self.trace[trajectory % len(self.trace)])
        if prompt != [*prompt_of(trajectory), *answer_of(trajectory, generated)] or generated >= length:
            self.records.wrong += 1
            return web.json_response({"error": {"message": f"not the tokens of trajectory {trajectory}"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sequence = Sequence(trajectory, generated, length - generated, time.monotonic())
        self.records.began(sequence)
        self._waiting.append(sequence)
        self._awake.set()
        try:
            await self._stream(response, sequence)
        finally:
            self._drop(sequence)
        return response

    async def _stream(self, response: web.StreamResponse, sequence: Sequence) -> None:
        while True:
            start, end, finish = await sequence.events.get()
            ids = [token(sequence.trajectory, k) for k in range(start, end)]
            choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish}
            choice["logprobs"] = {"token_logprobs": [-t / 1024 for t in ids]}
            if finish is not None:
                choice["weight_versions"] = [{"version": self.version, "start": start, "end": end}]
            if finish == "stop":
                self.records.finished(sequence)
            await response.write(b"data: " + _encode({"choices": [choice]}) + b"\n\n")
            if finish is not None:
                await response.write(b"data: [DONE]\n\n")
                return

    def _drop(self, sequence: Sequence) -> None:
        if sequence.state == "running":
            del self._running[sequence.number]
            self._kv -= self._held(sequence)
        sequence.state = "gone"

    # -- the model

    def _held(self, sequence: Sequence) -> int:
        return PROMPT_UNITS + sequence.generated + max(0, self._round - sequence.first_round)

    async def run(self) -> None:
        """Until cancelled."""
        due_at = time.monotonic()
        while True:
            if not self._open.is_set() or not (self._running or self._has_waiting()):
                self._awake.clear()
                self._account(0.0)
                await (self._awake.wait() if self._open.is_set() else self._open.wait())
                self._account(0.0)
                due_at = time.monotonic()
                continue
            due_at = await self._prefill(due_at)
            if self._running:
                due_at = await self._decode_round(due_at)

    async def _prefill(self, since: float) -> float:
        """All who wait, as far as there is KV; returns the end."""
        while self._open.is_set() and (admitted := self._admit()):
            prefilled = TOKENS_PER_UNIT * sum(s.generated + PROMPT_UNITS for s in admitted)
            self.statistics.prefilled_tokens += prefilled
            since = await self._pass(since, prefilled / COMMITTED["prefill_tokens_per_s"])
            for sequence in admitted:
                self._say_first(sequence)
        return since

    async def _decode_round(self, since: float) -> float:
        """One scripted token of every sequence that runs now, who all wait while others arrive and are prefilled."""
        self._under_way = True
        due_at = since + TOKENS_PER_UNIT * decode_ms(len(self._running)) / 1000 / self.scale
        while self._open.is_set() and await self._arrival(due_at):
            begun_at = time.monotonic()
            due_at += await self._prefill(begun_at) - begun_at
        due_at = self._note_late(due_at)
        self._under_way = False
        if self._open.is_set():
            self._decode()
        return due_at

    async def _arrival(self, due_at: float) -> bool:
        """Whether somebody came who can be taken in before `due_at`; else waits until then."""
        self._awake.clear()
        waited_from = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, due_at - waited_from)):
                await self._awake.wait()
        except TimeoutError:
            return False
        finally:
            self._account(time.monotonic() - waited_from)
        return True

    async def _pass(self, since: float, paper_s: float) -> float:
        """Until so much of the paper's time went by since `since`; returns the end. Being late moves it on."""
        due_at = self._note_late(since + paper_s / self.scale)
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        self._account(paper_s / self.scale)
        return due_at

    def _note_late(self, due_at: float) -> float:
        """When it can end at the soonest."""
        late_s = max(0.0, time.monotonic() - due_at)
        self.statistics.late_s += late_s
        return due_at + late_s

    def _has_waiting(self) -> bool:
        while self._waiting and self._waiting[0].state == "gone":
            self._waiting.popleft()
        return bool(self._waiting)

    def _admit(self) -> list[Sequence]:
        """Takes sequences in while there is KV, up to so much prefill as is done at once."""
        prefilled, admitted = 0, list[Sequence]()
        while self._has_waiting() and prefilled < PREFILL_UNITS_AT_ONCE:
            need = PROMPT_UNITS + self._waiting[0].generated + self._waiting[0].sent
            if self._kv + need > KV_UNITS:
                break
            sequence = self._waiting.popleft()
            sequence.generated += sequence.sent
            sequence.left -= sequence.sent
            sequence.sent = 0
            prefilled += need
            self.statistics.again_tokens += TOKENS_PER_UNIT * (need if sequence.generated else 0)
            sequence.first_round, sequence.state = self._round + self._under_way, "running"
            self._running[sequence.number] = sequence
            self._kv += need
            admitted.append(sequence)
        return admitted

    def _say_first(self, sequence: Sequence) -> None:
        """Prefill gives the first token; what it stands for is decoded like the rest."""
        if sequence.state != "running":
            return
        if sequence.left > 1:
            sequence.events.put_nowait((sequence.generated, sequence.generated + 1, None))
            sequence.sent = 1
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        """When its next event is due."""
        next_ = min(sequence.left, (sequence.sent // EVENT_UNITS + 1) * EVENT_UNITS)
        heapq.heappush(self._due, (sequence.first_round + next_, sequence.number, sequence))

    def _decode(self) -> None:
        self._round += 1
        num_decoded = sum(s.first_round < self._round for s in self._running.values())
        self._kv += num_decoded
        self.statistics.decoded_tokens += num_decoded * TOKENS_PER_UNIT
        while self._due and self._due[0][0] <= self._round:
            at, number, sequence = heapq.heappop(self._due)
            if sequence.number != number or sequence.state != "running":
                continue
            end = at - sequence.first_round
            finish = "stop" if end == sequence.left else None
            offset = sequence.generated
            sequence.events.put_nowait((offset + sequence.sent, offset + end, finish))
            sequence.sent = end
            if finish is None:
                self._push(sequence)
            else:
                self._drop(sequence)
        while self._kv > KV_UNITS:
            self._preempt()

    def _preempt(self) -> None:
        youngest = max(self._running.values(), key=lambda s: s.number)
        self._drop(youngest)
        youngest.state, youngest.number = "waiting", next(_counter)  # what is due under its old number is void
        self._waiting.appendleft(youngest)
        self.statistics.preempted += 1

    def _account(self, busy_s: float) -> None:
        now = time.monotonic()
        passed, self._looked_at = now - self._looked_at, now
        self.statistics.kv_share_s += passed * self._kv / KV_UNITS
        self.statistics.running_s += passed * len(self._running)
        self.statistics.busy_s += busy_s


@dataclass
class Records:
    """What happened to trajectories, over all engines, in this process's seconds."""

    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, tuple[float, float]] = field(default_factory=dict)  # trajectory: start, end
    wrong: int = 0

    def began(self, sequence: Sequence) -> None:
        self.started.setdefault(sequence.trajectory, sequence.arrived)

    def finished(self, sequence: Sequence) -> None:
        self.ended[sequence.trajectory] = (self.started[sequence.trajectory], time.monotonic())


async def serve(count: int, scale: float, ready_file: Path) -> None:
    records, trace = Records(), lengths(TRACE_LENGTH)
    engines = [Engine(f"e{i:02d}", scale, trace, records) for i in range(count)]
    urls = {}
    for engine in engines:
        runner = web.AppRunner(engine.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        urls[engine.name] = f"http://127.0.0.1:{runner.addresses[0][1]}"
    told = web.Application()

    async def statistics(request: web.Request) -> web.Response:
        for engine in engines:
            engine._account(0.0)
        ended = records.ended
        records.ended = {}
        return web.Response(
            content_type="application/json",
            body=_encode(
                {
                    "now": time.monotonic(),
                    "cpu_s": time.process_time(),
                    "engines": {e.name: e.statistics for e in engines},
                    "wrong": records.wrong,
                    "ended": [(n, start, end) for n, (start, end) in ended.items()],
                }
            ),
        )

    told.router.add_get("/statistics", statistics)
    runner = web.AppRunner(told, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready = {"engines": urls, "statistics": f"http://127.0.0.1:{runner.addresses[0][1]}/statistics"}
    ready_file.with_suffix(".part").write_text(json.dumps(ready))
    ready_file.with_suffix(".part").rename(ready_file)
    async with asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(engine.run(), name=engine.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COMMITTED["engines"])
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    given = parser.parse_args()
    uvloop.run(serve(given.count, given.scale, given.ready_file))


if __name__ == "__main__":
    main()
