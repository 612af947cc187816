"""Tiny random models for tests: a whole model directory (0.4 M parameters, 512 tokens) in milliseconds, no download.

Invariants:
- the same arguments give the same bytes, in every process;
- the directory is what `transformers` and vLLM load: config, safetensors weights, tokenizer with a ChatML template
  that knows tools (Hermes style `<tool_call>`), generation defaults;
- weights are drawn wide enough that greedy output is varied and argmax has no near ties.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:  # who wants weights brings it in; workers of `make quick` import this file, and need not
    import torch

Family = Literal["llama", "qwen2"]
Dtype = Literal["float32", "bfloat16"]

HIDDEN = 64
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
VLLM_HEAD_DIM = 32  # the least that vLLM's attention on CPUs has
INTERMEDIATE = 320
VOCAB = 512
CONTEXT = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_MARKS = ("<tool_call>", "</tool_call>")
EOS_ID = 2

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these tools:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_CORPUS = """\
The trainer makes new weights every few minutes and a fleet of engines generates trajectories with them. A relay on \
every host keeps the versions in memory; the trainer hands a version to one relay and goes on training at once. Each \
engine loads the newest version when it is free, and nobody waits for anybody else. A session stays on one version of \
the weights from its first token to its last. When the engine under it dies, the turn goes on elsewhere from what was \
generated, and the client sees nothing but a pause. What is the sum of 12 and 30? The sum of 12 and 30 is 42. What is \
7 times 8, plus 5? First call the calculator with the expression, then read the result and answer with the number. \
{"name": "calculator", "arguments": {"expression": "7 * 8 + 5"}} {"type": "function", "function": {"name": "add"}} \
You are a helpful assistant. Please answer the question in a short sentence, and say so if you do not know. I think \
that this should be the right answer, because one hundred and twenty is larger than ninety. There were three red boxes \
and five blue boxes on the table; how many boxes were there in all? user assistant system tool content role message.
"""


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laminar-tiny-")  # removed when the test process ends


def tiny_model(family: Family = "llama", dtype: Dtype = "float32", seed: int = 0, *, head_dim: int = HEAD_DIM) -> Path:
    """A model directory, made once per test process. Treat it as read-only."""
    directory = Path(_scratch().name) / f"{family}-{dtype}-{seed}-{head_dim}"
    return directory if directory.exists() else write_tiny_model(directory, family, dtype, seed, head_dim)


def tiny_tokenizer() -> Path:
    """What a gateway needs of the model, its config and tokenizer: no weights, so nothing imports torch."""
    directory = Path(_scratch().name) / "tokenizer"
    if not directory.exists():
        _write_description(directory, "llama", "float32", HEAD_DIM)
    return directory


def tiny_snapshot(family: Family = "llama", dtype: Dtype = "float32", seed: int = 1) -> Path:
    """A weights-only directory, as a relay hands it out; `seed` stands for the version."""
    directory = Path(_scratch().name) / f"snapshot-{family}-{dtype}-{seed}"
    if not directory.exists():
        directory.mkdir()
        write_weights(directory, family, dtype, seed)
    return directory


def write_tiny_model(directory: Path, family: Family, dtype: Dtype, seed: int, head_dim: int = HEAD_DIM) -> Path:
    """Writes config, weights and tokenizer into `directory` (created) and returns it."""
    _write_description(directory, family, dtype, head_dim)
    write_weights(directory, family, dtype, seed, head_dim)
    return directory


def _write_description(directory: Path, family: Family, dtype: Dtype, head_dim: int) -> None:
    directory.mkdir(parents=True)
    _write_json(directory / "config.json", config(family, dtype, head_dim))
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": 0})
    write_tokenizer(directory)


def config(family: Family, dtype: Dtype, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """config.json of the tiny model; Qwen2 has biases on q, k and v and tied embeddings, Llama neither."""
    return {
        "architectures": ["LlamaForCausalLM" if family == "llama" else "Qwen2ForCausalLM"],
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "tie_word_embeddings": family == "qwen2",
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "dtype": dtype,
    }


def tensor_shapes(family: Family, head_dim: int = HEAD_DIM) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows * head_dim, HIDDEN)
            if family == "qwen2":
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows * head_dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * head_dim)
        shapes[f"{at}.mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    shapes["model.norm.weight"] = (HIDDEN,)
    if family == "llama":
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return shapes


def weights(family: Family, dtype: Dtype, seed: int, head_dim: int = HEAD_DIM) -> dict[str, torch.Tensor]:
    """Random tensors; norms near one, matrices scaled so that activations and logits keep a healthy spread."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise: torch.Tensor = torch.randn(shape, generator=generator)
        if "norm" in name:
            return noise.mul(0.1).add(1.0)
        if len(shape) == 1 or "embed_tokens" in name:
            return 0.3 * noise
        return noise * (1.5 / math.sqrt(shape[1]))

    shapes = tensor_shapes(family, head_dim)
    return {name: draw(name, shape).to(getattr(torch, dtype)) for name, shape in shapes.items()}


def write_weights(directory: Path, family: Family, dtype: Dtype, seed: int, head_dim: int = HEAD_DIM) -> None:
    """model.safetensors of `weights(...)`."""
    from safetensors.torch import save_file

    save_file(weights(family, dtype, seed, head_dim), directory / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja of the 512-token byte-level BPE."""
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(TOOL_MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in TOOL_MARKS])
    assert tokenizer.get_vocab_size() == VOCAB, f"the corpus is too short: {tokenizer.get_vocab_size()} tokens"
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
