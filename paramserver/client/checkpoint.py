"""A checkpoint directory as something to publish: its safetensors files tensor by tensor, other files as they are.

Invariants:
- only headers are read before something is published; a tensor's bytes are read when they are due, and not kept;
- a file stays open from its header to the last byte that is read of it: whoever replaces it meanwhile changes nothing,
  and one that is written in its place is refused, so that no version has parts of two;
- nothing is unpickled: weights that are not safetensors are refused by name;
- a header that does not match its file is an error here, not at the relay.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.client.sources import FileSource, TensorSource
from paramserver.core.layout import DTYPES, HEADER_BYTES_MAX, INDEX_NAME, TensorSpec, check_text
from protos.errors import Corrupt, InvalidRequest

PLAIN_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".py"})
"""Of files that ride along: configuration, tokenizer, chat template, generation defaults, a model's own code."""
LEFT_BEHIND = frozenset({"trainer_state.json", "adapter_config.json"})
"""A trainer's own state, and what makes `from_pretrained` look for an adapter: engines have no use for it."""
WEIGHTS_NAME = "model.safetensors"
NO_WEIGHTS = ("adapter_", "optimizer", "scheduler", "rng_state", "random_states")
"""Beginnings of safetensors files that hold no weights of the model: of an adapter, or a trainer's own state."""
_NUMBERED = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")

Files = Path | str | Mapping[str, bytes | str | Path]
"""Plain files: those of a directory, or each by its name, as bytes, text, or the path of a file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint directory in the order of their names, and its headers' metadata.

    `left_behind`: safetensors files that are none of its weights.
    """

    directory: Path
    tensors: tuple[TensorSource, ...]
    metadata: Mapping[str, str]
    left_behind: tuple[str, ...] = ()

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


