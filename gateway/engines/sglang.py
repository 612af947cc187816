"""SGLang's own HTTP API: `/generate` with token ids, pause modes, sessions of weight update.

Source: SGLang 0.5.23's published package.
- `sglang_stream` reads its streams.
- While the engine is paused `/health` waits and then returns 503, so it is polled through `/v1/loads` and
  `/server_info`. `/ready` is 503 while it is paused, and from SIGTERM on: it then takes requests until the last one
  has ended.
- `sampling_seed` has an effect only with `--enable-deterministic-inference`. There a request without one is sampled
  with 42, so each gets one drawn here.
- An exception in a load ends the server, so our loader raises none: what came of a load is read from it.
- A server draws `random_seed` at each start unless given one (`--random-seed`): it identifies the incarnation.
- SGLang takes pushed tensors as pickles, one per rank, base64. Ours is a constant program around a list of numbers,
  written out in `manifest_tensor`, so that the gateway needs neither torch nor a pickler.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from gateway.core.types import SamplingParams
from gateway.engines.base import AdapterContext, EngineFailed, EngineLimits, EngineReport, EngineStream
from gateway.engines.http import HttpAdapter
from gateway.engines.sglang_stream import Reader, generate_body
from gateway.engines.streams import EventChunks
from protos.decoding import decode_json

log = logging.getLogger(__name__)

DTYPES = {"half": "float16", "float": "float32"}
"""SGLang's short names of its flag --dtype, as torch names them."""
ABORTS_MAX = 1024
"""Aborts in progress at once; beyond that a request ends when its server sees the closed connection, in about 2 s."""
LOADER = "paramserver.plugins.sglang.load_snapshot"
"""Our weight loader inside SGLang, as `--custom-weight-loader` must name it."""
MANIFEST = "laminar.manifest"
REPORT = "laminar.loaded"
REPORT_NUMBERS_MAX = 1 << 16
"""Of a report, which is one number a byte."""


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
    pp_size: int = 1
    enable_deterministic_inference: bool = False
    custom_weight_loader: list[str] | None = None


class _ModelInfo(msgspec.Struct):
    weight_version: str | int


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Report(msgspec.Struct):
    """As `paramserver.plugins.sglang.Report`."""

    digest: str
    error: str


class _Done(msgspec.Struct):
    success: bool
    message: str = ""


