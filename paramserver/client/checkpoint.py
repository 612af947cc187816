"""A checkpoint directory as something to publish: its safetensors files tensor by tensor, other files as they are.

Invariants:
- only headers are read before something is published; a tensor's bytes are read when they are due, and not kept;
- nothing is unpickled: weights that are not safetensors are refused by name;
- a header that does not match its file is an error here, not at the relay.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.client.sources import FileSource, TensorSource
from paramserver.core.layout import DTYPES, HEADER_BYTES_MAX, INDEX_NAME, TensorSpec
from protos.errors import Corrupt, InvalidRequest, Unavailable

PLAIN_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".py"})
"""Of files that ride along: configuration, tokenizer, chat template, generation defaults, a model's own code."""
LEFT_BEHIND = frozenset({"trainer_state.json"})
"""A trainer's own state: engines have no use for it."""

Files = Path | str | Mapping[str, bytes | str | Path]
"""Plain files: those of a directory, or each by its name, as bytes, text, or the path of a file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint directory in the order of their names, and its headers' metadata."""

    directory: Path
    tensors: tuple[TensorSource, ...]
    metadata: Mapping[str, str]

    @property
    def ties_embeddings(self) -> bool:
        """Whether its config.json says that the head is the embedding."""
        try:
            config = json.loads((self.directory / "config.json").read_bytes())
        except FileNotFoundError:
            return False
        except ValueError as error:
            raise Corrupt(f"{self.directory / 'config.json'} is no JSON: {error}") from error
        parts = [config, *(config.get(key) for key in ("text_config", "llm_config"))]
        return any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in parts)


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """The headers of a directory's safetensors files: those that its index names, else all.

    Raises InvalidRequest when there are none, Corrupt for a damaged one, Unavailable when it cannot be read.
    """
    directory = Path(directory)
    tensors: dict[str, TensorSource] = {}
    metadata: dict[str, str] = {}
    for path in _weight_files(directory):
        for source in _read_head(path, metadata):
            if source.name in tensors:
                raise InvalidRequest(
                    f"tensor {source.name!r} stands in two files of {directory}", hint=f"add an {INDEX_NAME}"
                )
            tensors[source.name] = source
    return Checkpoint(directory, tuple(tensors[name] for name in sorted(tensors)), metadata)


def plain_files(files: Files) -> tuple[FileSource, ...]:
    """The plain files to publish. Of a directory: those with PLAIN_SUFFIXES, but no weights and no subdirectories."""
    if isinstance(files, Mapping):
        return tuple(_plain(name, content) for name, content in files.items())
    directory = Path(files)
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is no directory", hint="give a model directory, or {name: content}")
    found = sorted(path for path in directory.iterdir() if path.suffix in PLAIN_SUFFIXES and path.is_file())
    return tuple(
        _plain(path.name, path)
        for path in found
        if path.name not in LEFT_BEHIND and not path.name.endswith(".index.json") and not path.name.startswith(".")
    )


def _plain(name: str, content: bytes | str | Path) -> FileSource:
    if isinstance(content, Path):
        try:
            size = content.stat().st_size
        except OSError as error:
            raise InvalidRequest(
                f"{content} cannot be read: {error.strerror}", hint="give the path of a file"
            ) from error
        return FileSource(name, size, _reader(content, 0, size))
    data = content.encode() if isinstance(content, str) else bytes(content)
    return FileSource(name, len(data), lambda: memoryview(data))


def _weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is no directory", hint="give a directory with *.safetensors files")
    index = directory / INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"{index} is no index of safetensors files: {error!r}") from error
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise Corrupt(f"{index} names files outside of its directory")
        return [directory / name for name in names]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        other = next((path.name for path in itertools.chain(directory.glob("*.bin"), directory.glob("*.pt*"))), None)
        raise InvalidRequest(
            f"{directory} holds no *.safetensors file{f', only {other}' if other else ''}",
            hint="save it with model.save_pretrained(directory), which writes safetensors",
        )
    return found


def _read_head(path: Path, metadata: dict[str, str]) -> list[TensorSource]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(HEADER_BYTES_MAX, size - 8):
                raise Corrupt(f"{path} is no safetensors file: its header would take {length} bytes")
            entries = json.loads(file.read(length))
            metadata.update(entries.pop("__metadata__", None) or {})
            return [_source(path, 8 + length, size, name, entry) for name, entry in entries.items()]
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise Corrupt(f"{path} is no safetensors file: {error!r}") from error


def _source(path: Path, start: int, size: int, name: str, entry: dict[str, Any]) -> TensorSource:
    dtype, shape, (low, high) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise InvalidRequest(f"tensor {name!r} of {path} is {dtype}", hint=f"supported: {', '.join(DTYPES)}")
    spec = TensorSpec(name, str(dtype), shape)
    if not 0 <= low <= high <= size - start or high - low != spec.size_bytes:
        raise Corrupt(f"tensor {name!r} of {path}: bytes {low} to {high} are not {dtype} {list(shape)}")
    return TensorSource(name, spec.dtype, shape, _reader(path, start + low, high - low))


def _reader(path: Path, start: int, num_bytes: int) -> Callable[[], memoryview]:
    def read() -> memoryview:
        data = memoryview(bytearray(num_bytes))
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                at = 0
                while at < num_bytes and (num := file.readinto(data[at:])):
                    at += num
        except OSError as error:
            raise Unavailable(f"{path} cannot be read: {error.strerror}") from error
        if at < num_bytes:
            raise Corrupt(f"{path} ends {num_bytes - at} bytes too soon", hint="it changed while it was published")
        return data

    return read
