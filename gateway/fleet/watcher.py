"""Looking at engines: their reports, death, return, and whether they are who they were.

Invariants:
- an engine that answers as another incarnation, or under another label than was loaded, serves no more before it was
  taken in anew;
- one that is suspected is trusted again only by an answer to a question asked after the suspicion.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from gateway.config import GatewayConfig
from gateway.core.fleet import FleetState
from gateway.engines.base import EngineFailed, EngineLimits, EngineReport, version_of
from gateway.engines.tether import until_broken
from gateway.fleet.handle import EngineHandle
from gateway.fleet.relays import Relays

log = logging.getLogger(__name__)

DTYPE_ASKS_MAX = 3
"""How often an incarnation is asked for its dtype: one that is slow the first time may be quick the next."""
PROBE_TEXT = 'The quick brown fox: def f(x): return x**2 + 0x1F, "naïve café", 12345.678 東京 Привет\n\t{"a": [1, 2]}'
"""Words, code, numbers and other scripts."""
SAME_SHARE = 0.5
"""Of its ids that two tokenizers make alike if they are one: libraries differ at a text's first space, and the like."""
LOOK_AGAIN_S = 0.2
"""After a look that failed: until `dead_after_polls` of them have, nobody knows."""


Tokenize = Callable[[str], Sequence[int]]
"""The gateway's own tokenizer, without special tokens added."""


class EngineWatcher:
    """`changed` is called when turns may be placed otherwise than before."""

    def __init__(
        self,
        config: GatewayConfig,
        state: FleetState,
        relays: Relays,
        changed: Callable[[], None],
        tokenize: Tokenize | None = None,
    ) -> None:
        self._config, self._state, self._relays, self._changed = config, state, relays, changed
        self._probe_ids = None if tokenize is None else tuple(tokenize(PROBE_TEXT))

    async def watch(self, member: EngineHandle) -> None:
        """Until cancelled."""
        while True:
            member.look.clear()
            try:
                report = await member.adapter.report()
                await self._alive(member, report)
                member.state.look_error = ""
            except EngineFailed as e:
                self._unreachable(member, e)
            member.looked.set()
            try:
                async with asyncio.timeout(self._config.poll_interval_s):
                    await member.look.wait()
            except TimeoutError:
                continue

    def failed(self, member: EngineHandle, error: Exception) -> None:
        """The look itself failed, as nobody foresaw: nothing is known of the engine."""
        self._unreachable(member, EngineFailed(f"looking at it failed: {error!r}"))
        member.looked.set()

    async def hold_tether(self, member: EngineHandle) -> None:
        """Until cancelled."""
        while True:
            if await until_broken(member.spec.url):
                member.suspect()
            await asyncio.sleep(self._config.poll_interval_s)

    async def _alive(self, member: EngineHandle, report: EngineReport) -> None:
        state = member.state
        member.failed_polls = 0
        state.kv_usage, state.running_reported = report.kv_usage, report.running
        state.waiting_reported = report.waiting
        self._state.kv_ceiling(state).observe(report.kv_usage, report.running, report.waiting)
        restarted = state.incarnation != report.incarnation
        if restarted:
            state.dtype, member.dtype_asks = "", 0
        await self._learn_dtype(member)
        if state.status != "dead" and not (restarted or state.must_load or state.suspected):
            return
        limits = await member.adapter.limits()
        if state.status == "refreshing":
            return  # its refresh fails by itself and fences it; the next look goes on from there
        relabelled = state.status == "serving" and version_of(limits.weight_version) != state.version
        if state.status == "serving" and not restarted and not relabelled:
            self._trust(member)
            return
        if (restarted or relabelled) and state.status not in ("dead", "joining"):
            what = "it was restarted" if restarted else f"it says {limits.weight_version!r}, not {state.version}"
            member.to("dead", what)
        if restarted:
            await self._check_tokenizer(member)
            state.begin_anew()
        self._meet(member, report, limits)

    async def _learn_dtype(self, member: EngineHandle) -> None:
        """It need not tell: then records say that nobody knows it."""
        if member.state.dtype or member.dtype_asks >= DTYPE_ASKS_MAX:
            return
        member.dtype_asks += 1
        try:
            member.state.dtype = await member.adapter.dtype()
        except EngineFailed as e:
            if member.dtype_asks == DTYPE_ASKS_MAX:
                log.info("engine %s does not report its dtype: %s", member.state.name, e)

    async def _check_tokenizer(self, member: EngineHandle) -> None:
        """EngineFailed when it makes other ids of the same text. An engine that does not tell is believed.

        With another tokenizer, though of the same size, every answer would be noise, and nothing else would show it.
        """
        told = None if self._probe_ids is None else await member.adapter.tokenize(PROBE_TEXT)
        if told is None or self._probe_ids is None or told == self._probe_ids:
            return
        common = (Counter(told) & Counter(self._probe_ids)).total()
        if common >= SAME_SHARE * max(len(told), len(self._probe_ids)):
            log.warning("engine %s makes other ids of some text than the gateway: %s", member.state.name, PROBE_TEXT)
            return
        raise EngineFailed(
            f"its tokenizer is not the gateway's: of a text's {len(self._probe_ids)} tokens it makes {common} alike",
            hint=f"start it with the model whose tokenizer is in {self._config.tokenizer}, or the gateway with its own",
        )

    def _meet(self, member: EngineHandle, report: EngineReport, limits: EngineLimits) -> None:
        """Takes it for what it says it is."""
        state = member.state
        state.incarnation = report.incarnation
        state.context_tokens, state.kv_capacity_tokens = limits.context_tokens, limits.kv_capacity_tokens
        state.version = version_of(limits.weight_version)
        state.must_load = limits.fenced
        if state.status == "dead":
            what = "fenced: it must load before it serves" if limits.fenced else f"holds version {state.version}"
            member.to("joining", f"answers; {what}")
        if not state.must_load:
            state.good = max(state.good, state.version)
        self.settle(member)
        self._changed()

    def _trust(self, member: EngineHandle) -> None:
        """It answered as the incarnation it was, and nothing broke since it was asked."""
        if member.state.suspected and not member.look.is_set():
            member.state.suspected = False
            self._changed()

    def settle(self, member: EngineHandle) -> None:
        """A joining engine serves once it holds a wanted version: its host's newest, one that live sessions are on, or
        any while there is none."""
        state = member.state
        wanted = self._state.wanted(state)
        if state.status == "joining" and wanted and self._relay_seen(member):
            member.to("serving", f"version {state.version}")

    def _relay_seen(self, member: EngineHandle) -> bool:
        """Whether its relay has told what it holds: before that nobody knows which version is wanted."""
        return member.spec.relay is None or self._relays.newest(member.spec.relay) is not None

    def _unreachable(self, member: EngineHandle, error: EngineFailed) -> None:
        member.failed_polls += 1
        if member.state.status == "dead" and member.state.look_error != error.message:
            log.warning("engine %s cannot be used yet: %s", member.state.name, error)
        if member.failed_polls == 1:
            member.note_failed_look(error.message)
        member.state.look_error = error.message
        if member.state.status != "dead" and member.failed_polls >= self._config.dead_after_polls:
            member.to("dead", error.message)
            member.state.incarnation = ""
            self._changed()
        elif member.state.status != "dead":
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, member.look.set)
