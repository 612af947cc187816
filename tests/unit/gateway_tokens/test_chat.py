"""No prompt lacks a message's text: a template gets contents as it takes them, and what it drops is refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.tokens import chat as chat_module
from gateway.tokens.chat import SHAPES, TOOLS, Chat
from gateway.tokens.template import ChatTemplate
from protos.errors import InvalidRequest
from tests.support import codecs, families
from tests.support.loop_holds import HOLD_S_MAX, beating
from tests.support.turns import Script, ScriptedTurns, serving
from tests.unit.gateway_api.test_openai_bad_input import post

ITERATES = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% for part in m.content %}{% if part.type == "text" %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""
READS_FIRST = """\
<s>{% if messages[0].role == 'system' %}{% set sys = messages[0]['content'][0]['text'] %}[SYS]{{ sys }}[/SYS]{% endif %}
{% for m in messages if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% endfor %}"""
FIRST_ONLY = "{% for m in messages[:2] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LAST_THREE = "{% for m in messages[-3:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

Messages = list[dict[str, Any]]
USER = {"role": "user", "content": "What is seven?"}


def chat(source: str) -> Chat:
    return Chat(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}))


def rendered(source: str, messages: Messages, tools: Any = None, **kwargs: Any) -> str:
    made = chat(source)
    text = made.render(messages, tools, template_kwargs=kwargs)
    made.check(messages, text)
    return text


@pytest.mark.parametrize("content", ["What is seven?", [{"type": "text", "text": "What is seven?"}]])
def test_a_template_that_iterates_over_parts_gets_parts(content: Any) -> None:
    answer = {
        "role": "assistant",
        "content": "7",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 7}'}}],
    }
    told = [{"role": "system", "content": "Add."}, {"role": "user", "content": content}, answer]
    text = rendered(ITERATES, [*told, {"role": "tool", "content": "fourteen"}], TOOLS)
    assert chat(ITERATES).tool_format == "hermes"
    for words in ("Add.", "What is seven?", '{"name": "add", "arguments": {"a": 7}}', "fourteen", "LAMINARmark"):
        assert words in text


def test_each_role_has_the_form_in_which_the_template_reads_it() -> None:
    text = rendered(READS_FIRST, [{"role": "system", "content": "Never say seven."}, {"role": "user", "content": "Hi"}])
    assert text == "<s>[SYS]Never say seven.[/SYS][INST]Hi[/INST]"
    with pytest.raises(InvalidRequest, match=r"message 1 \(assistant\): this model's chat template drops an answer"):
        rendered(READS_FIRST, [USER, {"role": "assistant", "content": "8"}, USER])


@pytest.mark.parametrize("content", ["A\n\"B\" C", "  <b>ö 中\\n</b>\n", "a  b"])  # fmt: skip
@pytest.mark.parametrize("written", ["m.content", "m.content | trim", "m.content | tojson", "m.content | indent(4)"])
def test_trimmed_escaped_and_indented_texts_are_found(content: str, written: str) -> None:
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {written} }}}}{{% endfor %}}"
    rendered(source, [{"role": "user", "content": content}, {"role": "tool", "content": content + "!"}] * 3)


def test_a_long_history_is_searched_once() -> None:
    """By the characters searched, whatever the order in which the template writes the texts, and how."""

    class Searched(str):
        """A rendering that counts."""

        searched = 0

        def find(self, text: str, at: int, end: int) -> int:  # type: ignore[override]
            found = str.find(self, text, at, end)
            Searched.searched += max(0, (min(end, len(self)) if found < 0 else found) - at)
            return found

    told: Messages = [{"role": "tool" if n % 2 else "user", "content": f'{n}\n"{"x" * 90}"'} for n in range(2_000)]
    source = "{% for m in messages %}{{ m.content | tojson if m.role == 'tool' else m.content }};{% endfor %}"
    made = chat(source)
    text = Searched(made.render(told))
    made.check(told, text)
    assert Searched.searched < 5 * len(text)


def said(*texts: str) -> Messages:
    """Messages of one role each: `s`, `u`, `a` or `t` before the text."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[text[0]], "content": text[2:]} for text in texts]


