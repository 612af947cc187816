"""The configuration of an embedded engine: every bound of the process, with its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gateway.core.dtypes import Dtype
from protos.errors import InvalidRequest

BLOCK_TOKENS = 16
"""Tokens in one KV block: the unit of accounting and of prefix sharing."""

INVARIANT_ROWS = 16
"""Rows of every forward pass in batch-invariant mode, in prefill and decode alike."""

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: Path
    """Directory with config.json, safetensors weights and tokenizer files."""
    served_model_name: str
    dtype: Dtype = "bfloat16"
    batch_invariant: bool = False
    """Each token's result depends on its own sequence alone, whatever else runs (slower, exact moves)."""
    max_num_seqs: int = 8
    """Sequences in one decode step; the KV workspace has this many rows."""
    kv_cache_tokens: int = 16384
    """Size of the paged KV pool, in tokens: what running sequences and the prefix cache share."""
    max_model_len: int = 2048
    """Prompt plus generated tokens of one sequence."""
    max_batched_tokens: int = 256
    """Tokens computed in one step: decode rows first, the rest is prefill."""
    max_waiting: int = 256
    """Requests that may wait for a place; the next one gets 429."""
    threads: int = 1
    device: str = "auto"
    weight_version: str = "default"
    logprobs_mode: LogprobsMode = "processed_logprobs"

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
