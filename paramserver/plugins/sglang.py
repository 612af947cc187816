"""The weight loader inside SGLang: `--custom-weight-loader paramserver.plugins.sglang.load_snapshot`.

The gateway pushes one small tensor, whose bytes name the snapshot's directory on this host; every rank proves it, maps
it and takes its slice through `model.load_weights`.

Invariants:
- no weight is touched before every chunk of the snapshot matched its digest;
- whatever is wrong is raised: SGLang then reports it, or ends, and in neither case takes the new version's label.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from paramserver.plugins.snapshot import Tensors, check_tied, prove
from protos.decoding import decode_json
from protos.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

MANIFEST = "laminar.manifest"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which snapshot: its directory here, and the root that its version was sealed with."""

    path: str
    version: int
    digest: str


class Loads(Protocol):
    """SGLang's model, as far as it is needed."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


def load_snapshot(model: Loads, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang in each rank. Raises InvalidRequest, Corrupt or NotFound before anything was changed."""
    manifest = _manifest(list(named_tensors))
    directory = Path(manifest.path)
    prove(directory, manifest.digest)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        check_tied(directory)
    with Tensors(directory) as tensors:
        model.load_weights(iter(tensors))


def _manifest(named: list[tuple[str, torch.Tensor]]) -> Manifest:
    if [name for name, _ in named] != [MANIFEST]:
        raise InvalidRequest(
            f"tensors {[name for name, _ in named]} are no manifest", hint=f"one tensor of bytes named {MANIFEST!r}"
        )
    try:
        return decode_json(bytes(named[0][1].tolist()), Manifest)
    except (msgspec.MsgspecError, ValueError, TypeError) as e:
        raise InvalidRequest(f"the manifest cannot be read: {e}") from e
