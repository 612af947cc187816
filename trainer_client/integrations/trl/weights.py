"""A trainer's parameters as they are published: adapters merged, under the names of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """With PEFT, its adapter is merged into the weights meanwhile."""
    merge = getattr(model, "merge_adapter", None)
    if merge is None:
        yield
        return
    merge()
    try:
        yield
    finally:
        model.unmerge_adapter()  # type: ignore[operator]


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter under the name that it has in a checkpoint; PEFT's own, which are merged into others, left out."""
    adapter = getattr(model, "prefix", None) if hasattr(model, "merge_adapter") else None
    for name, parameter in model.named_parameters():
        if not (adapter and adapter in name) and "original_module" not in name:
            yield checkpoint_name(name), parameter


def checkpoint_name(name: str) -> str:
    """Without what wrappers (DDP, activation checkpointing, torch.compile, PEFT) add to a parameter's name."""
    for prefix in ("module.", "base_model.model."):
        name = name.removeprefix(prefix)
    for part in ("_checkpoint_wrapped_module.", "_orig_mod.", "modules_to_save.default."):
        name = name.replace(part, "")
    return name.replace(".base_layer.", ".")