class _OpenFile:
    """A regular file, open until nobody reads it any more. Raises InvalidRequest for one that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}", hint="give a readable file") from error
        self._found = os.fstat(self._fd)
        if not stat.S_ISREG(self._found.st_mode):
            raise InvalidRequest(f"{path} is no regular file", hint="give a file, not a device, pipe or directory")

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def size_bytes(self) -> int:
        return self._found.st_size

    def read(self, start: int, num_bytes: int) -> memoryview:
        """InvalidRequest when the file was written since it was opened."""
        data = memoryview(bytearray(num_bytes))
        at = 0
        try:
            while at < num_bytes and (num := os.preadv(self._fd, [data[at:]], start + at)):
                at += num
        except OSError as error:
            raise InvalidRequest(f"{self._path} cannot be read: {error.strerror}", hint="see the disk") from error
        now = os.fstat(self._fd)
        if at < num_bytes or (now.st_size, now.st_mtime_ns) != (self._found.st_size, self._found.st_mtime_ns):
            raise self._changed()
        return data

    def check_path(self) -> None:
        """InvalidRequest when another file stands at its path by now."""
        try:
            there = self._path.stat()
        except OSError as error:
            raise self._changed() from error
        if not os.path.samestat(there, self._found):
            raise self._changed()

    def _changed(self) -> InvalidRequest:
        return InvalidRequest(f"{self._path} changed while it was read", hint="publish it once nobody writes it")


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """The headers of a directory's weights: `model.safetensors`, the files that its index names, or a set of numbered
    files, or the only one that there is; adapters and a trainer's own state stay behind.

    Raises InvalidRequest when there are none, when it is not clear which they are, and for what cannot be read;
    Corrupt for a damaged one.
    """
    directory = Path(directory)
    names, opened = _weight_files(directory)
    files = {name: _OpenFile(directory / name) for name in names}
    tensors: dict[str, TensorSource] = {}
    metadata: dict[str, str] = {}
    for name, file in files.items():
        for source in _read_head(directory / name, file, metadata):
            if source.name in tensors:
                raise InvalidRequest(
                    f"tensor {source.name!r} stands in two files of {directory}", hint=f"add an {INDEX_NAME}"
                )
            tensors[source.name] = source
    for file in (*opened, *files.values()):  # else some may be of one save, and some of the next
        file.check_path()
    left = tuple(sorted({path.name for path in directory.glob("*.safetensors")} - set(names)))
    return Checkpoint(directory, tuple(tensors[name] for name in sorted(tensors)), metadata, left)


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
    check_text("a file's name", name)
    match content:
        case Path():
            file = _OpenFile(content)
            return FileSource(name, file.size_bytes, lambda: file.read(0, file.size_bytes))
        case str():
            check_text(f"the content of {name!r}", content)
            content = content.encode()
        case bytes() | bytearray() | memoryview():
            content = bytes(content)
        case _:
            raise InvalidRequest(
                f"files has a {type(content).__name__} for {name!r}", hint="give bytes, text, or the Path of a file"
            )
    data = memoryview(content)
    return FileSource(name, len(data), lambda: data)


def _weight_files(directory: Path) -> tuple[list[str], list[_OpenFile]]:
    """The names of the files with weights, and what was opened to find them."""
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is no directory", hint="give a directory with *.safetensors files")
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if (directory / INDEX_NAME).exists():
        index = _OpenFile(directory / INDEX_NAME)
        names = _indexed(directory / INDEX_NAME, bytes(index.read(0, index.size_bytes)))
        if WEIGHTS_NAME in found and WEIGHTS_NAME not in names:
            raise InvalidRequest(
                f"{directory} holds {WEIGHTS_NAME}, and an {INDEX_NAME} of others: libraries load either",
                hint="remove the one that is out of date",
            )
        return names, [index]
    if WEIGHTS_NAME in found:
        return [WEIGHTS_NAME], []
    weights = [name for name in found if not name.startswith(NO_WEIGHTS)]
    if not weights:
        others = itertools.chain(found, (path.name for kind in ("*.bin", "*.pt*") for path in directory.glob(kind)))
        other = next(others, None)
        raise InvalidRequest(
            f"{directory} holds no *.safetensors file with weights{f', only {other}' if other else ''}",
            hint="save it with model.save_pretrained(directory), which writes safetensors; an adapter is published "
            "merged, as merge_and_unload() makes it",
        )
    if not _are_whole(weights):
        raise InvalidRequest(
            f"{directory} holds {', '.join(weights[:3])}{', ...' if len(weights) > 3 else ''}, and neither "
            f"{WEIGHTS_NAME} nor an {INDEX_NAME} says which are the model's",
            hint=f"add an {INDEX_NAME}, or move the others away",
        )
    return weights, []


def _are_whole(names: Sequence[str]) -> bool:
    """Whether it is one file, or NAME-00001-of-00003.safetensors and so on to the last of them."""
    first = _NUMBERED.fullmatch(names[0])
    if first is None:
        return len(names) == 1
    count = int(first[2])
    return names == [f"{first[1]}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _indexed(path: Path, content: bytes) -> list[str]:
    try:
        names = sorted(set(json.loads(content)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path} is no index of safetensors files: {error!r}") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise Corrupt(f"{path} names files outside of its directory")
    return names


def _read_head(path: Path, file: _OpenFile, metadata: dict[str, str]) -> list[TensorSource]:
    try:
        (length,) = struct.unpack("<Q", file.read(0, min(8, file.size_bytes)))
        if length > min(HEADER_BYTES_MAX, file.size_bytes - 8):
            raise Corrupt(f"{path} is no safetensors file: its header would take {length} bytes")
        entries = json.loads(bytes(file.read(8, length)))
        metadata.update(entries.pop("__metadata__", None) or {})
        return [_source(path, file, 8 + length, name, entry) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise Corrupt(f"{path} is no safetensors file: {error!r}") from error


def _source(path: Path, file: _OpenFile, start: int, name: str, entry: dict[str, Any]) -> TensorSource:
    dtype, shape, (low, high) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise InvalidRequest(f"tensor {name!r} of {path} is {dtype}", hint=f"supported: {', '.join(DTYPES)}")
    spec = TensorSpec(name, str(dtype), shape)
    if not 0 <= low <= high <= file.size_bytes - start or high - low != spec.size_bytes:
        raise Corrupt(f"tensor {name!r} of {path}: bytes {low} to {high} are not {dtype} {list(shape)}")
    return TensorSource(name, spec.dtype, shape, lambda: file.read(start + low, high - low))
