"""The grammars of forced calls, by the xgrammar of vLLM: each allows the call that the family's own template writes,
and what they allow is parsed as a call."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.side_envs import VLLM
from gateway.api.openai.forced import CallForm, structural_tag
from gateway.tokens import ReasoningParser, ToolCallParser
from tests.support import families
from tests.unit.gateway_tokens import test_families
from tests.unit.gateway_tokens.test_families import FAMILIES, TOOLS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PARAMETERS = {**test_families.PARAMETERS, "required": ["city", "days"], "additionalProperties": False}
SCRIPT = Path(__file__).with_name("grammars.py")


def form_of(name: str) -> CallForm:
    codec = families.codec(name)
    return CallForm(codec.tool_format, codec.reasoning_format, "no" if codec.reasoning_format == "none" else "may")


def one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The family's call of one answer, without the header of the turn; behind it, as it is sampled, comes its end."""
    with monkeypatch.context() as patch:
        patch.setattr(test_families, "ONE_CALL", tuple(FAMILIES))
        text = test_families.written(name)
    marks = ("<think>", "<tool_call>", "<｜tool▁calls▁begin｜>", "[TOOL_CALLS]", '{"name"')
    return text[min(at for mark in marks if (at := text.find(mark)) >= 0) :].rstrip()


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        asked = [
            {"tag": structural_tag(form_of(name), {"weather": PARAMETERS}), "texts": [one_call(name, patch)]}
            for name in FAMILIES
        ]
    done = subprocess.run(
        [VLLM.make() / "python", SCRIPT], input=json.dumps(asked), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(FAMILIES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_templates_own_call_is_allowed(name: str, answers: dict[str, dict[str, Any]]) -> None:
    assert answers[name]["accepted"] == [True]


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_allowed_is_one_call(name: str, answers: dict[str, dict[str, Any]]) -> None:
    form = form_of(name)
    assert answers[name]["walks"]
    for text in answers[name]["walks"]:
        if form.thinks != "no":
            reasoning = ReasoningParser(form.reasoning)
            text = reasoning.feed(text).text + reasoning.finish().text
        calls = ToolCallParser(form.tools, TOOLS)
        found = [*calls.feed(text).calls, *calls.finish().calls]
        assert [call.name for call in found] == ["weather"], text
        assert set(json.loads(found[0].arguments)) == {"city", "days"}, text
