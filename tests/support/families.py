"""Codecs with the chat templates of model families over a small vocabulary with each template's special tokens.

The templates are the models' own, as TRL's package ships them, and as Mistral's package generates them."""

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
from tests.support import mistral, side_package
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


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laminar-families-")


def template(name: str) -> str:
    try:
        if name.startswith("mistral_"):
            return mistral.template(name.removeprefix("mistral_"))
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
