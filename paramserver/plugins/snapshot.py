"""A relay's snapshot as an engine on the same host sees it: proven against its root digest, then read layer by layer.

Invariants:
- what is proven are the bytes in this host's memory: every chunk is hashed, and the digests must give the sealed root;
- tensors are views of mapped files: nothing is copied before the engine takes its slice.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.core.records import ChunkMap, digest
from paramserver.memory.stored import beside
from protos.errors import Corrupt, InvalidRequest, NotFound, Unavailable

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Share:
    """The chunks that one of `count` ranks on this host hashes: every `count`-th, from `index` on."""

    index: int = 0
    count: int = 1


ALL = Share()


def prove(directory: Path, root_digest: str, share: Share = ALL) -> None:
    """Corrupt unless `directory` is the version sealed as `root_digest` and the chunks of `share` are as sealed."""
    stored = beside(directory)
    if stored.root_digest != root_digest:
        raise Corrupt(f"{directory} holds root {stored.root_digest}, not {root_digest}")
    views = [_map(path) for path in stored.files]
    chunks = ChunkMap.of(stored.manifest)
    for index in range(share.index, chunks.num_chunks, share.count):
        chunk = chunks.chunk(index)
        if digest(views[chunk.file][chunk.offset : chunk.offset + chunk.length]) != stored.digests[index]:
            raise Corrupt(
                f"chunk {index} of {directory} does not match its digest", hint="let the relay fetch the version again"
            )


def check_tied(directory: Path) -> None:
    """InvalidRequest when a head of its own contradicts the embeddings, of a model that computes with these alone.

    For models with `tie_word_embeddings` in their config.json: engines leave such a head out without a warning.
    """
    with Tensors(directory) as tensors:
        for head in tensors.named("lm_head.weight"):
            for embeddings in tensors.named("embed_tokens.weight"):
                if not tensors[head].equal(tensors[embeddings]):
                    raise InvalidRequest(
                        f"{head} differs from {embeddings}, which this model uses in its place",
                        hint="its config.json has tie_word_embeddings: tie them in the trainer too",
                    )


def layer_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that keeps the tensors of one layer together, and layer 2 before layer 10.

    Engines hold what they have of a layer until the layer is complete: in any other order they hold many layers.
    """
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in _NUMBER.split(name))


class Tensors:
    """`with Tensors(directory) as tensors`: (name, tensor) in layer order, views of the mapped files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> Tensors:
        from safetensors import SafetensorError, safe_open

        paths = sorted(self._directory.glob("*.safetensors"))
        if not paths:
            raise NotFound(f"{self._directory} holds no *.safetensors file", hint="give the path of a lease")
        try:
            for path in paths:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
                self._file_of.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as e:
            self._stack.close()
            raise Unavailable(f"{self._directory} cannot be read: {e}") from e
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._stack.close()

    def named(self, ending: str) -> list[str]:
        """The names that end so, whatever the model is a part of."""
        return sorted(name for name in self._file_of if f".{name}".endswith(f".{ending}"))

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(self._file_of, key=layer_order):
            yield name, self[name]


def _map(path: Path) -> memoryview:
    """Unmapped with its last view."""
    if path.stat().st_size == 0:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
