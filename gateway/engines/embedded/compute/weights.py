"""A snapshot: a directory of safetensors files, checked whole before any tensor of it is used.

Works on a model directory and on a relay's snapshot (weights only). Nothing is unpickled: `.bin` files are ignored.
Tensors are views of mapped files: copy one that has to outlive the open snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protos.errors import Corrupt, InvalidRequest, NotFound

FLOAT_DTYPES = ("F32", "BF16", "F16")
"""Each is converted to the engine's own dtype."""

INDEX = "model.safetensors.index.json"
NAMES_SHOWN = 3


class Snapshot:
    """An open snapshot; a context manager, `snapshot[name]` maps one tensor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for path in _files(directory):
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
                self._file_of.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as e:
            self._stack.close()
            raise InvalidRequest(f"{directory} has an unreadable safetensors file: {e}") from e

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        except SafetensorError as e:
            raise Corrupt(f"{name} in {self.directory} cannot be read: {e}") from e
        return tensor

    def check(self, layout: Mapping[str, tuple[int, ...]], *, ignored: frozenset[str] = frozenset()) -> None:
        """InvalidRequest unless the names are exactly `layout`'s (and `ignored` ones), with its shapes and floats."""
        names = set(self._file_of)
        if missing := sorted(layout.keys() - names):
            raise InvalidRequest(f"{self.directory} lacks {_some(missing)}", hint="publish every tensor of the model")
        if unknown := sorted(names - layout.keys() - ignored):
            raise InvalidRequest(
                f"{self.directory} holds {_some(unknown)}, which this model does not have",
                hint="publish the tensors of the served model, by their checkpoint names",
            )
        for name, shape in layout.items():
            view = self._file_of[name].get_slice(name)
            if tuple(view.get_shape()) != shape:
                raise InvalidRequest(
                    f"{name} in {self.directory} has shape {list(view.get_shape())}",
                    hint=f"the model has {list(shape)}",
                )
            if view.get_dtype() not in FLOAT_DTYPES:
                raise InvalidRequest(
                    f"{name} in {self.directory} has dtype {view.get_dtype()}", hint=f"one of {', '.join(FLOAT_DTYPES)}"
                )

    def check_tied(self, head: str, embeddings: str) -> None:
        """InvalidRequest when there is a `head` of its own that is not the `embeddings`, which the model computes with.

        Some writers store a tied head twice: that is the same tensor, and no contradiction.
        """
        if head in self._file_of and not torch.equal(self[head], self[embeddings]):
            raise InvalidRequest(
                f"{head} in {self.directory} differs from {embeddings}, which this model uses in its place",
                hint="its config.json has tie_word_embeddings: tie them in the trainer too, or serve an untied config",
            )


def _files(directory: Path) -> list[Path]:
    """The weight files: those that the index names, or every *.safetensors when there is none."""
    if not directory.is_dir():
        raise NotFound(f"{directory} is not a directory", hint="give a directory of safetensors files")
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise InvalidRequest(f"{index} is not a safetensors index: {e!r}") from e
        if odd := [name for name in names if Path(name).name != name]:
            raise InvalidRequest(f"{index} names files outside its directory: {_some(odd)}")
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise InvalidRequest(f"{index} names {_some(missing)}, which {directory} does not hold")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"{directory} holds no *.safetensors file", hint="only safetensors weights are loaded")
    return files


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
