"""The engine contract over the embedded engine and the SGLang stand-in, each in a process of its own, and over the
stand-in as a kind that loads nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gateway.core.types import SamplingParams
from gateway.engines.base import RequestRefused, SnapshotRefused
from gateway.engines.kinds import ADAPTERS
from gateway.engines.sglang import LOADER, SglangEngine
from protos.engines import ENGINE_KINDS
from tests.contract.engine_contract import PROMPT, FixedContract, LoadingContract, Subject
from tests.contract.text_contract import TextContract
from tests.support import processes
from tests.support.greedy import first_stray, transformers_greedy
from tests.support.processes import Daemon
from tests.support.sglang.weights import read_directory, said
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow


def stand_in_says(seed: int, prompt: tuple[int, ...], count: int) -> list[int]:
    return said(read_directory(tiny_model(seed=seed)), prompt, count)[0]


def stand_in_strays(found: Sequence[int], seed: int, prompt: tuple[int, ...]) -> int | None:
    says = stand_in_says(seed, prompt, len(found))
    return next((at for at, (a, b) in enumerate(zip(found, says, strict=True)) if a != b), None)


def start_embedded(directory: Path, port: int) -> Daemon:
    command = ["gateway", "engine", f"--port={port}", f"--model={tiny_model()}", "--dtype=float32"]
    return processes.start("engine", [*command, "--served-model-name=policy", "--weight-version=0"], directory)


def start_sglang(directory: Path, flags: tuple[str, ...], port: int) -> Daemon:
    return processes.start(
        "sglang", ["tests.support.sglang", f"--port={port}", f"--model={tiny_model()}", *flags], directory
    )


SGLANG = {
    "cumulative": (),
    "incremental": ("--incremental-streaming-output",),
    "loader": (f"--custom-weight-loader={LOADER}", "--tp=2"),
}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    directory = tmp_path_factory.mktemp("embedded")
    subject = Subject(
        "embedded", directory, functools.partial(start_embedded, directory), transformers_greedy, first_stray
    )
    yield subject
    assert subject.stop() == 0


@pytest.fixture(scope="module", params=SGLANG)
def sglang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    directory = tmp_path_factory.mktemp("sglang")
    start = functools.partial(start_sglang, directory, SGLANG[request.param])
    subject = Subject(
        "sglang", directory, start, stand_in_says, stand_in_strays, dies_of_torn=request.param != "loader"
    )
    yield subject
    assert subject.stop() == 0


class Fixed(SglangEngine):
    async def load(self, path: Path, version: int, digest: str) -> float:
        raise SnapshotRefused(f"{self.url} loads no versions")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    directory = tmp_path_factory.mktemp("fixed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINE_KINDS, "fixed", dataclasses.replace(ENGINE_KINDS["sglang"], loads=False))
        patch.setitem(ADAPTERS, "fixed", Fixed)
        start = functools.partial(start_sglang, directory, ())
        subject = Subject("fixed", directory, start, stand_in_says, stand_in_strays)
        yield subject
        assert subject.stop() == 0


class TestEmbedded(TextContract, LoadingContract):
    @pytest.fixture
    def subject(self, embedded: Subject) -> Subject:
        return embedded

    @pytest.mark.parametrize("constraint", [{"json_schema": "{}"}, {"regex": "yes|no"}], ids=["schema", "pattern"])
    async def test_what_it_cannot_hold_an_answer_to_is_refused(
        self, subject: Subject, constraint: dict[str, str]
    ) -> None:
        """The gateway sends it no such turn; it would not drop the field silently."""
        sampling = SamplingParams(max_tokens=4, **constraint)  # type: ignore[arg-type]
        async with subject.adapter() as adapter:
            with pytest.raises(RequestRefused, match="structured_outputs"):
                async with adapter.generate(PROMPT, sampling, "constrained", "session") as chunks:
                    await anext(aiter(chunks))


class TestSglang(LoadingContract):
    @pytest.fixture
    def subject(self, sglang: Subject) -> Subject:
        return sglang


class TestFixed(FixedContract):
    @pytest.fixture
    def subject(self, fixed: Subject) -> Subject:
        return fixed
