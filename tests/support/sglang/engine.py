"""The stand-in's engine: requests, pause, sessions of weight update. HTTP is in `server`."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tests.support.sglang import weights
from tests.support.sglang.wire import DiskBody, GenerateBody, Refused, TensorBody, forced

PREFIX = 8
"""Ids of a prompt by which the prefix cache finds KV."""
HELD_TOKENS = 100
FILLER = 0
T = TypeVar("T")


class Died(Exception):
    """The server has ended."""


@dataclass
class Request:
    rid: str
    body: GenerateBody
    kv: str  # weights under which its context was computed; "": not yet
    forced: list[int] = field(default_factory=list)  # what its grammar has it say, an end token last; empty: anything
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    retractions: int = 0
    finish: dict[str, Any] | None = None
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, **finish: Any) -> None:
        if self.finish is None:
            self.finish = finish
        self.grew.set()


@dataclass
class Engine:
    """One life of a server. `step_s`: time of one token. `encode`: its tokenizer, for answers held to a grammar."""

    weights: str
    label: str = "default"
    served_name: str = "policy"
    context: int = 2048
    vocab: int = 512
    max_tokens: int = 8192
    tp_size: int = 1
    dp_size: int = 1
    loaders: tuple[str, ...] = ()
    dtype: str = "float32"  # as its flag has it
    step_s: float = 0.002
    seed: int = field(default_factory=lambda: random.randrange(1 << 30))
    hold: Path | None = None  # a file: while it exists no request says more than `HELD_TOKENS`
    encode: Callable[[str], list[int]] = lambda text: []
    requests: dict[str, Request] = field(default_factory=dict)
    paused: Literal["abort", "retract", "in_place"] | None = None
    session: str | None = None
    running: asyncio.Event = field(default_factory=asyncio.Event)
    cache: dict[tuple[int, ...], str] = field(default_factory=dict)  # prefix to the weights its KV is of
    generated_tokens: int = 0  # since its start, of all requests
    deterministic: bool = False  # as started with --enable-deterministic-inference
    draining: bool = False  # SIGTERM came: it ends with its last request
    died: str = ""  # why; nothing answers from then on
    model: weights.Model = field(default_factory=weights.Model)  # its custom loader's, of the first rank

    def __post_init__(self) -> None:
        self.running.set()

    # -- generation

    async def generate(self, request: Request) -> None:
        """Runs a request to its end; whoever reads it is told by `grew`."""
        self.requests[request.rid] = request
        try:
            request.forced = self.encode(forced(request.body.sampling_params))
            await self.running.wait()
            prefix = tuple(request.body.input_ids[:PREFIX])
            request.kv = self.cache.setdefault(prefix, self.weights)
            while request.finish is None:
                await self.running.wait()
                await asyncio.sleep(self.step_s)
                if self.paused is None and request.finish is None and not self._holds(request):
                    self._step(request)
        except Refused as e:  # of a grammar, which is compiled only here
            request.ids.append(FILLER)  # counted as a token, without a logprob
            request.end(type="abort", message=str(e), status_code=400, err_type="BadRequestError")
        finally:
            self.requests.pop(request.rid, None)

    def _holds(self, request: Request) -> bool:
        return self.hold is not None and len(request.ids) >= HELD_TOKENS and self.hold.exists()

    def _step(self, request: Request) -> None:
        params = request.body.sampling_params
        if not params.max_new_tokens:
            return request.end(type="length", length=0)
        request.kv = request.kv or self.weights
        token, logprob = weights.next_token(self.weights, request.kv, [*request.body.input_ids, *request.ids])
        at = len(request.ids)
        if request.forced:
            token = request.forced[at]
        if not request.spans or request.spans[-1]["version"] != self.label:
            request.spans.append({"version": self.label, "start": at, "end": at})
        request.spans[-1]["end"] = at + 1
        request.ids.append(token)
        self.generated_tokens += 1
        request.logprobs.append(logprob)
        fulfilled = at + 1 == len(request.forced)  # its end is all that the grammar allows then
        if fulfilled or (token in (params.stop_token_ids or ()) and at + 1 > params.min_new_tokens):
            request.end(type="stop", matched=token)
        elif at + 1 >= params.max_new_tokens:
            request.end(type="length", length=params.max_new_tokens)
        request.grew.set()
        return None

    def make_request(self, body: GenerateBody) -> Request:
        rid = body.rid or uuid.uuid4().hex
        if rid in self.requests:
            raise Refused(f"Duplicate request ID detected: {rid}")
        return Request(rid, body, "")

    def abort(self, rid: str, *, everything: bool) -> None:
        for name, request in list(self.requests.items()):
            if everything or name == rid:
                request.end(type="abort", message="Aborted", status_code=None, err_type=None)

    # -- pause

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        self.paused = mode
        self.running.clear()
        if mode == "abort":
            while self.requests:
                self.abort("", everything=True)
                self.running.set()  # those that wait must come to see that they were aborted
                await asyncio.sleep(0)
            self.running.clear()
        elif mode == "retract":
            for request in self.requests.values():
                request.kv, request.retractions = "", request.retractions + 1

    def resume(self) -> None:
        self.paused = None
        self.running.set()

    def flush(self) -> bool:
        if self.paused == "in_place" or (self.requests and self.paused != "retract"):
            return False
        self.cache.clear()
        return True

    # -- weights

    async def update_from_disk(self, body: DiskBody) -> int:
        """The number of requests that stand still meanwhile. Refused after a failure, when anything may be loaded."""
        if self.session is not None:
            raise Refused("a weight update session is open")
        await self._writer_lock(abort=body.abort_all_requests)
        path = Path(body.model_path)
        weights.files_of(path)  # found missing before any weight is touched
        self._take(lambda: weights.read_directory(path), body.weight_version, flush=body.flush_cache)
        self.served_name = body.model_path
        if self.paused is not None and not body.keep_pause:
            self.resume()
        return len(self.requests)

    async def update_from_tensor(self, body: TensorBody) -> None:
        if self.session is None:
            raise Refused("no weight update session is open: call /begin_weight_update first")
        if self.dp_size != 1:
            raise Refused("dp_size must be 1 for update weights from tensor")
        if len(body.serialized_named_tensors) != self.tp_size:
            raise Refused(f"{len(body.serialized_named_tensors)} tensor lists for {self.tp_size} ranks")
        loader = body.load_format
        if loader is None or loader not in self.loaders:
            raise Refused(f"Unknown load_format={loader}")
        await self._writer_lock(abort=body.abort_all_requests)
        loaded = self.model
        for tensors in reversed(body.serialized_named_tensors):  # the first rank answers for all: it comes last
            loaded = self.model if tensors is body.serialized_named_tensors[0] else weights.Model()
            await asyncio.to_thread(self._dies_of, lambda t=tensors, m=loaded: weights.load_custom(loader, t, m))
        self._take(lambda: loaded.digest or self.weights, body.weight_version, flush=body.flush_cache)

    def _dies_of(self, load: Callable[[], T]) -> T:
        """What `load` gives. Whatever it raises is the end of the server."""
        try:
            return load()
        except Exception as e:
            self.died = repr(e)
            raise Died(self.died) from e

    async def _writer_lock(self, *, abort: bool) -> None:
        """When not paused, an update waits until nothing runs."""
        while self.paused is None and self.requests:
            if abort:
                self.abort("", everything=True)
            await asyncio.sleep(self.step_s)

    def _take(self, load: Any, label: str | None, *, flush: bool) -> None:
        before = self.weights
        self.weights = f"mixed:{before}"  # what a load that breaks off leaves
        self.weights = self._dies_of(load)
        if label is not None:
            self.label = label
        if flush and self.paused != "in_place" and not self.flush():
            raise Refused("Cache flush failed after updating weights")

    def begin(self, selector: str) -> None:
        if self.session is not None:
            raise Refused("a weight update session is already open")
        self.session = selector

    def end_session(self) -> None:
        if self.session is None:
            raise Refused("no weight update session is open")
        self.session = None
