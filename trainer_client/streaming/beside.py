"""What a version holds besides the trainer's own tensors: those of a base checkpoint, and plain files.

Invariants: a tensor of the trainer's always comes before one of the same name in the base checkpoint; a head that the
base ties to its embedding is not carried over, since the trainer's embedding is newer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from paramserver.client import Files, FileSource, TensorSource, plain_files, read_checkpoint

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Beside:
    """Tensors carried over from a base checkpoint, and plain files."""

    tensors: tuple[TensorSource, ...] = ()
    files: tuple[FileSource, ...] = ()


NOTHING = Beside()


def beside(names: Collection[str], base: Path | str | None, files: Files | None) -> Beside:
    """What is published with tensors of these `names`, tied ones included. Raises what `read_checkpoint` raises."""
    return Beside(() if base is None else _carried(names, base), () if files is None else plain_files(files))


def _carried(names: Collection[str], base: Path | str) -> tuple[TensorSource, ...]:
    checkpoint = read_checkpoint(base)
    ties = checkpoint.ties_embeddings
    return tuple(
        source
        for source in checkpoint.tensors
        if source.name not in names and not (ties and source.name.endswith(HEAD))
    )
