"""Weights of the stand-in: nothing but the digest of every tensor's name and bytes, and what follows from it."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.sglang.wire import Refused

FIRST_ID = 3
"""Below are special tokens; the stand-in never ends a turn by itself."""
SAID_IDS = 500


def next_token(weights: str, kv: str, ids: Sequence[int]) -> tuple[int, float]:
    """Id and logprob after `ids`; `kv` are the weights under which the context was computed."""
    mark = zlib.crc32(array("q", ids).tobytes(), zlib.crc32(f"{weights}/{kv}".encode()))
    return FIRST_ID + mark % SAID_IDS, -(mark % 1021) / 256


def said(weights: str, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Ids and logprobs that follow `prompt` under one version."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        token, logprob = next_token(weights, weights, ids)
        ids.append(token)
        logprobs.append(logprob)
    return ids[len(prompt) :], logprobs


def digest_of(tensors: Iterable[tuple[str, bytes]]) -> str:
    marks = sorted(hashlib.sha256(name.encode() + b"=" + data).hexdigest() for name, data in tensors)
    return hashlib.sha256("".join(marks).encode()).hexdigest()[:16]


def files_of(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise Refused(f"Cannot find any model weights with `{path}`")
    return files


def read_directory(path: Path) -> str:
    """The digest of a directory of safetensors files. ValueError when any is torn, though others were taken by then."""
    return digest_of(tensor for file in files_of(path) for tensor in _tensors(file))


def _tensors(file: Path) -> Iterable[tuple[str, bytes]]:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as e:
        raise ValueError(f"{file.name}: invalid safetensors header: {e}") from e
    header.pop("__metadata__", None)
    if 8 + size + max((t["data_offsets"][1] for t in header.values()), default=0) != len(data):
        raise ValueError(f"{file.name}: incomplete safetensors file")
    for name, tensor in header.items():
        start, end = (8 + size + offset for offset in tensor["data_offsets"])
        yield name, data[start:end]


class Model:
    """What a custom weight loader is given; keeps the digest of what it was handed."""

    def __init__(self) -> None:
        self.digest = ""
        self.get_weights_by_name: Callable[..., Any] = lambda name, *_, **__: None

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        import torch

        self.digest = digest_of((n, t.contiguous().flatten().view(torch.uint8).numpy().tobytes()) for n, t in weights)


class _Allowed(pickle.Unpickler):
    """As SGLang's: an allow-list of globals. Here one constructor is all of it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("torch", "ByteTensor"):
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


def read_pushed(serialized: str) -> list[tuple[str, Any]]:
    """One entry of `serialized_named_tensors`, by the allow-list. Raises whatever is wrong with it."""
    named: list[tuple[str, Any]] = _Allowed(io.BytesIO(base64.b64decode(serialized, validate=True))).load()
    return named


def load_custom(loader: str, serialized: str, model: Model) -> None:
    """Runs a custom weight loader on one rank's tensors, as every rank does; `model` keeps what it was handed."""
    module, _, name = loader.rpartition(".")
    getattr(importlib.import_module(module), name)(model, read_pushed(serialized))
