"""vLLM's HTTP dialect, which the embedded engine speaks too.

Source: vLLM 0.33's completions protocol and its RL routes (server in development mode). A stream is complete only with
a finish reason of "stop" or "length": a bare `[DONE]`, an "abort" and an end of file are all cuts.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from gateway.core.parameters import sent
from gateway.core.types import SamplingParams, TopLogprob
from gateway.engines.base import (
    EngineChunk,
    EngineFailed,
    EngineLimits,
    EngineReport,
    EngineStream,
    NoLogprob,
    RequestRefused,
    SnapshotRefused,
    StreamCut,
    TokenId,
    count,
)
from gateway.engines.http import HttpAdapter, cut_reason
from gateway.engines.streams import EventChunks
from protos.decoding import decode_json

UPDATE_OPEN_MESSAGE = "a weight update is open"
NULL_LOGPROB = re.compile(r"got `null` .*\.token_logprobs\[")
DTYPE = re.compile(r"\bdtype=(?:torch\.)?([a-z0-9_]+)")
"""In the text of vLLM's configuration; `kv_cache_dtype=` is another."""
DTYPE_TIMEOUT_S = 2.0
"""vLLM inspects its whole environment before its first response; later ones are immediate, so a retry succeeds."""
TOKEN_KEY = re.compile(r"token_id:[0-9]{1,9}")


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: tuple[float, ...] = ()


class _TopLogprobs(_Logprobs):
    top_logprobs: list[dict[str, float] | None] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: tuple[TokenId, ...] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _TopChoice(_Choice):
    logprobs: _TopLogprobs | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Error | None = None


class _TopEvent(_Event):
    """With the alternatives, which are most of an event's bytes: decoded only on request."""

    choices: tuple[_TopChoice, ...] = ()


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    dtype: str | None = None  # the embedded engine's


class _ServerInfo(msgspec.Struct):
    vllm_config: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Paused(msgspec.Struct):
    is_paused: bool


class _WeightInfo(msgspec.Struct):
    weight_version: str | int


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_top_event = msgspec.json.Decoder(_TopEvent).decode


class VllmEngine(HttpAdapter):
    """One server."""

    NOT_FOUND_HINT = (
        "name the server's own URL, without /v1, and its kind; "
        "vLLM has its control routes with VLLM_SERVER_DEV_MODE=1 in its environment and "
        """--weight-transfer-config '{"backend": "laminar"}', laminar-rl[vllm] installed beside it"""
    )

    # -- generation

    @asynccontextmanager
    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        traceparent: str = "",
    ) -> AsyncIterator[EngineStream]:
        body = _completion_body(self._model, prompt_ids, sampling, request_id)
        async with self._http.stream("/v1/completions", body, traceparent) as events:
            yield EventChunks(events, Reader(self.url, sampling.top_logprobs > 0), self.url)

    # -- polling

    async def report(self) -> EngineReport:
        text = await self._http.text("GET", "/metrics")
        try:
            values = _metric_values(text)
        except ValueError as e:
            what = f"GET {self.url}/metrics is not metrics"
            raise EngineFailed(f"{what}: {e}", outline=what) from e
        running, waiting = values.get("vllm:num_requests_running", 0.0), values.get("vllm:num_requests_waiting", 0.0)
        incarnation = values.get("process_start_time_seconds")
        return EngineReport(
            incarnation=repr(incarnation) if incarnation is not None else "unknown",
            kv_usage=values.get("vllm:kv_cache_usage_perc", 0.0),
            running=count(running, "running requests"),
            waiting=count(waiting, "waiting requests"),
        )

    async def limits(self) -> EngineLimits:
        served = {model.id: model for model in (await self._http.get("/v1/models", _Models)).data}
        if self._model not in served:
            raise self._other_model(served)
        return EngineLimits(
            context_tokens=served[self._model].max_model_len or 0,
            kv_capacity_tokens=_kv_capacity(await self._http.text("GET", "/metrics")),
            weight_version=await self.weight_version(),
            fenced=(await self._http.get("/is_paused", _Paused)).is_paused,
        )

    async def dtype(self) -> str:
        """The embedded engine reports it with its model, vLLM in the text of its configuration (development mode)."""
        models = (await self._http.get("/v1/models", _Models)).data
        reported = next((model.dtype for model in models if model.id == self._model), None)
        if reported is not None:
            return reported
        path = "/server_info?config_format=text"
        text = await self._http.text("GET", path, timeout_s=DTYPE_TIMEOUT_S)
        try:
            found = DTYPE.search(decode_json(text, _ServerInfo).vllm_config)
        except msgspec.DecodeError as e:
            raise EngineFailed(f"GET {self.url}{path} is no response of vLLM's: {e}") from e
        return "" if found is None else found[1]

    # -- loading

    async def load(self, path: Path, version: int, digest: str) -> float:
        before = (await self.report()).incarnation
        snapshot = {"path": str(path), "version": str(version), "digest": digest}
        try:
            await self._call_backend(snapshot, timeout_s=self._load_timeout_s)
        except EngineFailed as e:
            raise SnapshotRefused(e.message, hint=e.hint) from e
        fenced_at = time.monotonic()
        await self._http.post("/pause?mode=abort&clear_cache=true")
        if not await self._update_is_open():
            await self._http.post("/start_weight_update")
        await self._http.post("/update_weights", {"update_info": snapshot}, timeout_s=self._load_timeout_s)
        await self._call_backend({"version": str(version), "expect": "loaded"})
        await self._http.post("/finish_weight_update", {"weight_version": str(version)}, timeout_s=self._load_timeout_s)
        after = (await self.report()).incarnation
        self._check_loaded(version, await self.weight_version(), same_incarnation=after == before)
        await self._http.post("/resume")
        return time.monotonic() - fenced_at

    async def _call_backend(self, info: dict[str, str], *, timeout_s: float | None = None) -> None:
        """Calls our backend (paramserver/plugins) by the one route that vLLM takes outside of an update session."""
        await self._http.post("/init_weight_transfer_engine", {"init_info": info}, timeout_s=timeout_s)

    async def _update_is_open(self) -> bool:
        """An update that failed, or whose gateway died, is continued: vLLM would refuse a second start."""
        try:
            await self._call_backend({"expect": "closed"})
        except EngineFailed as e:
            if UPDATE_OPEN_MESSAGE not in e.message:
                raise
            return True
        return False

    async def weight_version(self) -> str:
        return str((await self._http.get("/weight_info", _WeightInfo)).weight_version)


