"""What the gateway relies on in every engine, as one suite of cases that each kind of engine runs: `LoadingContract`,
or `FixedContract` for a kind that loads no published versions. `EngineContract` has the cases of both.

A subclass gives the fixture `subject`; the cases see nothing of the engine but the adapter and what a test may do to a
process. Greedy numerics must not depend on the batch (float32 and a small model will do).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from gateway.core.fleet.labels import version_of
from gateway.core.types import SamplingParams
from gateway.engines.base import EngineAdapter, EngineChunk, EngineFailed, RequestRefused, SnapshotRefused, StreamCut
from gateway.engines.kinds import connect
from protos.engines import ENGINE_KINDS
from tests.support.adapters import lent
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.relays import until
from tests.support.snapshots import SealedSnapshot, seal, tear
from tests.support.tiny_model import HEAD_DIM, tiny_model

MODEL = "policy"
PROMPT = tuple(range(40, 60))
TOKENS = 24
LONG = 1500
"""Tokens of a turn that a client can meet while it runs."""
PATIENCE_S = 60.0
"""For what an engine under load may take; a case that works never waits so long."""
TRIES = 6
"""Turns that are begun until one is met while it runs: a quick engine may be through before a slow client acts."""
BRIEF_S = 0.5


@dataclass
class Subject:
    """An engine under test. Version `n` has the weights of the tiny model with seed `n`; it starts with seed 0, and
    stays there if its kind loads no versions.

    `start` gives a process that serves at `port`; `expected` the greedy ids after a prompt;
    `first_stray` the index of the first of some ids that a version would not say after a prompt and those before.
    """

    kind: str
    directory: Path
    start: Callable[[int], Daemon]
    expected: Callable[[int, tuple[int, ...], int], list[int]]
    first_stray: Callable[[Sequence[int], int, tuple[int, ...]], int | None]
    head_dim: int = HEAD_DIM
    proves_first: bool = False  # a bad snapshot is refused before anything is fenced
    dies_of_torn: bool = False  # a bad snapshot is the end of its process
    tells_versions: bool = True  # in its streams
    long: int = LONG  # more for an engine that a client on a busy machine hardly keeps up with
    dtype: str = "float32"  # what it says that it computes in
    daemon: Daemon = field(init=False)
    _snapshots: dict[int, SealedSnapshot] = field(default_factory=dict)
    _ports: KeptPorts = field(default_factory=KeptPorts)

    def __post_init__(self) -> None:
        self.daemon = self.start(self._ports.of(self.kind))

    @property
    def url(self) -> str:
        return str(self.daemon.ready["url"])

    def start_again(self) -> None:
        """A new process under the address of the one that a test killed, or was about to when it failed."""
        self.daemon.kill()
        self.daemon = self.start(self._ports.of(self.kind))

    def stop(self) -> int:
        """The exit status of its process."""
        self._ports.close()
        return self.daemon.stop()

    def snapshot(self, version: int) -> SealedSnapshot:
        if version not in self._snapshots:
            self._snapshots[version] = seal(self.directory, version, tiny_model(seed=version, head_dim=self.head_dim))
        return self._snapshots[version]

    def held(self, version: int) -> int:
        """The version that it holds after `hold`."""
        return version if ENGINE_KINDS[self.kind].loads else 0

    async def hold(self, adapter: EngineAdapter, version: int) -> int:
        """Loads the version, if its kind loads any; returns the one that it holds from now on."""
        if self.held(version):
            await load(adapter, self.snapshot(version))
        return self.held(version)

    def told(self, *versions: int) -> list[str]:
        """What a turn under these versions says of them."""
        return [str(version) for version in versions] if self.tells_versions else []

    def torn(self, version: int) -> SealedSnapshot:
        return tear(
            seal(
                self.directory / f"torn-{time.monotonic_ns()}",
                version,
                tiny_model(seed=version, head_dim=self.head_dim),
            )
        )

    async def generated_tokens(self) -> int:
        """All tokens sampled in this life of the engine, of every request, by its own count."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as response:
            text = await response.text()
        name = re.compile(r"^(?:vllm|sglang):generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)
        return sum(int(float(value)) for value in name.findall(text))

    @asynccontextmanager
    async def adapter(self, **deadlines: float) -> AsyncIterator[EngineAdapter]:
        patience = {"stall_timeout_s": PATIENCE_S, "control_timeout_s": PATIENCE_S}
        found = connect(self.kind, self.url, lent(MODEL, **{**patience, **deadlines}))
        try:
            yield found
        finally:
            await found.close()


@dataclass
class Turn:
    """What came of one stream."""

    ids: list[int] = field(default_factory=list)
    chunks: list[EngineChunk] = field(default_factory=list)

    @property
    def finish(self) -> str | None:
        return self.chunks[-1].finish_reason

    @property
    def versions(self) -> list[str]:
        """Versions told by the last event that told any."""
        return list(next((chunk.versions for chunk in reversed(self.chunks) if chunk.versions), ()))

    async def read(
        self,
        adapter: EngineAdapter,
        prompt: tuple[int, ...] = PROMPT,
        max_tokens: int = TOKENS,
        name: str = "turn",
        top: int = 0,
        stop: tuple[int, ...] = (),
    ) -> Turn:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, top_logprobs=top, stop_token_ids=stop
        )
        async with adapter.generate(prompt, sampling, name, "session") as chunks:
            async for chunk in chunks:
                self.ids += chunk.token_ids
                self.chunks.append(chunk)
        return self