LAST_OF_NEIGHBOURS = """\
{% for m in messages %}{% if loop.last or messages[loop.index].role != m.role %}<|{{ m.role }}|>{{ m.content }}
{% endif %}{% endfor %}"""
FIRST_OF_NEIGHBOURS = """\
{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}<|{{ m.role }}|>{{ m.content }}
{% endif %}{% endfor %}"""
SYSTEM_LAST = """\
{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>
{% if loop.last %}{% for s in messages if s.role == 'system' %}{{ s.content }} {% endfor %}{% endif %}{{ m.content }}
{% endfor %}"""
SYSTEM_IN_FIRST = """\
{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>
{{ m.content }}{% if loop.first %}{% for s in messages if s.role == 'system' %} {{ s.content }}{% endfor %}{% endif %}
{% endfor %}"""


@pytest.mark.parametrize("written", ["m.content", "m.content | tojson", "m.content | indent(4)"])
@pytest.mark.parametrize(
    ("source", "told", "lost"),
    [
        (LAST_OF_NEIGHBOURS, ["u no", "u Is nothing\nwrong?"], 0),
        (LAST_OF_NEIGHBOURS, ["u 42", "u Which is larger,\n7 or 142?"], 0),
        (LAST_OF_NEIGHBOURS, ["u Go on.", "a Well.", "u Go on.", "u Go on.", "a Well."], 3),
        (FIRST_OF_NEIGHBOURS, ["u Is nothing\nwrong?", "u no", "a Nothing."], 1),
        (FIRST_OF_NEIGHBOURS, ["s Say\nno more.", "u Is it?", "u no", "a Well."], 2),
    ],
)
def test_a_text_within_another_is_not_its_own(source: str, told: list[str], lost: int, written: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"message {lost} \(user\)"):
        rendered(source.replace("m.content", written), said(*told))


@pytest.mark.parametrize("written", ["m.content", "m.content | tojson", "m.content | indent(4)"])
@pytest.mark.parametrize("source", [SYSTEM_LAST, SYSTEM_IN_FIRST])
@pytest.mark.parametrize(
    "told",
    [
        ["s Answer yes\nor no.", "u no", "a yes", "u no"],
        ["s no", "u no\nway", "a no", "u no way"],
        ["u Is it?", "a Well\n.", "s Is it? Well.", "u Is it?"],
        ["s a", "s b\na", "u a", "a b", "u b a"],
    ],
)
def test_what_the_system_says_may_be_moved(source: str, told: list[str], written: str) -> None:
    rendered(source.replace("m.content", written), said(*told))


@pytest.mark.parametrize(
    "told",
    [
        ["u How many?", "t 42", "a 42.", "u List them", "t a.py\nb.py", "a Here:\na.py\nb.py", "u Thanks"],
        ["u Read it", "t done", 't {"port": 80}', "a 80", "u Show it", 'a It is {"port": 80}', "u Thanks"],
        ["s Be kind.", "u The system says: Be kind.", "a ok", "u kind"],
    ],
)
@pytest.mark.parametrize("source", [SYSTEM_LAST, SYSTEM_IN_FIRST])
def test_what_is_quoted_later_is_found_where_it_stands_first(source: str, told: list[str]) -> None:
    """Results of tools are written as JSON, and so look otherwise than where an answer quotes them."""
    written = "(m.content | tojson if m.role == 'tool' else m.content)"
    rendered(source.replace("m.content", written), said(*told))


def test_a_switch_that_the_template_takes_out_of_a_text_is_no_loss() -> None:
    source = "{% for m in messages %}{{ m.content | replace('/no_think', '') | trim }};{% endfor %}"
    told: Messages = [{"role": "system", "content": "/no_think"}, {**USER, "content": "What /no_think is seven?"}]
    assert rendered(source, told) == ";What  is seven?;"


def test_what_only_a_conversations_length_loses_is_refused_by_name() -> None:
    answers: Messages = [USER, {"role": "assistant", "content": "8"}]
    assert "seven" in rendered(LAST_THREE, answers)
    with pytest.raises(InvalidRequest, match=r"message 0 \(user\): .* does not write its text into the prompt"):
        rendered(
            LAST_THREE, [USER, {"role": "assistant", "content": "8"}, {"role": "user", "content": "?"}, answers[1]]
        )


