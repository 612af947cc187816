"""The chat templates of the families that people train: their formats are found, what a template writes as a call is
parsed as that call, and the next prompt extends what was sampled."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gateway.tokens import ReasoningParser, ToolCallParser
from gateway.tokens.chat import Chat
from gateway.tokens.template import ChatTemplate
from tests.support import codecs, families

FAMILIES = {
    "qwen2_5": ("hermes", "none"),
    "qwen3": ("hermes", "think"),
    "qwen3_instruct_2507": ("hermes", "none"),
    "qwen3_5_think": ("qwen_xml", "think"),
    "qwen3_5_nothink": ("qwen_xml", "think"),
    "qwen3_6": ("qwen_xml", "think"),
    "llama3_1": ("llama", "none"),
    "llama3_2": ("llama", "none"),
    "deepseekv3": ("deepseek", "think"),
    "deepseek_r1_distill": ("deepseek", "think"),
    "glm4moe": ("glm", "think"),
    "mistral_v3": ("mistral", "none"),
    "mistral_v11": ("mistral", "none"),
    "mistral_v13": ("mistral", "brackets"),
}
ONE_CALL = ("llama3_1", "llama3_2")
"""Their templates refuse several calls in one answer."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
]
ARGUMENTS = [{"city": "Köln 12", "days": 3}, {"city": "42", "days": 1}]
ASK: list[Any] = [{"role": "user", "content": "How is it?"}]


