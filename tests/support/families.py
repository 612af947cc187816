"""Codecs with the chat templates of model families over a small vocabulary with each template's special tokens.

The templates are the models' own, as TRL's package ships them. Mistral's is written after its documentation, because no
package ships one."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken

from gateway.tokens import Codec
from gateway.tokens.toolformats import MARKERS
from tests.support import side_package
from tests.support.codecs import byte_level
from tests.support.skips import needs

LOCK = Path(__file__).with_name("templates.lock")
ENDS = {
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "glm": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "mistral": ["</s>"],
}
"""By the beginning of a family's name: the end-of-sequence tokens, the tokenizer's own first."""
TOKEN = re.compile(r"<\|[A-Za-z_]+\|>|<｜[^<>]{1,40}｜>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>|</?think>|</?tool_call>")

MISTRAL = """\
{{- bos_token }}
{%- if tools is not none %}{{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.role == "assistant" and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("Tool call IDs have 9 characters") }}{%- endif %}
            {{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "assistant" %}{{- message.content + eos_token }}
    {%- elif message.role == "tool" %}{{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
    {%- elif message.role == "system" %}{{- "[SYSTEM_PROMPT]" + message.content + "[/SYSTEM_PROMPT]" }}
    {%- endif %}
{%- endfor %}
{#- [THINK] and [/THINK] stand around the reasoning of those that reason -#}
"""


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laminar-families-")


def template(name: str) -> str:
    if name == "mistral":
        return MISTRAL
    try:
        directory = side_package.installed(LOCK)
    except RuntimeError as error:
        pytest.skip(needs(f"no templates here: {error}", "the package index (`pip config list`), then again"))
    return (directory / "trl" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def codec(name: str) -> Codec:
    source = template(name)
    ends = next(tokens for family, tokens in ENDS.items() if name.startswith(family))
    special = list(dict.fromkeys([*ends, "<s>", *TOKEN.findall(source)]))
    tokenizer = byte_level(tuple(special))
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKERS if token in source])
    directory = Path(_scratch().name) / name
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": ends[0], "chat_template": source}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [tokenizer.token_to_id(token) for token in ends]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return Codec.load(directory)
