"""The outputs that canitoolcall has of the formats that are read here: what models and their templates wrote, and the
right readings. Whole, a character at a time, and cut by its own strategies."""

from __future__ import annotations

import pytest
from canitoolcall.chunking import DEFAULT_STRATEGIES, split
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms, assert_equivalent
from canitoolcall.results import ParsedToolCall, ParseResult

from gateway.tokens import AnswerParser, ToolFormat
from gateway.tokens.reasoning import ReasoningFormat

FORMATS: dict[str, tuple[ToolFormat, ReasoningFormat]] = {
    "qwen3-hermes": ("hermes", "think"),
    "qwen3-xml": ("qwen_xml", "think"),
    "glm": ("glm", "think"),
    "deepseek": ("deepseek", "think"),
    "mistral": ("mistral", "brackets"),
    "llama": ("llama", "none"),
}
OTHER_FORMATS = ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4")
"""Models of these families with another format, whose templates are refused `tools`."""

CUT = "a call that was cut stays text: nothing that a model wrote vanishes"
REFUSED = {
    "mistral/v13think-stop-at-open-marker": CUT,
    "qwen3-hermes/truncated-second-parallel-call": CUT,
    "qwen3-xml/q38-truncated-at-tool-call-open": CUT,
}
"""The readings that are another one here on purpose, each with the reason."""
SPACE = {"llama/l3-sglang-text-before-python-tag": "the white space before a call belongs to the call"}
"""Those that differ in white space."""

FIXTURES = [
    each for each in load_fixtures() if each.family in FORMATS and not each.reference_model.startswith(OTHER_FORMATS)
]


def formats(fixture: Fixture) -> tuple[ToolFormat, ReasoningFormat]:
    """As the model's template shows them."""
    tools, reasoning = FORMATS[fixture.family]
    if "Llama-4" in fixture.reference_model:
        return "llama4", reasoning
    return tools, "think" if "Magistral-Small-2506" in fixture.reference_model else reasoning


def begun(fixture: Fixture) -> bool | None:
    """Whether the generation prompt opens the reasoning. GLM's of 4.7 and later does, where a record has none."""
    prompt = fixture.generation_prompt
    if prompt is None:
        opens = fixture.reference_model.startswith(("zai-org/GLM-4.7", "zai-org/GLM-5"))
        return True if opens and "<think>" not in fixture.raw_output else None
    return {"<think>": True, "</think>": False}.get(prompt.split()[-1] if prompt.split() else "")


def parsed(fixture: Fixture, pieces: list[str]) -> ParseResult:
    tools, reasoning = formats(fixture)
    parser = AnswerParser(reasoning=reasoning, begun=begun(fixture), calls=tools, tools=fixture.tools or None)
    deltas = [*map(parser.feed, pieces), parser.feed("", last=True)]
    return ParseResult(
        "".join(delta.text for delta in deltas) or None,
        "".join(delta.reasoning for delta in deltas) or None,
        tuple(ParsedToolCall(call.name, call.arguments) for delta in deltas for call in delta.calls),
    )


def test_all_of_the_formats_that_are_read_are_there() -> None:
    assert len(FIXTURES) == 265
    assert {each.id for each in FIXTURES} >= REFUSED.keys() | SPACE.keys()


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda each: each.id)
def test_an_output_is_read_as_is_right(fixture: Fixture) -> None:
    whole = parsed(fixture, [fixture.raw_output])
    assert_equivalent(whole, parsed(fixture, list(fixture.raw_output)))
    for strategy in DEFAULT_STRATEGIES:
        units = list(fixture.raw_output)
        assert_equivalent(whole, parsed(fixture, ["".join(group) for group in split(units, strategy, special="<>[]")]))
    if fixture.id in REFUSED:
        with pytest.raises(AssertionError):
            assert_conforms(fixture, whole, soft=True)
    else:
        assert_conforms(fixture, whole, soft=fixture.id in SPACE)
