"""Polls engines: their reports, death and return, and whether they are still the process that they were.
What follows from a report is decided in `gateway.core.fleet.machine`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.core.fleet.events import ConnectionBroke, Described, DtypeReported, Event, Polled, PollFailed
from gateway.engines.base import EngineAdapter, EngineFailed, EngineReport, TextCodec, Tls
from gateway.engines.connections import until_broken
from gateway.fleet.handle import EngineHandle
from protos.telemetry.logs import about

log = logging.getLogger(__name__)

DTYPE_REQUESTS_MAX = 3
"""Requests for its dtype to one incarnation: an engine that is slow the first time may be quick the next."""
PROBE_TEXT = 'The quick brown fox: def f(x): return x**2 + 0x1F, "naïve café", 12345.678 東京 Привет\n\t{"a": [1, 2]}'
"""Words, code, numbers and several scripts."""
SAME_SHARE = 0.5
"""Share of ids that two tokenizers have in common if they are the same: libraries differ at a text's first space."""


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
    """`send` takes what happened to the machine."""

    def __init__(
        self,
        config: GatewayConfig,
        send: Callable[[Event], None],
        tokenizer: TextCodec | None,
        context_tokens: int,
        tls: Tls,
    ) -> None:
        self._config, self._send, self._tls = config, send, tls
        self._context_tokens = context_tokens  # the model's, for engines that report none
        self._probe_ids = None if tokenizer is None else tuple(tokenizer.encode(PROBE_TEXT))

    async def watch(self, handle: EngineHandle) -> None:
        """Polls until cancelled: at an interval, and at once when `poll_now` is set."""
        while True:
            # Cleared before the request: set from now on, it causes a poll that begins after that.
            handle.poll_now.clear()
            try:
                await self._poll(handle)
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
        """Reports whenever the engine's idle connection breaks; until cancelled."""
        while True:
            if await until_broken(handle.spec.url, self._tls):
                self._send(ConnectionBroke(handle.state.name))
            await asyncio.sleep(self._config.poll_interval_s)

    async def _poll(self, handle: EngineHandle) -> None:
        state, began = handle.state, time.monotonic()
        report = await handle.adapter.report()
        restarted = state.incarnation != report.incarnation
        if restarted:
            handle.dtype_requests = 0
        numbers = report.kv_usage, report.running, report.waiting
        self._send(Polled(state.name, began, report.incarnation, *numbers, report.ready))
        await self._request_dtype(handle)
        if state.unlike(report.incarnation):
            await self._describe(handle, report, began, restarted=restarted)

    async def _request_dtype(self, handle: EngineHandle) -> None:
        """An engine need not report it: records then leave it empty."""
        if handle.state.dtype or handle.dtype_requests >= DTYPE_REQUESTS_MAX:
            return
        handle.dtype_requests += 1
        try:
            self._send(DtypeReported(handle.state.name, await handle.adapter.dtype()))
        except EngineFailed as e:
            if handle.dtype_requests == DTYPE_REQUESTS_MAX:
                log.info("engine %s does not report its dtype: %s", handle.state.name, e)

    async def _describe(self, handle: EngineHandle, report: EngineReport, began: float, *, restarted: bool) -> None:
        state, limits = handle.state, await handle.adapter.limits()
        comparable = restarted and state.status != "refreshing"
        if comparable and not await same_ids(handle.adapter, self._probe_ids, self._config.tokenizer):
            log.warning("engine %s makes other ids of some text than the gateway: %s", state.name, PROBE_TEXT)
        handle.has_joined = True
        described = Described(
            state.name,
            began,
            report.incarnation,
            limits.weight_version,
            limits.context_tokens or self._context_tokens,
            limits.kv_capacity_tokens,
            report.ready,
            limits.fenced,
            limits.seeds,
        )
        self._send(described)

    def _unreachable(self, handle: EngineHandle, error: EngineFailed) -> None:
        """What never was an engine may be any server: the report shows nothing that it sent. The log does."""
        state = handle.state
        shown = error.message if handle.has_joined else error.outline
        shown = f"{shown} ({error.hint})" if error.hint else shown
        if state.status == "dead" and state.poll_error != shown:
            log.warning("engine %s cannot be used yet: %s", state.name, error, extra=about(engine=state.name))
        self._send(PollFailed(state.name, shown, self._config.dead_after_polls))
