"""vLLM's HTTP dialect, which the embedded engine speaks too.

Source: vLLM 0.33's completions protocol and its RL routes (server in development mode). A stream is complete only with
a finish reason of "stop" or "length": a bare `[DONE]`, an "abort" and an end of file are all cuts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from gateway.core.types import SamplingParams, TopLogprob
from gateway.engines.base import EngineChunk, EngineFailed, EngineLimits, EngineReport, RequestRefused, StreamCut

CONTROL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 5.0
EVENT_BYTES_MAX = 4 << 20
"""One event's line: the first carries the prompt's ids."""
BACKEND_INITIALISED_MESSAGE = "already"
TOKEN_KEY = re.compile(r"token_id:[0-9]+")

T = TypeVar("T")


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _WeightInfo(msgspec.Struct):
    weight_version: str | int


_decode_event = msgspec.json.Decoder(_Event).decode


class VllmEngine:
    """One server. `stall_timeout_s`: silence on a stream for longer counts as a cut."""

    def __init__(self, url: str, model: str, *, stall_timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._model = model
        self._streams: set[aiohttp.ClientResponse] = set()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=EVENT_BYTES_MAX,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=stall_timeout_s),
        )

    async def close(self) -> None:
        for response in self._streams:  # aiohttp forgets them without a word
            response.content.set_exception(aiohttp.ClientConnectionError("the engine was taken out"))
        await self._http.close()

    # -- generation

    @asynccontextmanager
    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str, session_id: str
    ) -> AsyncIterator[AsyncIterator[EngineChunk]]:
        body = _completion_body(self._model, prompt_ids, sampling, request_id)
        try:
            response = await self._http.post(f"{self.url}/v1/completions", json=body)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise _cut_of(e, self.url) from e
        self._streams.add(response)
        try:
            if response.status != 200:
                await _raise_refusal(response)
            yield _chunks(response, self.url)
        finally:
            self._streams.discard(response)
            response.close()  # closing an unfinished stream aborts the request in the engine

    # -- looking

    async def report(self) -> EngineReport:
        text = await self._text("GET", "/metrics")
        try:
            values = _metric_values(text)
        except ValueError as e:
            raise EngineFailed(f"GET {self.url}/metrics is not metrics: {e}") from e
        incarnation = values.get("process_start_time_seconds")
        return EngineReport(
            incarnation=repr(incarnation) if incarnation is not None else "unknown",
            kv_usage=values.get("vllm:kv_cache_usage_perc", 0.0),
            running=int(values.get("vllm:num_requests_running", 0)),
            waiting=int(values.get("vllm:num_requests_waiting", 0)),
        )

    async def limits(self) -> EngineLimits:
        served = {model.id: model for model in (await self._get("/v1/models", _Models)).data}
        if self._model not in served:
            raise EngineFailed(
                f"{self.url} serves {sorted(served)}, not {self._model!r}",
                hint="start it with --served-model-name, or the gateway with --model, so that they agree",
            )
        return EngineLimits(
            context_tokens=served[self._model].max_model_len or 0,
            kv_capacity_tokens=_kv_capacity(await self._text("GET", "/metrics")),
            weight_version=await self._label(),
        )

    # -- loading

    async def load(self, path: Path, version: int, digest: str) -> float:
        started = time.monotonic()
        await self._post("/pause?mode=abort&clear_cache=true")
        await self._init_backend()
        await self._post("/start_weight_update")
        update = {"update_info": {"path": str(path), "version": str(version), "digest": digest}}
        await self._post("/update_weights", update, timeout_s=LOAD_TIMEOUT_S)
        await self._post("/finish_weight_update", {"weight_version": str(version)}, timeout_s=LOAD_TIMEOUT_S)
        label = await self._label()
        if label != str(version):
            raise EngineFailed(f"{self.url} says it holds version {label!r} after loading version {version}")
        await self._post("/resume")
        return time.monotonic() - started

    async def _init_backend(self) -> None:
        """Once per incarnation; a server that was told before says so, which is as good."""
        try:
            await self._post("/init_weight_transfer_engine", {"init_info": {}})
        except EngineFailed as e:
            if BACKEND_INITIALISED_MESSAGE not in e.message:
                raise

    # -- HTTP

    async def _post(self, path: str, body: object | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S) -> str:
        return await self._text("POST", path, body, timeout_s=timeout_s)

    async def _label(self) -> str:
        return str((await self._get("/weight_info", _WeightInfo)).weight_version)

    async def _get(self, path: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(await self._text("GET", path), type=kind)
        except msgspec.DecodeError as e:
            raise EngineFailed(f"GET {self.url}{path} gave no {kind.__name__.strip('_')}: {e}") from e

    async def _text(
        self, method: str, path: str, body: object | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> str:
        try:
            async with asyncio.timeout(timeout_s), self._http.request(method, self.url + path, json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise EngineFailed(f"{method} {self.url}{path}: {e or type(e).__name__}") from e
        if response.status >= 400:
            raise EngineFailed(f"{method} {self.url}{path} answered {response.status}: {text[:300]}")
        return text


def _completion_body(
    model: str, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str
) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": sampling.top_logprobs,
        "stream": True,
        "return_token_ids": True,
        "return_weight_versions": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "request_id": request_id,
    }
    if sampling.min_tokens:
        body["min_tokens"] = sampling.min_tokens
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop_token_ids:
        body["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.top_logprobs:
        body["return_tokens_as_token_ids"] = True
    return body


async def _chunks(response: aiohttp.ClientResponse, url: str) -> AsyncIterator[EngineChunk]:
    finished = False
    try:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = _chunk(data, url)
            if chunk is not None:
                finished = finished or chunk.finish_reason is not None
                yield chunk
    except LineTooLong as e:
        raise StreamCut("protocol", f"{url} sent too long a line: {e}") from e
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        if not finished:
            raise _cut_of(e, url) from e
    if not finished:
        raise StreamCut("early_end", f"{url} ended a stream without a finish reason")


def _chunk(data: bytes, url: str) -> EngineChunk | None:
    try:
        event = _decode_event(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise StreamCut("protocol", f"{url} sent an event that is not a completion chunk: {e}") from e
    if event.error is not None:
        raise StreamCut("server_error", f"{url}: {event.error}")
    if not event.choices:
        return None  # the usage chunk
    choice = event.choices[0]
    if choice.finish_reason not in (None, "stop", "length"):
        raise StreamCut("abort", f"{url} ended a turn with {choice.finish_reason!r}")
    ids = tuple(choice.token_ids or ())
    logprobs = _sampled_logprobs(choice, len(ids), url)
    return EngineChunk(
        ids,
        logprobs,
        _top_logprobs(choice),
        choice.finish_reason,  # type: ignore[arg-type]  # narrowed just above
        tuple(span.version for span in choice.weight_versions or ()),
    )


def _sampled_logprobs(choice: _Choice, count: int, url: str) -> tuple[float, ...]:
    values = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    if len(values) != count or any(v is None for v in values):
        raise StreamCut("protocol", f"{url} sent {count} token ids with {len(values)} logprobs")
    return tuple(v for v in values if v is not None)


def _top_logprobs(choice: _Choice) -> tuple[tuple[TopLogprob, ...], ...] | None:
    """Alternatives come keyed "token_id:N" when ids were asked for; engines that key by text tell no ids: left out."""
    tops = choice.logprobs.top_logprobs if choice.logprobs is not None else None
    if not tops:
        return None
    return tuple(
        tuple(TopLogprob(int(key[9:]), value) for key, value in (top or {}).items() if TOKEN_KEY.fullmatch(key))
        for top in tops
    )


async def _raise_refusal(response: aiohttp.ClientResponse) -> None:
    try:
        text = (await response.text(errors="replace"))[:500]
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        text = f"(its body broke off: {e})"
    if 400 <= response.status < 500 and response.status not in (408, 429):
        raise RequestRefused(f"{response.url.origin()} refused the request: {text}")
    raise StreamCut("server_error", f"{response.url.origin()} answered {response.status}: {text}")


def _cut_of(error: Exception, url: str) -> StreamCut:
    if isinstance(error, aiohttp.ClientConnectorError):
        return StreamCut("refused", f"{url} does not accept connections: {error}")
    if isinstance(error, TimeoutError):
        return StreamCut("stalled", f"{url} was silent for too long")
    return StreamCut("reset", f"{url} broke the stream: {error or type(error).__name__}")


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
    """Tokens, from `vllm:cache_config_info{num_gpu_blocks="..",block_size=".."}`; 0 when it is not told."""
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(
                pair.split("=", 1) for pair in line[line.index("{") + 1 : line.rindex("}")].split(",") if "=" in pair
            )
            blocks, size = (labels.get(k, '"0"').strip('"') for k in ("num_gpu_blocks", "block_size"))
            return int(float(blocks)) * int(float(size)) if blocks != "None" else 0
    return 0
