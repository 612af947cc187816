"""SGLang's own HTTP API: `/generate` with token ids, pause modes, sessions of weight update.

Source: SGLang 0.5.23's published package.
- A streamed event repeats everything so far, or brings only what is new, as the server was started. `completion_tokens`
  counts all so far, so the lengths tell which it is; nothing is assumed, and a list that fits neither is a cut.
- Ids and logprobs are taken from `output_token_logprobs`, where they stand together.
- A stream is complete only with a finish of type "stop" or "length".
- While paused, `/health` waits and then says 503, so an engine is looked at through `/v1/loads` and `/server_info`.
- A server draws `random_seed` at each start unless told one (`--random-seed`): it tells one incarnation from another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from gateway.core.types import SamplingParams, TopLogprob
from gateway.engines.base import (
    EngineChunk,
    EngineFailed,
    EngineLimits,
    EngineReport,
    RequestRefused,
    StreamCut,
)
from gateway.engines.http import CONTROL_TIMEOUT_S, LOAD_TIMEOUT_S, EngineHttp
from gateway.engines.sglang_push import LOADER, manifest_tensor

log = logging.getLogger(__name__)

ABORTS_MAX = 1024
"""Aborts under way at once; beyond that a request ends when its server sees the closed connection, in some 2 s."""

Logprob = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _Finish | None = None
    output_token_logprobs: list[Logprob] = []
    output_top_logprobs: list[list[Logprob] | None] | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    max_total_num_tokens: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _ServerInfo(msgspec.Struct):
    random_seed: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    custom_weight_loader: list[str] | None = None


class _ModelInfo(msgspec.Struct):
    weight_version: str | int


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Done(msgspec.Struct):
    success: bool
    message: str = ""


_decode_event = msgspec.json.Decoder(_Event).decode


class SglangEngine:
    """One server. `stall_timeout_s`: silence on a stream for longer counts as a cut."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        stall_timeout_s: float = 60.0,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self._http = EngineHttp(url, stall_timeout_s=stall_timeout_s, control_timeout_s=control_timeout_s)
        self.url = self._http.url
        self._model = model
        self._load_timeout_s = load_timeout_s
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in list(self._aborts):
            task.cancel()
        await self._http.close()

    # -- generation

    @asynccontextmanager
    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str, session_id: str
    ) -> AsyncIterator[AsyncIterator[EngineChunk]]:
        reader = _Reader(self.url, sampling.top_logprobs)
        try:
            async with self._http.stream("/generate", _generate_body(prompt_ids, sampling, request_id)) as events:
                yield reader.chunks(events)
        finally:
            if not reader.over and len(self._aborts) < ABORTS_MAX:
                self._abort_soon(request_id)

    def _abort_soon(self, request_id: str) -> None:
        """A closed connection is noticed only after some seconds, and nobody needs to wait for this."""
        task = asyncio.create_task(self._abort(request_id), name=f"abort-{request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        try:
            await self._http.post("/abort_request", {"rid": request_id, "abort_all": False})
        except EngineFailed as e:
            log.info("request %s was not aborted by name: %s", request_id, e)  # its server may well be gone

    # -- looking

    async def report(self) -> EngineReport:
        loads = (await self._http.get("/v1/loads?include=core&format=json", _Loads)).loads
        seed = (await self._http.get("/server_info", _ServerInfo)).random_seed
        return EngineReport(
            incarnation=str(seed) if seed is not None else "unknown",
            kv_usage=max((load.token_usage for load in loads), default=0.0),
            running=sum(load.num_running_reqs for load in loads),
            waiting=sum(load.num_waiting_reqs for load in loads),
        )

    async def limits(self) -> EngineLimits:
        models = (await self._http.get("/v1/models", _Models)).data
        self._check_model(models)
        loads = (await self._http.get("/v1/loads?include=core&format=json", _Loads)).loads
        return EngineLimits(
            context_tokens=max((model.max_model_len or 0 for model in models), default=0),
            kv_capacity_tokens=sum(load.max_total_num_tokens for load in loads),
            weight_version=await self._label(),
            fenced=await self._http.status("GET", "/ready") != 200,
        )

    def _check_model(self, models: list[_Model]) -> None:
        """A load from disk renames the served model after the directory, so a path is no other model's name."""
        names = sorted(model.id for model in models)
        if self._model not in names and not any(Path(name).is_absolute() for name in names):
            raise EngineFailed(
                f"{self.url} serves {names}, not {self._model!r}",
                hint="start it with --served-model-name, or the gateway with --model, so that they agree",
            )

    # -- loading

    async def load(self, path: Path, version: int, digest: str, *, keep_running: bool = False) -> float:
        started = time.monotonic()
        server = await self._http.get("/server_info", _ServerInfo)
        # "retract" computes the KV anew under the new weights; "in_place" would go on with the old version's.
        await self._http.post("/pause_generation", {"mode": "retract" if keep_running else "abort"})
        if server.dp_size == 1 and LOADER in (server.custom_weight_loader or ()):
            await self._push_manifest(path, version, digest, server.tp_size)
        else:
            await self._push_directory(path, version)
        await self._check_loaded(version, server.random_seed)
        await self._http.post("/continue_generation", {})
        return time.monotonic() - started

    async def _push_directory(self, path: Path, version: int) -> None:
        body = {
            "model_path": str(path),
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": True,
            "keep_pause": True,
        }
        await self._must("/update_weights_from_disk", body)

    async def _push_manifest(self, path: Path, version: int, digest: str, tp_size: int) -> None:
        """Each rank gets one small tensor that says where the snapshot is; our loader there maps it."""
        await self._begin()
        body = {
            "serialized_named_tensors": [manifest_tensor(path, version, digest)] * tp_size,
            "load_format": LOADER,
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": True,
            "selector": "all",
        }
        await self._must("/update_weights_from_tensor", body)
        await self._must("/end_weight_update", {})

    async def _begin(self) -> None:
        """Opens a session. One left open by a load that failed is ended first; the engine is paused all the while."""
        try:
            await self._must("/begin_weight_update", {"selector": "all"})
        except EngineFailed:
            await self._must("/end_weight_update", {})
            await self._must("/begin_weight_update", {"selector": "all"})

    async def _must(self, path: str, body: dict[str, object]) -> None:
        text = await self._http.post(path, body, timeout_s=self._load_timeout_s)
        try:
            done = msgspec.json.decode(text, type=_Done)
        except msgspec.DecodeError as e:
            raise EngineFailed(f"POST {self.url}{path} did not say whether it was done: {text[:300]!r}") from e
        if not done.success:
            raise EngineFailed(f"POST {self.url}{path}: {done.message}")

    async def _check_loaded(self, version: int, seed: int | None) -> None:
        label = await self._label()
        if label != str(version):
            raise EngineFailed(f"{self.url} says it holds version {label!r} after loading version {version}")
        if (await self._http.get("/server_info", _ServerInfo)).random_seed != seed:
            raise EngineFailed(f"{self.url} was restarted while it loaded version {version}")

    async def _label(self) -> str:
        return str((await self._http.get("/model_info", _ModelInfo)).weight_version)


def _generate_body(prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> dict[str, object]:
    params: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.min_tokens:
        params["min_new_tokens"] = sampling.min_tokens
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    return {
        "rid": request_id,
        "input_ids": prompt_ids,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,  # of outputs only: 0 would defeat the prefix cache
        "top_logprobs_num": sampling.top_logprobs,
        "stream": True,
    }


class _Reader:
    """One stream's events into chunks. `over`: the server has ended the request by itself."""

    def __init__(self, url: str, top_logprobs: int) -> None:
        self._url, self._top = url, top_logprobs
        self._taken = 0
        self.over = False

    async def chunks(self, events: AsyncIterator[bytes]) -> AsyncIterator[EngineChunk]:
        finished = False
        try:
            async for data in events:
                meta = self._meta(data)
                finish = meta.finish_reason
                chunk = self._chunk(meta)
                if finish is not None and finish.type not in ("stop", "length"):
                    self.over = True
                    if chunk.token_ids:
                        yield chunk  # they were sampled before the abort
                    raise self._aborted(finish)
                finished = self.over = finished or finish is not None
                yield chunk
        except StreamCut as cut:
            if not finished or cut.reason == "protocol":
                raise
        if not finished:
            raise StreamCut("early_end", f"{self._url} ended a stream without a finish reason")

    def _meta(self, data: bytes) -> _Meta:
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise StreamCut("protocol", f"{self._url} sent an event that /generate does not send: {e}") from e
        if event.error is not None:
            self.over = True
            raise self._error(event.error)
        if event.meta_info is None:
            raise StreamCut("protocol", f"{self._url} sent an event without meta_info")
        return event.meta_info

    def _chunk(self, meta: _Meta) -> EngineChunk:
        sampled = self._new(meta.output_token_logprobs, meta.completion_tokens, "logprobs")
        tops = None
        if self._top and meta.output_top_logprobs:
            new = self._new(meta.output_top_logprobs, meta.completion_tokens, "top logprobs")
            tops = tuple(tuple(TopLogprob(i, p) for p, i, _ in top or () if p is not None) for top in new)
        self._taken = meta.completion_tokens
        logprobs = tuple(logprob for logprob, _, _ in sampled if logprob is not None)
        if len(logprobs) != len(sampled):
            raise StreamCut("protocol", f"{self._url} sent tokens without a logprob")
        kind = meta.finish_reason.type if meta.finish_reason is not None else None
        return EngineChunk(
            tuple(token_id for _, token_id, _ in sampled),
            logprobs,
            tops,
            kind if kind in ("stop", "length") else None,  # type: ignore[arg-type]  # narrowed here
            _versions(meta),
        )

    def _new(self, values: list[Any], total: int, what: str) -> list[Any]:
        """What of `values` was not yet taken: they are all `total` so far, or only those since the last event."""
        if len(values) == total >= self._taken:
            return values[self._taken :]
        if len(values) == total - self._taken:
            return values
        raise StreamCut(
            "protocol", f"{self._url} sent {len(values)} {what} at {total} tokens, of which {self._taken} were known"
        )

    def _aborted(self, finish: _Finish) -> Exception:
        message = finish.message or f"ended a turn with {finish.type!r}"
        if finish.status_code is not None and 400 <= finish.status_code < 500:
            return RequestRefused(f"{self._url} refused the request: {message}")
        return StreamCut("abort", f"{self._url}: {message}")

    def _error(self, error: Any) -> Exception:
        """A request that the server finds wrong is answered 200, with the error as the stream's only event."""
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            return RequestRefused(f"{self._url} refused the request: {error}")
        return StreamCut("server_error", f"{self._url}: {error}")


def _versions(meta: _Meta) -> tuple[str, ...]:
    if meta.weight_versions:
        return tuple(span.version for span in meta.weight_versions)
    return (meta.weight_version,) if meta.weight_version is not None else ()
