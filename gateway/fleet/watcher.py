"""Polls engines: their reports, death and return, and whether they are still the process that they were.

Invariants:
- an engine that responds as another incarnation, or with another version label than the one that was loaded, serves no
  more before it has joined anew;
- a suspected engine serves again only after a response to a request that was sent after the suspicion: a response to
  an earlier one may have been on its way when the engine died. One that says itself that it is not ready, or on which
  turn after turn failed (`gateway.core.faults`), stays suspected until that is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.core.fleet.state import EngineState, FleetState
from gateway.engines.base import (
    UNNAMED,
    EngineAdapter,
    EngineFailed,
    EngineLimits,
    EngineReport,
    TextCodec,
    Tls,
    is_version,
    version_of,
)
from gateway.engines.connections import until_broken
from gateway.fleet.handle import EngineHandle
from gateway.fleet.relays import Relays
from protos.foreign_text import quoted
from protos.telemetry.logs import about

log = logging.getLogger(__name__)

DTYPE_REQUESTS_MAX = 3
"""Requests for its dtype to one incarnation: an engine that is slow the first time may be quick the next."""
PROBE_TEXT = 'The quick brown fox: def f(x): return x**2 + 0x1F, "naïve café", 12345.678 東京 Привет\n\t{"a": [1, 2]}'
"""Words, code, numbers and several scripts."""
SAME_SHARE = 0.5
"""Share of ids that two tokenizers have in common if they are the same: libraries differ at a text's first space."""
NOT_READY = "it says that it is not ready: it was paused, or ends once its last turn has ended"
IGNORES_SEEDS = "ignores the `seed` of a request (SGLang takes it with --enable-deterministic-inference alone)"
POLL_AGAIN_S = 0.2
"""After a poll that failed. The engine counts as dead only after `dead_after_polls` of them."""


async def same_ids(adapter: EngineAdapter, ids: Sequence[int] | None, tokenizer: Path) -> bool:
    """Whether an engine makes `ids`, the gateway's own, of `PROBE_TEXT`. An engine without a route for it is trusted.

    Raises EngineFailed when few are alike. With another tokenizer, though of the same size, every answer would be
    noise, and nothing else would show it.
    """
    found = None if ids is None else await adapter.tokenize(PROBE_TEXT)
    if found is None or ids is None or found == tuple(ids):
        return True
    common = (Counter(found) & Counter(ids)).total()
    if common >= SAME_SHARE * max(len(found), len(ids)):
        return False
    raise EngineFailed(
        f"its tokenizer is not the gateway's: of a text's {len(ids)} tokens it makes {common} alike",
        hint=f"start it with the model whose tokenizer is in {tokenizer}, or the gateway with its own",
    )