async def ends_early(
    subject: Subject, leave: Callable[[], Awaitable[None]], idle: Callable[[], Awaitable[bool]]
) -> None:
    """Fails unless a turn of `subject.long` tokens that `leave` begins and leaves is cut short by the engine.

    What the engine sampled is the evidence: that it is idle in the end would be so of a turn that ran to its length.
    On a busy machine the engine may be through before the client leaves, so the client tries again.
    """
    for _ in range(TRIES):
        before = await subject.generated_tokens()
        await leave()
        await until(idle, "an idle engine", PATIENCE_S)
        if await subject.generated_tokens() - before < subject.long:
            return
    raise AssertionError(f"{TRIES} turns ran to their {subject.long} tokens though their client had left")


async def load(adapter: EngineAdapter, snapshot: SealedSnapshot) -> float:
    return await adapter.load(snapshot.path, snapshot.version, snapshot.digest)


class EngineContract:
    """The cases. Those that harm the engine mend it again."""

    @pytest.fixture
    def subject(self) -> Subject:
        raise NotImplementedError("a subclass gives the engine")

    # -- looking

    async def test_it_tells_what_it_computes_in(self, subject: Subject) -> None:
        """vLLM looks at its whole environment first, and may be asked again meanwhile."""
        async with subject.adapter() as adapter:

            async def told() -> bool:
                try:
                    return await adapter.dtype() == subject.dtype
                except EngineFailed:
                    return False

            await until(told, "its dtype", PATIENCE_S)

    # -- generation

    async def test_a_turn_is_streamed_with_ids_and_logprobs_to_its_length(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            held = await subject.hold(adapter, 1)
            turn = await Turn().read(adapter)
        assert turn.ids == subject.expected(held, PROMPT, TOKENS)
        assert [chunk.finish_reason for chunk in turn.chunks[:-1]] == [None] * (len(turn.chunks) - 1)
        assert turn.finish == "length"
        assert [version_of(label) for label in turn.versions] == [held] * subject.tells_versions
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in turn.chunks)
        assert all(logprob <= 0 for chunk in turn.chunks for logprob in chunk.logprobs)

    async def test_streams_side_by_side_do_not_mix(self, subject: Subject) -> None:
        prompts = [tuple(range(start, start + 12)) for start in range(60, 120, 15)]
        async with subject.adapter() as adapter:
            held = await subject.hold(adapter, 1)
            reading = [Turn().read(adapter, prompt, name=f"turn-{prompt[0]}") for prompt in prompts]
            turns = await asyncio.gather(*reading)
        assert [turn.ids for turn in turns] == [subject.expected(held, prompt, TOKENS) for prompt in prompts]

    async def test_a_turn_goes_on_from_its_ids(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            held = await subject.hold(adapter, 1)
            whole = subject.expected(held, PROMPT, TOKENS)
            for cut in (1, 9, TOKENS - 1):
                rest = await Turn().read(adapter, (*PROMPT, *whole[:cut]), TOKENS - cut, name=f"rest-{cut}")
                assert rest.ids == whole[cut:]

    async def test_a_stop_token_ends_the_turn_and_is_the_last_one_told(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            held = await subject.hold(adapter, 1)
            whole = subject.expected(held, PROMPT, TOKENS)
            stop = next(token for at, token in enumerate(whole) if at > 3 and token not in whole[:at])
            turn = await Turn().read(adapter, stop=(stop,))
        assert (turn.ids, turn.finish) == (whole[: whole.index(stop) + 1], "stop")

    async def test_alternatives_come_with_their_ids(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            await subject.hold(adapter, 1)
            turn = await Turn().read(adapter, top=2, max_tokens=4)
        tops = [top for chunk in turn.chunks for top in chunk.top_logprobs or ()]
        assert [len(top) >= 2 for top in tops] == [True] * 4
        assert all(token in {t.token_id for t in top} for token, top in zip(turn.ids, tops, strict=True))

    async def test_leaving_a_stream_frees_the_engine(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            await subject.hold(adapter, 1)
            sampling = SamplingParams(max_tokens=subject.long, temperature=0.0, ignore_eos=True)

            async def leave() -> None:
                async with adapter.generate(PROMPT, sampling, "left", "session") as chunks:
                    await anext(aiter(chunks))

            await ends_early(subject, leave, lambda: self._running(adapter, 0))

    async def _running(self, adapter: EngineAdapter, wanted: int) -> bool:
        return (await adapter.report()).running == wanted

    @pytest.mark.parametrize("prompt", [(1 << 20,), tuple([5] * 20_000)], ids=["no-such-token", "too-long"])
    async def test_what_can_never_work_is_refused(self, subject: Subject, prompt: tuple[int, ...]) -> None:
        async with subject.adapter() as adapter:
            await subject.hold(adapter, 1)
            with pytest.raises(RequestRefused):
                await Turn().read(adapter, prompt)

    # -- looking

    async def test_it_tells_what_it_holds(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            held = await subject.hold(adapter, 2)
            limits = await adapter.limits()
            first, second = await adapter.report(), await adapter.report()
        assert version_of(limits.weight_version) == held
        assert limits.context_tokens >= 1024
        assert limits.kv_capacity_tokens >= 1024
        assert first.incarnation == second.incarnation not in ("", "unknown")
        assert (first.running, first.waiting) == (0, 0)
        assert 0 <= first.kv_usage <= 1

    # -- turns that are cut

    async def _begun(self, subject: Subject, adapter: EngineAdapter) -> tuple[Turn, asyncio.Task[Turn]]:
        """A long turn whose first tokens came, and what reads it. A quick engine may be through soon after."""
        turn = Turn()
        running = asyncio.create_task(turn.read(adapter, max_tokens=subject.long))
        await until(lambda: _holds(len(turn.ids) > 3), "tokens", PATIENCE_S)
        return turn, running

    async def _cut_by(
        self, subject: Subject, adapter: EngineAdapter, act: Callable[[], Awaitable[None]]
    ) -> tuple[Turn, StreamCut]:
        """A turn of version 1, or the only one, that `act` cut short. One that was over before is tried again."""
        for _ in range(TRIES):
            await subject.hold(adapter, 1)
            turn, running = await self._begun(subject, adapter)
            await act()
            try:
                await running
            except StreamCut as cut:
                return turn, cut
            assert (turn.finish, len(turn.ids)) == ("length", subject.long), "whole, or cut"
            if subject.daemon.process.poll() is not None:
                await asyncio.to_thread(subject.start_again)
        raise AssertionError(f"{TRIES} turns ran to their {subject.long} tokens")

    # -- an engine that does not answer

    async def test_every_call_has_a_deadline(self, subject: Subject) -> None:
        deadlines = {"stall_timeout_s": BRIEF_S, "control_timeout_s": BRIEF_S, "load_timeout_s": BRIEF_S}
        snapshot = subject.snapshot(1)
        async with subject.adapter(**deadlines) as adapter:
            loading = [load(adapter, snapshot)] if subject.held(1) else []
            os.kill(subject.daemon.process.pid, signal.SIGSTOP)
            try:
                for call in (adapter.report(), adapter.limits(), *loading):
                    async with asyncio.timeout(PATIENCE_S):
                        with pytest.raises(EngineFailed, match=subject.url):
                            await call
                with pytest.raises(StreamCut) as cut:
                    await Turn().read(adapter, name="stalled")  # which may still run there when the next case begins
                assert cut.value.reason == "stalled"
            finally:
                os.kill(subject.daemon.process.pid, signal.SIGCONT)

    async def test_a_death_and_a_new_incarnation_show(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            incarnations: list[str] = []

            async def kill() -> None:
                incarnations.append((await adapter.report()).incarnation)
                subject.daemon.kill()

            try:
                turn, cut = await self._cut_by(subject, adapter, kill)
                assert cut.reason in ("reset", "early_end")
                assert subject.first_stray(turn.ids, subject.held(1), PROMPT) is None
                await self._check_away(subject, adapter)
            finally:
                await asyncio.to_thread(subject.start_again)
            before = incarnations[-1]
            assert (await adapter.report()).incarnation != before
            assert (await adapter.limits()).weight_version != "1"
            assert (await Turn().read(adapter)).ids == subject.expected(0, PROMPT, TOKENS)
            await self._check_other_model(subject)

    async def _check_away(self, subject: Subject, adapter: EngineAdapter) -> None:
        with pytest.raises(EngineFailed, match=subject.url):
            await adapter.report()
        with pytest.raises(StreamCut) as cut:
            await Turn().read(adapter)
        assert cut.value.reason == "refused"

    async def _check_other_model(self, subject: Subject) -> None:
        patience = lent("critic", stall_timeout_s=PATIENCE_S, control_timeout_s=PATIENCE_S)
        critic = connect(subject.kind, subject.url, patience)
        try:
            with pytest.raises(EngineFailed, match=r"serves \['policy'\], not 'critic'"):
                await critic.limits()
        finally:
            await critic.close()


class FixedContract(EngineContract):
    """The cases of kinds that load no published versions."""

    async def test_a_load_is_refused_and_it_says_what_it_said(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            with pytest.raises(SnapshotRefused):
                await load(adapter, subject.snapshot(1))
            assert version_of(await adapter.weight_version()) == 0
            assert (await Turn().read(adapter)).ids == subject.expected(0, PROMPT, TOKENS)


class LoadingContract(EngineContract):
    """The cases of kinds that load published versions."""

    async def test_each_version_speaks_for_itself_and_no_old_kv_is_used(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            for version in (1, 2, 3, 1):
                assert await load(adapter, subject.snapshot(version)) > 0
                turn = await Turn().read(adapter)
                assert turn.ids == subject.expected(version, PROMPT, TOKENS)
                assert turn.versions == subject.told(version)
                assert (await adapter.limits()).weight_version == str(version)

    async def test_a_load_cuts_what_runs_and_mixes_nothing_in(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:

            async def load_another() -> None:
                await load(adapter, subject.snapshot(2))

            turn, _ = await self._cut_by(subject, adapter, load_another)
            assert subject.first_stray(turn.ids, 1, PROMPT) is None
            assert (await Turn().read(adapter)).ids == subject.expected(2, PROMPT, TOKENS)

    async def test_after_a_load_that_failed_nothing_of_it_is_said(self, subject: Subject) -> None:
        async with subject.adapter() as adapter:
            await load(adapter, subject.snapshot(1))
            for held, good in ((1, 2), (2, 1)):  # the next version, or the one before: either mends it
                with pytest.raises(EngineFailed):
                    await load(adapter, subject.torn(9))
                await self._check_untouched(subject, held)
                if subject.dies_of_torn:
                    await until(lambda: _holds(subject.daemon.process.poll() is not None), "its end", PATIENCE_S)
                    await asyncio.to_thread(subject.start_again)
                await load(adapter, subject.snapshot(good))
                assert (await Turn().read(adapter)).ids == subject.expected(good, PROMPT, TOKENS)

    async def _check_untouched(self, subject: Subject, held: int) -> None:
        """It says what it held before, if it noticed in time; else nothing at all."""
        turn, patience_s = Turn(), PATIENCE_S if subject.proves_first else BRIEF_S
        async with subject.adapter(stall_timeout_s=patience_s) as adapter:
            if subject.proves_first:
                assert (await turn.read(adapter)).ids == subject.expected(held, PROMPT, TOKENS)
            else:
                with pytest.raises(StreamCut):
                    await turn.read(adapter)
                assert turn.ids == []


async def _holds(condition: bool) -> bool:
    return condition