def test_what_template_arguments_lose_is_refused_by_name() -> None:
    source = "{% for m in messages if not (quiet is defined and m.role == 'system') %}{{ m.content }} {% endfor %}"
    told: Messages = [{"role": "system", "content": "Be brief."}, USER]
    assert rendered(source, told) == "Be brief. What is seven? "
    with pytest.raises(InvalidRequest, match=r"message 0 \(system\)"):
        rendered(source, told, quiet=True)


def test_a_history_is_checked_where_it_is_new() -> None:
    """A recorded answer is in the prompt by its ids, whatever the template would make of it now."""
    codec = families.codec("llama3_1")
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    recorded: Messages = [USER, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "call00001", "content": "Rain."}
    assert "Rain." in codec.decode(codec.bridge([1, 2], recorded, [result], TOOLS).prompt_ids)
    with pytest.raises(InvalidRequest, match=r"message 1 \(assistant\): .* the text or the calls of an answer"):
        codec.render([*recorded, result], TOOLS)


def test_a_new_message_that_the_template_moves_before_the_record_is_refused() -> None:
    source = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    codec = codecs.templated(source)
    recorded: Messages = [USER, {"role": "assistant", "content": "8"}]
    late = {"role": "system", "content": "Be brief."}
    assert codec.render([*recorded, late, USER])
    with pytest.raises(InvalidRequest, match=r"message 2 \(system\)"):
        codec.bridge(codec.render([USER]), recorded, [late, USER])


async def test_a_request_is_refused_before_its_turn() -> None:
    turns = ScriptedTurns(lambda request: Script([2]))
    system = {"role": "system", "content": "Be brief."}
    body = {"model": "policy", "messages": [system, {**system, "content": "Be kind."}, USER]}
    async with serving(turns, codecs.templated(FIRST_ONLY)) as url:
        status, error, _ = await post(url, "/v1/chat/completions", body)
    assert status == 400
    assert error["message"] == (
        "message 2 (user): this model's chat template does not write its text into the prompt (it depends on the text,"
        " the messages around it, or `chat_template_kwargs`: change one of them)"
    )
    assert not turns.requests


NO_RESULTS = {"tool", "call", "calls", "text and call", "results", "tools"}
REFUSED: dict[str, dict[str, set[str]]] = {
    "cohere": {"roles must alternate": NO_RESULTS - {"tools"} | {"second system", "late system"}},
    "cohere2": {"drops": NO_RESULTS},
    "deepseek_r1_distill": {"drops": {"second system", "text and call"}},
    "gemma": {
        "roles must alternate": NO_RESULTS - {"tools"} | {"late system"},
        "System role not supported": {"system", "second system", "tools"},
    },
    "gemma3": {"roles must alternate": NO_RESULTS - {"tools"} | {"second system", "late system"}},
    "gptoss": {"drops": {"second system", "late system", "calls", "results"}},
    "lfm2": {"drops": NO_RESULTS},
    "llama3_1": {"drops": {"text and call"}, "single tool-calls at once": {"calls", "results"}},
    "llama3_2": {"drops": {"text and call"}, "single tool-calls at once": {"calls", "results"}},
    "llava_next": {"Only user and assistant roles": NO_RESULTS - {"tools"}},
    "mistral_v3": {"cannot have both content and tool calls": {"text and call"}},
    "mistral_v11": {"Unexpected role 'system'": {"late system"}},
    "mistral_v13": {"Unexpected role 'system'": {"late system"}},
    "muse_glimmer": {"drops": {"text and call"}},
    "phi3": {"drops": NO_RESULTS},
    "phi3_5": {"drops": NO_RESULTS},
    "qwen3_5_nothink": {"must be at the beginning": {"second system", "late system"}},
    "qwen3_5_think": {"must be at the beginning": {"second system", "late system"}},
    "qwen3_6": {"must be at the beginning": {"second system", "late system"}},
    "qwen3_8": {"must be at the beginning": {"second system", "late system"}},
    "qwen3_vl": {"drops": {"second system", "late system"}},
}
"""By family and reason: the shapes that its own template refuses or drops; all others are accepted."""
PARTS = {"idefics3": 4, "smolvlm": 4, "llava_next": 3}
"""How many roles are given as parts."""


