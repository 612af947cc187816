"""Loading a model directory, and rendering as `transformers` renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tokens import Codec
from gateway.tokens.template import ChatTemplate
from protos.errors import InvalidRequest, UnsupportedField
from tests.support import codecs
from tests.support.tiny_model import tiny_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"é": {}}}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+3?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "5"},
]


def test_a_vocabulary_is_told_from_another(tmp_path: Path) -> None:
    one = codecs.tiny().vocabulary
    written = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(written, indent=3))
    assert Codec.load(tmp_path).vocabulary == one, "however its file is written"
    assert codecs.sentencepiece().vocabulary != one


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(tools: list[dict[str, Any]] | None, add_generation_prompt: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_tokenizer())
    expected = theirs.apply_chat_template(
        CHAT, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    assert codecs.tiny().render(CHAT, tools, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.slow
def test_smollm2_renders_as_transformers() -> None:
    from transformers import AutoTokenizer

    codec = codecs.smollm2()
    theirs = AutoTokenizer.from_pretrained(codecs.SMOLLM2)
    chat = CHAT[:2]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert codec.render(chat) == expected
    assert codec.eos_ids == {2}
    assert codec.turn_end_ids == {2}
    assert codec.context_tokens == 8192


def test_a_template_without_tools_gets_them_in_its_system_message() -> None:
    codec = codecs.smollm2()
    text = codec.render_text(CHAT, TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>' in text
    assert codec.render_text(CHAT[1:2], TOOLS).startswith("<|im_start|>system\n# Tools")


def test_tool_formats_are_read_off_the_template() -> None:
    assert codecs.tiny().tool_format == "hermes"
    assert codecs.llama3().tool_format == "llama"
    assert codecs.sentencepiece().tool_format == "hermes"


def test_token_bytes_are_what_a_token_says() -> None:
    for codec in (codecs.tiny(), codecs.sentencepiece()):
        ids = codec.encode("new é")
        assert b"".join(codec.token_bytes(i) for i in ids).decode().strip() == "new é"


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    codec = codecs.llama3()
    calls = [{"function": {"name": "a", "arguments": {}}}] * 2
    with pytest.raises(InvalidRequest, match="single tool-calls"):
        codec.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}])
    with pytest.raises(InvalidRequest, match="line 1"):
        ChatTemplate("{% if %}", {})


def test_the_sandbox_keeps_templates_from_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequest):
        template.render([], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, r"no tokenizer\.json"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "not JSON"),
        ({"tokenizer.json": None, "config.json": "[]"}, "JSON object"),
    ],
)
def test_a_bad_directory_is_named(tmp_path: Path, files: dict[str, str | None], error: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text((tiny_tokenizer() / name).read_text() if text is None else text)
    with pytest.raises(InvalidRequest, match=error):
        Codec.load(tmp_path)


def test_older_ways_to_write_the_configs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_tokenizer() / "tokenizer.json").read_text())
    template = "{{ bos_token }}{{ messages[0].content }}"
    config: dict[str, Any] = {
        "bos_token": {"content": "<|im_start|>"},
        "chat_template": [{"name": "default", "template": template}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    codec = Codec.load(tmp_path)
    assert codec.render_text([{"role": "user", "content": "x"}]) == "<|im_start|>x"
    assert codec.context_tokens is None


def test_no_template_no_chat(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_tokenizer() / "tokenizer.json").read_text())
    with pytest.raises(UnsupportedField, match="no chat template"):
        Codec.load(tmp_path).render([{"role": "user", "content": "x"}])


def model_directory(directory: Path, files: dict[str, Any]) -> Path:
    (directory / "tokenizer.json").write_text((tiny_tokenizer() / "tokenizer.json").read_text())
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


PLAIN, WITH_TOOLS = "plain {{ messages | tojson }}", "{{ tools | tojson }} {{ messages | tojson }}"
LISTED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": LISTED}},
        {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": WITH_TOOLS},
        {
            "tokenizer_config.json": {"chat_template": LISTED[:1]},
            "additional_chat_templates/tool_use.jinja": WITH_TOOLS,
        },
        {"chat_template.json": {"chat_template": LISTED}},
    ],
)
def test_requests_with_tools_have_the_template_for_tools(tmp_path: Path, files: dict[str, Any]) -> None:
    codec = Codec.load(model_directory(tmp_path, files))
    assert codec.render_text(CHAT, TOOLS).startswith('[{"type": "function"')
    assert codec.render_text(CHAT).startswith("plain")


def test_a_processors_template_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    files: dict[str, Any] = {"chat_template.json": {"chat_template": "a processor's"}}
    assert Codec.load(model_directory(tmp_path, files)).render_text([]) == "a processor's"
    files["tokenizer_config.json"] = {"chat_template": "the tokenizer's"}
    assert Codec.load(model_directory(tmp_path, files)).render_text([]) == "the tokenizer's"
    files["chat_template.jinja"] = "a file"
    assert Codec.load(model_directory(tmp_path, files)).render_text([]) == "a file"


def test_a_template_for_tools_alone_says_so(tmp_path: Path) -> None:
    codec = Codec.load(model_directory(tmp_path, {"tokenizer_config.json": {"chat_template": LISTED[1:]}}))
    assert codec.render_text(CHAT, TOOLS)
    with pytest.raises(UnsupportedField, match="for requests with `tools` alone"):
        codec.render_text([])


@pytest.mark.parametrize("part", [None, "text_config", "llm_config", "language_config"])
def test_a_text_models_own_part_of_the_config_is_read(tmp_path: Path, part: str | None) -> None:
    config: dict[str, Any] = {"vocab_size": 1000, "max_position_embeddings": 4096, "eos_token_id": [2, 7]}
    config = config if part is None else {"model_type": "some", "vocab_size": None, part: config}
    codec = Codec.load(model_directory(tmp_path, {"config.json": config}))
    assert (codec.vocab_size, codec.context_tokens, codec.eos_ids) == (1000, 4096, {2, 7})
