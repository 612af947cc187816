"""The probe around a load: whether an engine computes otherwise, and that one which gives no number does not serve."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.fleet import refresh
from gateway.core.fleet.config import FleetConfig
from gateway.core.types import SamplingParams, Version
from gateway.engines.base import EngineChunk, EngineFailed, NoLogprob, StreamCut
from gateway.fleet.probe import PROMPT, Probe, compare, probe
from tests.support.fake_relay import FakeRelay, relay
from tests.support.gateway_shell import Shell, check_whole, read, shell
from tests.support.scripted_engine import Cut, ScriptedEngine, until
from tests.unit.gateway_sessions.test_versions import serve


@asynccontextmanager
async def probed(directory: Path, e0: ScriptedEngine) -> AsyncIterator[tuple[Shell, FakeRelay]]:
    fleet = FleetConfig(version_hold_s=0.0)
    async with relay() as (holder, address), e0, shell(directory, e0, relay=address, fleet=fleet, probe=True) as found:
        yield found, holder


def findings(found: Shell) -> list[Any]:
    return [e.fields["probe"] for e in found.timeline.read()[1] if e.kind == "refresh"]


async def test_an_engine_that_computes_as_before_is_shown(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")  # what it says depends on the prompt alone
    async with probed(tmp_path, e0) as (found, holder):
        await serve(found, holder, 1, e0)
        await serve(found, holder, 2, e0)
        await until(lambda: len(findings(found)) == 2, "two refreshes")
        assert findings(found) == ["same", "same"]
        assert found.fleet.statistics().refreshes_unchanged == 2
        assert [a.prompt for a in e0.requests] == [list(PROMPT)] * 3, "before the first load, and after each"
        run = found.run()
        check_whole(run, await read(run))


async def test_an_engine_that_gives_no_token_after_its_load_loads_again_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "RETRY_S", 0.01)
    e0 = ScriptedEngine("e0")
    async with probed(tmp_path, e0) as (found, holder):
        await serve(found, holder, 1, e0)
        e0.cuts = deque([Cut("eof", 0)])
        await serve(found, holder, 2, e0)
        await until(lambda: len(findings(found)) == 2, "the load that counted")
        assert found.fleet.statistics().refresh_failures == 1
        states = [(e.fields["state"], e.fields["reason"]) for e in found.timeline.read()[1] if e.kind == "engine"]
        [why] = [reason for state, reason in states if state == "fenced"]
        assert "gave no token after its load" in why
        assert [path for path, _ in e0.calls].count("/resume") == 3
        (refused, error), taken_back = [(report[:2], report[2]) for report in holder.reports]
        assert refused == (2, "e0")
        assert "gave no token after its load" in error, "the trainer can hear of it"
        assert taken_back == ((2, "e0"), ""), "and that it was loaded after all"


async def test_an_engine_that_takes_no_probe_serves(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", always=Cut("400"))
    async with probed(tmp_path, e0) as (found, holder):
        await serve(found, holder, 1, e0)
        await until(lambda: findings(found) == ["none"], "a refresh")
        assert found.fleet.statistics().refresh_failures == 0


class _Saying:
    """An adapter's stream of one answer."""

    def __init__(self, *chunks: EngineChunk, cut: StreamCut | None = None) -> None:
        self.chunks, self.cut = chunks, cut

    @asynccontextmanager
    async def generate(self, *asked: object) -> AsyncIterator[AsyncIterator[EngineChunk]]:
        assert isinstance(asked[1], SamplingParams)
        assert asked[1].temperature == 0.0
        yield self._stream()

    async def _stream(self) -> AsyncIterator[EngineChunk]:
        for chunk in self.chunks:
            yield chunk
        if self.cut is not None:
            raise self.cut


@pytest.mark.parametrize("chunks", [[EngineChunk((7,), (-math.inf,))], [], [EngineChunk((7, 8), (-1, -2))]])
async def test_what_is_no_number_is_refused(chunks: list[EngineChunk]) -> None:
    with pytest.raises(EngineFailed, match="answered a probe of one token with"):
        await probe(_Saying(*chunks), "i", Version(1))  # type: ignore[arg-type]


async def test_weights_that_compute_nan_are_said_to() -> None:
    message = r"version 8 computes NaN.*weights hold NaN"
    with pytest.raises(EngineFailed, match=message):
        await probe(_Saying(EngineChunk((7,), (math.nan,))), "i", Version(8))  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match=message):
        await probe(_Saying(cut=NoLogprob("x sent a token without a logprob")), "i", Version(8))  # type: ignore[arg-type]


def test_what_a_probe_says_against_the_one_before() -> None:
    before = Probe("i", Version(1), 7, -0.5)
    assert compare(None, before) == "first"
    assert compare(before, None) == "none"
    assert compare(before, Probe("other", Version(2), 7, -0.5)) == "first", "another process"
    assert compare(before, Probe("i", Version(1), 7, -0.5)) == "first", "the same version once more"
    assert compare(before, Probe("i", Version(2), 7, -0.5)) == "same"
    assert compare(before, Probe("i", Version(2), 7, math.nextafter(-0.5, 0.0))) == "changed"
    assert compare(before, Probe("i", Version(2), 8, -0.5)) == "changed"
