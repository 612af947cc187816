"""The engine contract over real vLLM, one rank; `test_fleet` has two that each take their slice."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.contract.engine_contract import EngineContract, Subject
from tests.support import vllm
from tests.support.greedy import transformers_greedy
from tests.support.tiny_model import VLLM_HEAD_DIM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

greedy = functools.partial(transformers_greedy, head_dim=VLLM_HEAD_DIM)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    directory = tmp_path_factory.mktemp("vllm")

    def start(port: int) -> vllm.VllmServer:
        return vllm.start("vllm", directory, port=port)

    # vLLM 0.33 tells a stream's versions, 0.32 only those of /inference/v1/generate.
    subject = Subject("vllm", directory, start, greedy, VLLM_HEAD_DIM, proves_first=True, tells_versions=False)
    yield subject
    subject.daemon.stop()


class TestVllm(EngineContract):
    @pytest.fixture
    def subject(self, server: Subject) -> Subject:
        return server