class SglangEngine(HttpAdapter):
    """One server."""

    NOT_FOUND_HINT = "name the server's own URL, without /v1, and its kind: is it SGLang?"

    def __init__(self, url: str, context: AdapterContext) -> None:
        super().__init__(url, context)
        self._seeds = False  # it samples by seeds, as its limits said last
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in list(self._aborts):
            task.cancel()
        await super().close()

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
        reader = Reader(self.url, sampling.top_logprobs)
        try:
            body = generate_body(prompt_ids, sampling, request_id, seeds=self._seeds)
            async with self._http.stream("/generate", body, traceparent) as events:
                yield EventChunks(events, reader, self.url)
                if reader.over:
                    events.complete()
        finally:
            if not reader.over and len(self._aborts) < ABORTS_MAX:
                self._abort_soon(request_id)

    def _abort_soon(self, request_id: str) -> None:
        """By name, in a task of its own: the server notices a closed connection only after some seconds."""
        task = asyncio.create_task(self._abort(request_id), name=f"abort-{request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        try:
            await self._http.post("/abort_request", {"rid": request_id, "abort_all": False})
        except EngineFailed as e:
            log.info("request %s was not aborted by name: %s", request_id, e)  # its server may well be gone

    # -- polling

    async def report(self) -> EngineReport:
        loads = (await self._http.get("/v1/loads?include=core&format=json", _Loads)).loads
        seed = (await self._http.get("/server_info", _ServerInfo)).random_seed
        return EngineReport(
            incarnation=str(seed) if seed is not None else "unknown",
            kv_usage=max((load.token_usage for load in loads), default=0.0),
            running=sum(load.num_running_reqs for load in loads),
            waiting=sum(load.num_waiting_reqs for load in loads),
            ready=await self._ready(),
        )

    async def _ready(self) -> bool:
        return await self._http.status("GET", "/ready") == 200

    async def limits(self) -> EngineLimits:
        models = (await self._http.get("/v1/models", _Models)).data
        self._check_model(models)
        loads = (await self._http.get("/v1/loads?include=core&format=json", _Loads)).loads
        self._seeds = (await self._http.get("/server_info", _ServerInfo)).enable_deterministic_inference
        return EngineLimits(
            context_tokens=max((model.max_model_len or 0 for model in models), default=0),
            kv_capacity_tokens=sum(load.max_total_num_tokens for load in loads),
            weight_version=await self.weight_version(),
            fenced=not await self._ready(),
            seeds=self._seeds,
        )

    def _check_model(self, models: list[_Model]) -> None:
        """A load from disk renames the served model after the directory, so a path is no other model's name."""
        names = [model.id for model in models]
        if self._model not in names and not any(Path(name).is_absolute() for name in names):
            raise self._other_model(names)

    async def dtype(self) -> str:
        """The value of its flag --dtype; with `auto`, the default, it does not report what it chose."""
        flag = (await self._http.get("/server_info", _ServerInfo)).dtype or "auto"
        return "" if flag == "auto" else DTYPES.get(flag, flag)

    # -- loading

    async def load(self, path: Path, version: int, digest: str) -> float:
        started = time.monotonic()
        server = await self._http.get("/server_info", _ServerInfo)
        await self._http.post("/pause_generation", {"mode": "abort"})
        if server.dp_size == server.pp_size == 1 and LOADER in (server.custom_weight_loader or ()):
            await self._push_manifest(path, version, digest, server.tp_size)
        else:
            await self._push_directory(path, version)
        after = (await self._http.get("/server_info", _ServerInfo)).random_seed
        self._check_loaded(version, await self.weight_version(), same_incarnation=after == server.random_seed)
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
        """Each rank gets one small tensor with the snapshot's path; our loader there maps the files."""
        await self._begin()
        body = {
            "serialized_named_tensors": [manifest_tensor(path, version, digest)] * tp_size,
            "load_format": LOADER,
            "abort_all_requests": False,
            "flush_cache": True,
            "selector": "all",
        }
        await self._must("/update_weights_from_tensor", body)
        await self._check_report(version, digest)
        await self._must("/end_weight_update", {})
        await self._must("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def _check_report(self, version: int, digest: str) -> None:
        """EngineFailed unless our loader reports this snapshot: SGLang takes each return of it for a success."""
        wanted = {"name": REPORT, "truncate_size": REPORT_NUMBERS_MAX}
        text = await self._http.post("/get_weights_by_name", wanted)
        try:
            report = decode_json(bytes(map(int, decode_json(text, list[float]))), _Report)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as e:
            raise EngineFailed(f"{self.url}: its loader did not report what came of version {version}: {e}") from e
        if report.error:
            raise EngineFailed(f"{self.url} did not load version {version}: {report.error}")
        if report.digest != digest:
            raise EngineFailed(f"{self.url} reports a load of {report.digest!r}, not of {digest!r}")

    async def _begin(self) -> None:
        """Opens an update session. One left open by a load that failed is ended first; the engine stays paused."""
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
            raise EngineFailed(f"POST {self.url}{path} did not report success or failure: {text[:300]!r}") from e
        if not done.success:
            raise EngineFailed(f"POST {self.url}{path}: {done.message}")

    async def weight_version(self) -> str:
        return str((await self._http.get("/model_info", _ModelInfo)).weight_version)


def manifest_tensor(path: Path, version: int, digest: str) -> str:
    """One entry of `serialized_named_tensors`, the pickle of `[("laminar.manifest", torch.ByteTensor(BYTES))]`: BYTES
    are UTF-8 JSON of path, version and root digest. SGLang's list of what it unpickles has this constructor, and not
    `torch.tensor`."""
    manifest = msgspec.json.encode({"path": str(path), "version": version, "digest": digest})
    name = MANIFEST.encode()
    body = b"".join(
        [
            pickle.PROTO + b"\x02",
            pickle.EMPTY_LIST,
            pickle.MARK,
            pickle.BINUNICODE + len(name).to_bytes(4, "little") + name,
            pickle.GLOBAL + b"torch\nByteTensor\n",
            pickle.EMPTY_LIST,
            pickle.MARK,
            *(pickle.BININT1 + bytes([byte]) for byte in manifest),
            pickle.APPENDS,
            pickle.TUPLE1,
            pickle.REDUCE,
            pickle.TUPLE2,
            pickle.APPENDS,
            pickle.STOP,
        ]
    )
    return base64.b64encode(body).decode()
