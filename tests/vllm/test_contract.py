"""The engine contract over real vLLM, one rank; `test_fleet` has two that each take their slice."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from gateway.api.openai.constraints import forced_call
from gateway.api.openai.forced import CallForm
from gateway.api.openai.requests import decode_chat
from gateway.core.types import SamplingParams
from tests.contract.engine_contract import PROMPT, TOKENS, LoadingContract, Subject, Turn
from tests.contract.text_contract import TextContract
from tests.support import vllm
from tests.support.greedy import first_stray, transformers_greedy
from tests.support.tiny_model import VLLM_HEAD_DIM, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a":1}}}}\n</tool_call>'


def forced(*names: str) -> str:
    """What `tool_choice` "required" comes to, of functions whose arguments are always the same."""
    functions = [{"name": name, "parameters": {"enum": [{"a": 1}]}} for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"model": "policy", "messages": [], "tools": tools, "tool_choice": "required"}
    return forced_call(decode_chat(json.dumps(body).encode()), CallForm("hermes")).structural_tag


CONTEXT, LONG = 8192, 8000
"""It makes a thousand tokens a second here: a client that waits for a processor meets a turn of 8 s."""
TWO_WORDS = ("yesyes", "yesno", "noyes", "nono")
greedy = functools.partial(transformers_greedy, head_dim=VLLM_HEAD_DIM)
strays = functools.partial(first_stray, head_dim=VLLM_HEAD_DIM)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    directory = tmp_path_factory.mktemp("vllm")

    def start(port: int) -> vllm.VllmServer:
        return vllm.start("vllm", directory, port=port, context=CONTEXT)

    # vLLM 0.33 tells a stream's versions, 0.32 only those of /inference/v1/generate.
    subject = Subject(
        "vllm", directory, start, greedy, strays, VLLM_HEAD_DIM, proves_first=True, tells_versions=False, long=LONG
    )
    yield subject
    subject.stop()


class TestVllm(TextContract, LoadingContract):
    @pytest.fixture
    def subject(self, server: Subject) -> Subject:
        return server

    @pytest.mark.parametrize(
        ("constraint", "allowed"),
        [
            ({"json_schema": '{"enum": ["yes", "no"]}'}, ('"yes"', '"no"')),
            ({"regex": "(yes|no){2}"}, TWO_WORDS),
            ({"structural_tag": forced("f")}, (CALL.format("f"),)),
            ({"structural_tag": forced("f", "g")}, (CALL.format("f"), CALL.format("g"))),
        ],
        ids=["schema", "pattern", "call", "either-call"],
    )
    async def test_an_answer_is_held_to_its_constraint(
        self, subject: Subject, constraint: dict[str, str], allowed: tuple[str, ...]
    ) -> None:
        """Of a model that says nothing of the kind by itself."""
        tokenizer = Tokenizer.from_file(str(tiny_model(head_dim=VLLM_HEAD_DIM) / "tokenizer.json"))
        sampling = SamplingParams(max_tokens=4 * TOKENS, temperature=0.0, **constraint)  # type: ignore[arg-type]
        async with subject.adapter() as adapter:
            async with adapter.generate(PROMPT, sampling, "constrained", "session") as chunks:
                ids = [token async for chunk in chunks for token in chunk.token_ids]
            free = await Turn().read(adapter)
        assert tokenizer.decode(ids) in allowed
        assert tokenizer.decode(free.ids) not in allowed
