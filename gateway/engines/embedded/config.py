"""The configuration of an embedded engine: every bound of the process, with its meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec

from gateway.core.dtypes import Dtype
from protos.access.listening import INSECURE
from protos.errors import InvalidRequest
from protos.options import Flag
from protos.telemetry.options import TelemetryConfig

BLOCK_TOKENS = 16
"""Tokens in one KV block: the unit of accounting and of prefix sharing."""

INVARIANT_ROWS = 16
"""Rows of every forward pass in batch-invariant mode, in prefill and decode alike."""

AT_LEAST_ONE = msgspec.Meta(ge=1)

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of `gateway engine`, in the order of its help."""

    model: Annotated[
        Path,
        click.Path(exists=True, file_okay=False, path_type=Path),
        "Model directory (Llama or Qwen2 family): config.json, *.safetensors, tokenizer.json.",
    ]
    served_model_name: Annotated[str, "Name that requests use."] = "policy"
    dtype: Annotated[
        Dtype,
        Flag(type=click.Choice(["float32", "bfloat16", "auto"])),
        "float32 gives the greedy output of transformers; bfloat16 is faster where the processor has instructions for "
        "it, and slower where it has not. auto: measured before it serves (`gateway engine-dtype` shows it). Give all "
        "engines of a fleet the same one: a greedy turn that moves between two is not the unmoved turn.",
    ] = "bfloat16"
    batch_invariant: Annotated[
        bool,
        "A token's result depends on its own sequence alone, so a moved turn equals the unmoved one exactly. Slower.",
    ] = False
    max_num_seqs: Annotated[int, AT_LEAST_ONE, "Sequences that decode together."] = 8
    """The KV workspace has this many rows."""
    kv_cache_tokens: Annotated[int, AT_LEAST_ONE, "Size of the KV pool, in tokens."] = 16384
    """Running sequences and the prefix cache share it."""
    max_model_len: Annotated[int, AT_LEAST_ONE, "Prompt plus generated tokens of a request."] = 2048
    max_batched_tokens: Annotated[int, AT_LEAST_ONE, "Tokens computed in one step."] = 256
    """Decode rows first; the rest is prefill."""
    max_waiting: Annotated[int, AT_LEAST_ONE, "Requests that may queue; beyond: 429."] = 256
    threads: Annotated[int, AT_LEAST_ONE, "Processor threads of the model."] = 1
    weight_version: Annotated[str, "Label of the weights in --model."] = "default"
    logprobs_mode: Annotated[
        LogprobsMode, "Processed: after temperature, top-k and top-p, the distribution really sampled from."
    ] = "processed_logprobs"
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: the GPU when there is one."] = "auto"
    insecure: Annotated[bool, INSECURE] = False
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    @property
    def num_blocks(self) -> int:
        return self.kv_cache_tokens // BLOCK_TOKENS

    def check(self) -> EngineConfig:
        """Returns self, or raises InvalidRequest naming the first bound that cannot hold."""
        for name in (
            "max_num_seqs",
            "kv_cache_tokens",
            "max_model_len",
            "max_batched_tokens",
            "max_waiting",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", hint="it must be at least 1")
        if self.num_blocks * BLOCK_TOKENS < self.max_model_len:
            raise InvalidRequest(
                f"kv_cache_tokens {self.kv_cache_tokens} cannot hold a sequence of max_model_len {self.max_model_len}",
                hint=f"raise --kv-cache-tokens to {-(-self.max_model_len // BLOCK_TOKENS) * BLOCK_TOKENS}"
                " or lower --max-model-len",
            )
        if self.max_batched_tokens < self.max_num_seqs:
            raise InvalidRequest(
                f"max_batched_tokens {self.max_batched_tokens} is below max_num_seqs {self.max_num_seqs}",
                hint="one step must hold a token of every running sequence",
            )
        return self