def _completion_body(
    model: str, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str
) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": sampling.max_tokens,
        **sent(sampling),
        "logprobs": sampling.top_logprobs,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},  # shows lost and doubled events
        "return_token_ids": True,
        "return_weight_versions": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "request_id": request_id,
    }
    if sampling.min_tokens:
        body["min_tokens"] = sampling.min_tokens
    if sampling.tokens_per_event > 1:
        body["stream_interval"] = sampling.tokens_per_event
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.json_schema:
        body["structured_outputs"] = {"json": sampling.json_schema}
    if sampling.regex:
        body["structured_outputs"] = {"regex": sampling.regex}
    if sampling.structural_tag:
        body["structured_outputs"] = {"structural_tag": sampling.structural_tag}
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop_token_ids:
        body["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.top_logprobs:
        body["return_tokens_as_token_ids"] = True
    return body


class Reader:
    """One stream's events into chunks. `top`: with alternatives (an engine sends the sampled token's in any case)."""

    def __init__(self, url: str, top: bool) -> None:
        self._url, self._top = url, top
        self._decode = _decode_top_event if top else _decode_event
        self._received = 0

    def chunk(self, data: bytes) -> EngineChunk | None:
        try:
            event: _Event = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            if isinstance(e, msgspec.ValidationError) and NULL_LOGPROB.search(str(e)):
                raise NoLogprob(f"{self._url} sent a token whose logprob is null: it computes NaN") from e
            raise StreamCut("protocol", f"{self._url} sent an event that is not a completion chunk: {e}") from e
        if event.error is not None:
            raise _error(event.error, self._url)
        if not event.choices:
            return None  # the usage chunk
        choice = event.choices[0]
        if choice.finish_reason not in (None, "stop", "length"):
            raise StreamCut("abort", f"{self._url} ended a turn with {choice.finish_reason!r}")
        ids = choice.token_ids or ()
        logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else ()
        if len(logprobs) != len(ids):
            raise StreamCut("protocol", f"{self._url} sent {len(ids)} token ids with {len(logprobs)} logprobs")
        self._received += len(ids)
        if event.usage is not None:
            self._check_count(event.usage.completion_tokens)
        return EngineChunk(
            ids,
            logprobs,
            _top_logprobs(choice) if self._top else None,
            choice.finish_reason,  # type: ignore[arg-type]  # narrowed above
            tuple([span.version for span in choice.weight_versions]) if choice.weight_versions else (),
        )

    def _check_count(self, reported: int | None) -> None:
        """An event that came twice, or lacks tokens, shows in the engine's own count."""
        if reported is not None and reported != self._received:
            raise StreamCut("protocol", f"{self._url} counts {reported} tokens where {self._received} came")


def _error(error: _Error, url: str) -> StreamCut | RequestRefused:
    """vLLM sends status 200 before it checks a stream's prompt, and then an event in place of an error status."""
    reason = cut_reason(error.code) if isinstance(error.code, int) else "server_error"
    if reason is None:
        return RequestRefused(f"{url} refused the request: {error.message}")
    return StreamCut(reason, f"{url}: {error.message}")


def _top_logprobs(choice: _Choice) -> tuple[tuple[TopLogprob, ...], ...] | None:
    """Alternatives are keyed "token_id:N" when ids were requested. Engines that key them by text have no ids: those
    are left out."""
    tops = choice.logprobs.top_logprobs if isinstance(choice.logprobs, _TopLogprobs) else None
    if not tops:
        return None
    return tuple(
        tuple(TopLogprob(int(key[9:]), value) for key, value in (top or {}).items() if TOKEN_KEY.fullmatch(key))
        for top in tops
    )


def _metric_values(text: str) -> dict[str, float]:
    """Metric name to the sum over its label sets. Names match whole: prefixes would mix `_by_reason` in."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and line[0] != "#":
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


def _kv_capacity(text: str) -> int:
    """Tokens, from `vllm:cache_config_info{num_gpu_blocks="..",block_size=".."}`; 0 when it is not reported."""
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            pairs = line.partition("{")[2].rpartition("}")[0]
            labels = dict(pair.split("=", 1) for pair in pairs.split(",") if "=" in pair)
            blocks, size = (labels.get(k, '"0"').strip('"') for k in ("num_gpu_blocks", "block_size"))
            return _blocks(blocks) * _blocks(size) if blocks != "None" else 0
    return 0


def _blocks(reported: str) -> int:
    try:
        return count(float(reported), "KV blocks")
    except ValueError as e:
        raise EngineFailed(f"it reports {reported[:40]!r} KV blocks") from e
