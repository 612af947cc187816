"""The weight loader inside SGLang: `--custom-weight-loader paramserver.plugins.sglang.load_snapshot`.

The gateway pushes one small tensor, whose bytes name the snapshot's directory on this host; every rank proves it, maps
it and takes its slice through `model.load_weights`.

SGLang takes whatever a loader raises for the end of its server, and a loader that returns for a success. So what came
of a load is read by `POST /get_weights_by_name`, as a parameter of the model named `laminar.loaded`: the bytes of a
`Report`. The gateway gives no label before it has read that of its own version, without an error.

Invariants:
- no weight is touched before every chunk of the snapshot matched its digest;
- nothing is raised: a load that fails is logged and reported, and the server lives on, paused, until another succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from paramserver.plugins.snapshot import Tensors, check_tied, prove
from protos.decoding import decode_json
from protos.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

MANIFEST = "laminar.manifest"
REPORT = "laminar.loaded"
ERROR_MAX = 1000
"""Characters of a report's error."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which snapshot: its directory here, and the root that its version was sealed with."""

    path: str
    version: int
    digest: str


class Report(msgspec.Struct, frozen=True):
    """What came of the last load. `error`: empty after a success; `digest`: of what was to be loaded."""

    digest: str
    error: str


class Loads(Protocol):
    """SGLang's model, as far as it is needed."""

    laminar_report: list[float]  # ours: absent before the first load
    get_weights_by_name: Callable[..., Any]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


def load_snapshot(model: Loads, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang in each rank. Raises nothing: see `Report`."""
    digest = error = ""
    try:
        manifest = _manifest(list(named_tensors))
        digest = manifest.digest
        _load(model, manifest)
    except Exception as e:
        log.exception("the load of %s failed; this server stays up, and paused until a load succeeds", digest)
        error = str(e) or type(e).__name__
    _publish(model, Report(digest, _of_all_ranks(error)[:ERROR_MAX]))


def _load(model: Loads, manifest: Manifest) -> None:
    """Raises InvalidRequest, Corrupt or NotFound before anything was changed."""
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


def _of_all_ranks(error: str) -> str:
    """The errors of the tensor parallel ranks, of which the first alone answers: empty if all of them loaded.

    SGLang itself has these ranks meet right after a load, so that all of them come here.
    """
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return error
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group().cpu_group
    errors = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(errors, error, group=group)
    return "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(errors) if found)


def _publish(model: Loads, report: Report) -> None:
    """Makes the report readable as a parameter; the others are read as before."""
    wrapped = hasattr(model, "laminar_report")
    model.laminar_report = [float(byte) for byte in msgspec.json.encode(report)]
    if wrapped:
        return
    parameters = getattr(model, "get_weights_by_name", None)  # not every model of SGLang's has it

    def get_weights_by_name(name: str, *rest: Any, **more: Any) -> Any:
        if name == REPORT:
            return model.laminar_report
        return None if parameters is None else parameters(name, *rest, **more)

    model.get_weights_by_name = get_weights_by_name
