"""Codecs for tests: the tiny model's, one with Llama 3's template, one SentencePiece-like; SmolLM2's where cached."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.tokens import Codec

SMOLLM2 = Path(os.environ.get("LAMINAR_CACHE", Path.home() / ".cache/laminar-rl")) / "models/smollm2-135m-instruct"

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}
{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Llama 3.1's template without its built-in tools."""

LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)

_CORPUS = """\
A session stays on one version of the weights. What is 12 plus 30? The answer is 42; call the calculator to be sure.
system user assistant ipython {"name": "add", "parameters": {"a": 1, "b": 2}} Cutting Knowledge Date: December 2023
"""


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laminar-codec-")


def smollm2() -> Codec:
    """The demo's tokenizer; skips where `make demo` has not fetched it."""
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip(f"no SmolLM2 tokenizer at {SMOLLM2}: `make demo` fetches it")
    return _load(SMOLLM2)


@functools.cache
def _load(directory: Path) -> Codec:
    return Codec.load(directory)


def tiny() -> Codec:
    """The tiny model's ChatML codec, with tools in its template."""
    from tests.support.tiny_model import tiny_model  # brings torch

    return _load(tiny_model())


@functools.cache
def llama3() -> Codec:
    """Llama 3.1's template and special tokens over a small byte-level vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(LLAMA3_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return _write(
        "llama3",
        tokenizer,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3_TEMPLATE},
        [LLAMA3_SPECIAL.index("<|eot_id|>"), LLAMA3_SPECIAL.index("<|eom_id|>")],
    )


@functools.cache
def sentencepiece() -> Codec:
    """Metaspace and byte fallback, as Llama 2 and Mistral have them: text depends on a token's neighbours."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁a",
        "n",
        "s",
        "w",
        "er",
    ]
    pieces += sorted(set("abcdefghijklmnopqrstuvwxyz.,!?") - set(pieces))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    return _write("sentencepiece", tokenizer, {"eos_token": "</s>", "chat_template": template}, 2)


def _write(name: str, tokenizer: Tokenizer, config: dict[str, str], eos: int | list[int]) -> Codec:
    directory = Path(_scratch().name) / name
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return Codec.load(directory)