class EngineWatcher:
    """`reconcile` is called when turns may be placed otherwise than before."""

    def __init__(
        self,
        config: GatewayConfig,
        state: FleetState,
        relays: Relays,
        reconcile: Callable[[], None],
        tokenizer: TextCodec | None,
        context_tokens: int,
        tls: Tls,
    ) -> None:
        self._config, self._state, self._relays, self._reconcile = config, state, relays, reconcile
        self._tls = tls
        self._context_tokens = context_tokens  # the model's, for engines that report none
        self._probe_ids = None if tokenizer is None else tuple(tokenizer.encode(PROBE_TEXT))

    async def watch(self, handle: EngineHandle) -> None:
        """Polls until cancelled: at an interval, and at once when `poll_now` is set."""
        while True:
            # Cleared before the request: set from now on, it causes a poll that begins after that.
            handle.poll_now.clear()
            served = handle.state.status == "serving"  # else this gateway may have paused it itself, for a load
            try:
                report = await handle.adapter.report()
                if served and not report.ready:
                    self._not_ready(handle)
                await self._alive(handle, report)
                handle.state.poll_error = ""
            except EngineFailed as e:
                self._unreachable(handle, e)
            handle.polled.set()
            try:
                async with asyncio.timeout(self._config.poll_interval_s):
                    await handle.poll_now.wait()
            except TimeoutError:
                continue

    def failed(self, handle: EngineHandle, error: Exception) -> None:
        """The poll itself raised an unexpected error: nothing is known of the engine."""
        self._unreachable(handle, EngineFailed(f"polling it failed: {error!r}"))
        handle.polled.set()

    async def hold_tether(self, handle: EngineHandle) -> None:
        """Suspects the engine whenever its idle connection breaks; until cancelled."""
        while True:
            if await until_broken(handle.spec.url, self._tls):
                handle.suspect()
            await asyncio.sleep(self._config.poll_interval_s)

    async def _alive(self, handle: EngineHandle, report: EngineReport) -> None:
        state = handle.state
        handle.failed_polls = 0
        state.kv_usage, state.running_reported = report.kv_usage, report.running
        state.waiting_reported = report.waiting
        self._state.kv_ceiling(state).observe(report.kv_usage, report.running, report.waiting)
        restarted = state.incarnation != report.incarnation
        if restarted:
            state.dtype, handle.dtype_requests = "", 0
        await self._request_dtype(handle)
        if state.status != "dead" and not (restarted or state.must_load or state.suspected):
            return
        limits = await handle.adapter.limits()
        if state.status == "refreshing":
            return  # its refresh fails by itself and fences it; the next poll goes on from there
        reported = version_of(limits.weight_version, state.started_with)
        relabelled = state.status == "serving" and reported != state.version
        if state.status == "serving" and not restarted and not relabelled:
            self._trust(handle, report)
            return
        if (restarted or relabelled) and state.status not in ("dead", "joining"):
            what = "it was restarted" if restarted else f"it reports {limits.weight_version!r}, not {state.version}"
            handle.to("dead", what)
        if restarted:
            if not await same_ids(handle.adapter, self._probe_ids, self._config.tokenizer):
                log.warning("engine %s makes other ids of some text than the gateway: %s", state.name, PROBE_TEXT)
            state.begin_anew()
        self._join(handle, report, limits)

    async def _request_dtype(self, handle: EngineHandle) -> None:
        """An engine need not report it: records then leave it empty."""
        if handle.state.dtype or handle.dtype_requests >= DTYPE_REQUESTS_MAX:
            return
        handle.dtype_requests += 1
        try:
            handle.state.dtype = await handle.adapter.dtype()
        except EngineFailed as e:
            if handle.dtype_requests == DTYPE_REQUESTS_MAX:
                log.info("engine %s does not report its dtype: %s", handle.state.name, e)

    def _join(self, handle: EngineHandle, report: EngineReport, limits: EngineLimits) -> None:
        """Takes over what the engine reports of itself."""
        state = handle.state
        handle.has_joined = True
        state.incarnation = report.incarnation
        state.context_tokens = limits.context_tokens or self._context_tokens
        state.kv_capacity_tokens = limits.kv_capacity_tokens
        state.version = version_of(limits.weight_version)
        self._note_label(state, limits.weight_version)
        state.must_load = limits.fenced
        if state.seeds and not limits.seeds:
            log.warning("engine %s %s", state.name, IGNORES_SEEDS, extra=about(engine=state.name))
        state.seeds = limits.seeds
        if state.status == "dead":
            fenced = "fenced: it must load before it serves" if state.loads else "paused: it serves once it is resumed"
            handle.to("joining", f"responds; {fenced if limits.fenced else f'holds version {state.version}'}")
        if not state.must_load:
            state.good = max(state.good, state.version)
        self.settle(handle)
        self._reconcile()

    def _note_label(self, state: EngineState, label: str) -> None:
        label = "" if is_version(label) or label in UNNAMED else label
        if label and label != state.started_with:
            named = "engine %s calls its weights %s, which is no version: they count as version 0"
            log.warning(named, state.name, quoted(label), extra=about(engine=state.name))
        state.started_with = label

    def _not_ready(self, handle: EngineHandle) -> None:
        handle.shun(NOT_READY)
        if handle.state.ready:
            handle.state.ready = False
            self._reconcile()

    def _trust(self, handle: EngineHandle, report: EngineReport) -> None:
        """It responded as the same incarnation, and no connection broke since this poll began: `poll_now` would be set
        then, and this response may have been sent before the break."""
        out = handle.state.faults.left_s(time.monotonic()) > 0
        if handle.state.suspected and report.ready and not out and not handle.poll_now.is_set():
            handle.trust()
            self._reconcile()

    def settle(self, handle: EngineHandle) -> None:
        """A joining engine serves once it holds a wanted version: its host's newest, one that live sessions are on, or
        any while there is none."""
        state = handle.state
        wanted = self._state.wanted(state)
        if state.status == "joining" and wanted and self._relay_reported(handle):
            handle.to("serving", f"version {state.version}")

    def _relay_reported(self, handle: EngineHandle) -> bool:
        """Whether its relay has reported what it holds: before that, the wanted version is not known."""
        return handle.spec.relay is None or self._relays.newest(handle.spec.relay) is not None

    def _unreachable(self, handle: EngineHandle, error: EngineFailed) -> None:
        """What never was an engine may be any server: the report shows nothing that it sent. The log does."""
        shown = error.message if handle.has_joined else error.outline
        shown = f"{shown} ({error.hint})" if error.hint else shown
        handle.failed_polls += 1
        if handle.state.status == "dead" and handle.state.poll_error != shown:
            log.warning(
                "engine %s cannot be used yet: %s", handle.state.name, error, extra=about(engine=handle.state.name)
            )
        if handle.failed_polls == 1:
            handle.note_failed_poll(shown)
        handle.state.poll_error = shown
        if handle.state.status != "dead" and handle.failed_polls >= self._config.dead_after_polls:
            handle.to("dead", shown)
            handle.state.incarnation = ""
            self._reconcile()
        elif handle.state.status != "dead":
            asyncio.get_running_loop().call_later(POLL_AGAIN_S, handle.poll_now.set)