def _all() -> Iterator[tuple[str, str]]:
    for name in families.names():
        yield name.removesuffix("_training"), families.template(name)


@pytest.mark.slow
def test_every_template_is_accepted_or_refuses_for_a_named_reason() -> None:
    for name, source in _all():
        made, found = chat(source), dict[str, set[str]]()
        for shape, messages, tools in [*((n, s.messages, None) for n, s in SHAPES.items()), ("tools", [USER], TOOLS)]:
            try:
                made.check(messages, made.render(messages, tools))
            except InvalidRequest as e:
                reason = next((words for words in REFUSED.get(name, {}) if words in str(e)), str(e))
                found.setdefault(reason, set()).add(shape)
        assert found == REFUSED.get(name, {}), name
        assert list(made.probe.forms.values()).count("parts") == PARTS.get(name, 0), name


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("qwen3", ("before the last question",)),
        ("gptoss", ("before the last question",)),
        ("qwen3_8", ()),
        ("deepseekv3", ("before the last question", "beside calls since then")),
    ],
)
def test_where_a_template_drops_reasoning_by_its_own_rule_is_known(name: str, where: tuple[str, ...]) -> None:
    made = chat(families.template(name))
    assert made.probe.no_reasoning == where
    thought: Messages = [USER, {"role": "assistant", "content": "8", "reasoning_content": "Hm."}, USER]
    assert made.render(thought)
    assert made.render([USER, {"role": "assistant", "content": "<think>Hm.</think>8"}, USER])


@pytest.mark.parametrize("name", families.names())
def test_what_a_template_drops_of_longer_histories_alone_is_told(name: str) -> None:
    told = any("the text beside some calls of a longer history" in note for note in chat(families.template(name)).notes)
    assert told == (name.removesuffix("_training") in ("deepseekv3", "gptoss"))


@pytest.mark.parametrize("switch", ["/think", "/no_think", "/nothink"])
def test_a_switch_is_taken_out_wherever_the_pieces_end(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "PIECE_CHARS", 32)
    for shift in range(40):
        text = "x" * shift + switch * 5 + "/thin k\u00e9" + "\u4e2d y\U0001f600" * 9 + switch
        bare = "x" * shift + "/think\u00e9" + "\u4e2dy\U0001f600" * 9
        assert chat_module._bare(text) == bare
        assert (chat_module._json(text), chat_module._ascii_json(text)) == (
            json.dumps(text, ensure_ascii=False)[1:-1],
            json.dumps(text)[1:-1],
        )


@pytest.mark.slow
async def test_a_long_text_that_does_not_stand_there_as_it_is_holds_no_loop() -> None:
    long = "a word " * (12_000_000 // 7)
    messages: Messages = [{**USER, "content": f"{long}lost"}]
    rendered, held = f"<|im_start|>user\n{long}is  there", list[float]()
    for _ in range(4):
        async with beating() as holds:
            with pytest.raises(InvalidRequest, match="message 0"):
                await asyncio.to_thread(chat(ITERATES).check, messages, rendered)
        held.append(holds.longest_s)
        if held[-1] < HOLD_S_MAX:
            return
    raise AssertionError(held)


def test_what_a_template_drops_is_told_in_sentences() -> None:
    assert chat(families.template("qwen3")).notes == [
        "leaves out the reasoning of earlier answers before the last question"
    ]
    assert chat(families.template("qwen3_vl")).notes[-1] == (
        "drops a second system message, a system message behind the first question: requests with such are refused"
    )


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chat(ITERATES)
    renderings = list[int]()
    render = made.template.render
    monkeypatch.setattr(made.template, "render", lambda *given, **how: renderings.append(1) or render(*given, **how))
    made.render([USER])
    probing = len(renderings)
    for _ in range(3):
        made.render([USER])
    assert probing < 30
    assert len(renderings) == probing + 3
