"""SGLang's own HTTP API: `/generate` with token ids, pause modes, sessions of weight update.

Source: SGLang 0.5.23's published package.
- What is streamed is read in `sglang_stream`.
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

import msgspec

from gateway.core.types import SamplingParams
from gateway.engines.base import EngineFailed, EngineLimits, EngineReport, EngineStream, PassedAnswer
from gateway.engines.http import CONTROL_TIMEOUT_S, LOAD_TIMEOUT_S, EngineHttp
from gateway.engines.sglang_push import LOADER, manifest_tensor
from gateway.engines.sglang_stream import Reader, generate_body
from gateway.engines.streams import EventChunks
from protos.decoding import decode_json

log = logging.getLogger(__name__)

DTYPES = {"half": "float16", "float": "float32"}
"""SGLang's short names of its flag --dtype, as torch names them."""
ABORTS_MAX = 1024
"""Aborts under way at once; beyond that a request ends when its server sees the closed connection, in some 2 s."""


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    max_total_num_tokens: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _ServerInfo(msgspec.Struct):
    random_seed: int | None = None
    dtype: str | None = None
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
        self._http = EngineHttp(
            url,
            stall_timeout_s=stall_timeout_s,
            control_timeout_s=control_timeout_s,
            not_found_hint="name the server's own URL, without /v1, and its kind: is it SGLang?",
        )
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
    ) -> AsyncIterator[EngineStream]:
        reader = Reader(self.url, sampling.top_logprobs)
        try:
            async with self._http.stream("/generate", generate_body(prompt_ids, sampling, request_id)) as events:
                yield EventChunks(events, reader, self.url)
                if reader.over:
                    events.complete()
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

    async def pass_on(self, path: str, body: bytes, *, stall_timeout_s: float) -> PassedAnswer:
        return await self._http.pass_on(path, body, stall_timeout_s=stall_timeout_s)

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

    async def dtype(self) -> str:
        """By its flag: one that was started with `--dtype auto`, the default, does not tell."""
        told = (await self._http.get("/server_info", _ServerInfo)).dtype or "auto"
        return "" if told == "auto" else DTYPES.get(told, told)

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
            done = decode_json(text, _Done)
        except (msgspec.DecodeError, RecursionError) as e:
            raise EngineFailed(f"POST {self.url}{path} did not say whether it was done: {text[:300]!r}") from e
        if not done.success:
            raise EngineFailed(f"POST {self.url}{path}: {done.message}")

    async def _check_loaded(self, version: int, seed: int | None) -> None:
        label = await self._label()
        if label != str(version):
            raise EngineFailed(f"{self.url} says it holds version {label!r} after loading version {version}")
        if (await self._http.get("/server_info", _ServerInfo)).random_seed != seed:
            raise EngineFailed(f"{self.url} was restarted while it loaded version {version}")

    async def weight_version(self) -> str:
        return await self._label()

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        return await self._http.tokenize(self._model, text)

    async def _label(self) -> str:
        return str((await self._http.get("/model_info", _ModelInfo)).weight_version)
