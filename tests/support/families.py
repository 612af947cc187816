"""Codecs with the chat templates of model families over a small vocabulary with each template's special tokens.

The templates are the models' own, as TRL's package ships them, and as Mistral's package generates them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
from collections.abc import Iterator
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
    "gptoss": ["<|return|>", "<|call|>"],
}
"""By the beginning of a family's name: the end-of-sequence tokens, the tokenizer's own first."""
TOKEN = re.compile(r"<\|[A-Za-z_]+\|>|<｜[^<>]{1,40}｜>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>|</?think>|</?tool_call>")


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laminar-families-")


def names() -> list[str]:
    """Every template that there is."""
    return [*sorted(path.stem for path in _directory().glob("*.jinja")), *(f"mistral_{v}" for v in mistral.VERSIONS)]


def template(name: str) -> str:
    if name.startswith("mistral_"):
        with _skipping():
            return mistral.template(name.removeprefix("mistral_"))
    return (_directory() / f"{name}.jinja").read_text(encoding="utf-8")


def _directory() -> Path:
    with _skipping():
        return side_package.installed(LOCK) / "trl" / "chat_templates"


@contextlib.contextmanager
def _skipping() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        pytest.skip(needs(f"no templates here: {error}", "the package index (`pip config list`), then again"))


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