def answer(name: str) -> dict[str, Any]:
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
        for n, arguments in enumerate(ARGUMENTS[: 1 if name in ONE_CALL else 2])
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def written(name: str) -> str:
    """What the template writes as the answer, up to its end, with the header of the turn."""
    codec = families.codec(name)
    before = codec.render_text(ASK, TOOLS, add_generation_prompt=False)
    text = codec.render_text([*ASK, answer(name)], TOOLS, add_generation_prompt=False)
    assert text.startswith(before)
    for end in families.ENDS[next(family for family in families.ENDS if name.startswith(family))]:
        text = text.rstrip("\n").removesuffix(end)
    return text[len(before) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_formats_are_found_in_the_template(name: str) -> None:
    codec = families.codec(name)
    assert (codec.tool_format, codec.reasoning_format) == FAMILIES[name]


@pytest.mark.parametrize("name", ["gemma4_v5", "gptoss", "lfm2_2_5", "muse_glimmer"])
def test_a_format_that_is_not_read_is_found_in_the_template(name: str) -> None:
    """Muse Glimmer's has the marks of another one."""
    assert Chat(ChatTemplate(families.template(name), {"bos_token": "<s>"})).tool_format == "none"


def test_llama_4_is_not_taken_for_llama_3() -> None:
    assert (codecs.llama4().tool_format, codecs.llama3().tool_format) == ("llama4", "llama")


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_template_writes_is_parsed_as_the_call(name: str, chunk: int) -> None:
    codec = families.codec(name)
    ids = codec.encode(written(name))
    begin = next(n for n in range(len(ids)) if _opens(codec.decode(ids[n:]), codec.tool_format))
    ids = ids[begin:]
    decoder, parser = codec.stream_decoder(markers=True), ToolCallParser(codec.tool_format, TOOLS)
    deltas = [parser.feed(decoder.feed(ids[at : at + chunk])) for at in range(0, len(ids), chunk)]
    deltas += [parser.feed(decoder.flush()), parser.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", arguments) for arguments in ARGUMENTS[: len(answer(name)["tool_calls"])]
    ]
    assert "".join(delta.text for delta in deltas) == ""


def _opens(text: str, form: str) -> bool:
    marks = {"deepseek": "<｜tool▁calls▁begin｜>", "mistral": "[TOOL_CALLS]", "llama": '{"name"'}
    return text.startswith(marks.get(form, "<tool_call>"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_prompt_extends_the_sampled_call(name: str) -> None:
    codec = families.codec(name)
    end = max(codec.turn_end_ids)  # of GLM the token that begins a tool's turn
    recorded = [*codec.render(ASK, TOOLS), *codec.encode(written(name)), end]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain."} for call in answer(name)["tool_calls"]]
    bridged = codec.bridge(recorded, [*ASK, answer(name)], results, TOOLS)
    assert bridged.prompt_ids[: len(recorded)] == recorded
    rest = codec.decode(bridged.prompt_ids[len(recorded) :])
    assert rest.count("Rain.") == len(results)
    assert codec.tokenizer.id_to_token(end) not in rest.partition("Rain.")[0]


def test_a_token_that_begins_the_next_turn_stays_when_another_was_sampled() -> None:
    """GLM ends a turn with the token of the role that it expects next; a user may speak instead of a tool."""
    codec = families.codec("glm4moe")
    user, tool = (codec.tokenizer.token_to_id(token) for token in ("<|user|>", "<|observation|>"))
    assert user is not None
    assert tool is not None
    recorded = [*codec.render(ASK), *codec.encode("Fine."), tool]
    more: list[Any] = [{"role": "user", "content": "Sure?"}]
    messages: list[Any] = [*ASK, {"role": "assistant", "content": "Fine."}]
    bridged = codec.bridge(recorded, messages, more)
    assert bridged.prompt_ids[len(recorded)] == user
    bridged = codec.bridge([*recorded[:-1], user], messages, more)
    assert codec.decode(bridged.prompt_ids[len(recorded) :]).startswith("\nSure?")


def test_a_turn_ends_once_where_answers_end_with_another_token_than_the_template_writes() -> None:
    """gpt-oss ends an answer with `<|return|>`, and its template ends each message with `<|end|>`."""
    codec = families.codec("gptoss")
    answer = "<|channel|>final<|message|>Fine."
    messages: list[Any] = [*ASK, {"role": "assistant", "content": "Fine."}]
    for end, closed in [("<|return|>", False), ("<|end|>", False), ("", True)]:
        recorded = [*codec.render(ASK), *codec.encode(answer + end)]
        bridged = codec.bridge(recorded, messages, [{"role": "user", "content": "Sure?"}])
        rest = codec.decode(bridged.prompt_ids[len(recorded) :])
        assert rest == ("<|end|>" if closed else "") + "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
        assert bridged.closed_turn is closed


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith(("glm", "llama3_2"))])
def test_an_answer_and_the_next_message_have_one_end_of_turn_between_them(name: str) -> None:
    codec = families.codec(name)
    messages: list[Any] = [*ASK, {"role": "assistant", "content": "Fine."}]
    for end in sorted(codec.eos_ids & codec.turn_end_ids):
        recorded = [*codec.render(ASK), *codec.encode("Fine."), end]
        rest = codec.bridge(recorded, messages, ASK).prompt_ids[len(recorded) :]
        before = codec.decode(rest).partition("How is it?")[0]
        assert not codec.turn_end_ids & set(codec.encode(before))


def test_a_template_that_refuses_a_lone_message_is_bridged_as_any_other() -> None:
    plain = families.codec("qwen2_5")
    source = "{% if messages | length < 2 %}{{ raise_exception('more') }}{% endif %}" + families.template("qwen2_5")
    strict = copy.copy(plain)
    strict._plain_chat = Chat(ChatTemplate(source, {}))
    for found in ("_ends_begin", "turn_end_ids"):
        strict.__dict__.pop(found, None)
    asked: list[Any] = [{"role": "system", "content": "Be brief."}, *ASK]
    recorded = [*plain.render(asked), *plain.encode("Fine."), *plain.turn_end_ids][:-1]
    history: list[Any] = [*asked, {"role": "assistant", "content": "Fine."}]
    assert strict.bridge(recorded, history, ASK) == plain.bridge(recorded, history, ASK)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_mistrals_reasoning(chunk: int) -> None:
    text = "[THINK]Hm, [3].\n[/THINK]\nIt is [3]."
    parser = ReasoningParser("brackets")
    deltas = [parser.feed(text[at : at + chunk]) for at in range(0, len(text), chunk)] + [parser.finish()]
    assert "".join(delta.reasoning for delta in deltas) == "Hm, [3]."
    assert "".join(delta.text for delta in deltas) == "It is [3]."


@pytest.mark.parametrize(("name", "opened"), [("qwen3_5_think", True), ("deepseekv3", True), ("qwen3", None)])
def test_a_prompt_that_opens_the_reasoning_is_noticed(name: str, opened: bool | None) -> None:
    codec = families.codec(name)
    assert codec.opens_reasoning(codec.render(ASK)) is opened


def test_a_template_that_writes_calls_and_lists_no_tools_gets_a_list() -> None:
    codec = families.codec("deepseekv3")
    prompt = codec.render_text(ASK, TOOLS)
    assert '"weather"' in prompt
    assert "<｜tool▁calls▁begin｜>" in prompt
