"""What will be published, as known before the first tensor is made: names, dtypes and shapes.

Invariants:
- a manifest is made of metadata alone: no tensor is gathered, moved or read for it;
- a tensor with several names stands in it once; the other names are `tied`. Only tensors that are there together can
  be tied (`trainer_client.sources.Ties`), so those that a generator or a mapping makes one after the other are not.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from paramserver.client import DTYPES, TensorSpec
from protos.errors import InvalidRequest
from trainer_client.dtypes import dtype_name
from trainer_client.sources import Ties, held_together
from trainer_client.streaming.names import Names, rename

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of a stream. `dtype`: torch's, numpy's, or safetensors' name for it ("BF16"), which it becomes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(f"tensor {self.name!r}", self.dtype))
        try:
            shape = tuple(operator.index(size) for size in self.shape)
        except TypeError as error:
            raise InvalidRequest(
                f"tensor {self.name!r} has the shape {self.shape!r}", hint="give a tuple of whole numbers"
            ) from error
        object.__setattr__(self, "shape", shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one version. `tied`: further names of some of them, each with the name that carries the bytes."""

    tensors: tuple[TensorMeta, ...]
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Manifest | Iterable[TensorMeta]) -> Manifest:
        """Raises InvalidRequest for a name that comes twice, and for no tensors at all."""
        found = tensors if isinstance(tensors, Manifest) else cls(tuple(tensors))
        seen: set[str] = set(found.tied)
        for meta in found.tensors:
            if not isinstance(meta, TensorMeta):
                raise InvalidRequest(
                    f"the manifest holds a {type(meta).__name__}",
                    hint="give TensorMeta(name, dtype, shape) for each tensor, or manifest_of(state_dict)",
                )
            if meta.name in seen:
                raise InvalidRequest(f"tensor {meta.name!r} is announced twice", hint="give each name once")
            seen.add(meta.name)
        return found

    def renamed(self, names: Names | None) -> tuple[Manifest, Mapping[str, str | None]]:
        """With every name mapped; and the new name of each old one, None where nothing is published for it.

        A tensor whose own name is left out takes that of the first one tied to it that is not.
        """
        old = (*(meta.name for meta in self.tensors), *self.tied)
        new = {name: rename(names, name) if names is not None else name for name in old}
        for alias, owner in self.tied.items():
            if new[owner] is None:
                new[owner], new[alias] = new[alias], None
        tensors = [replace(meta, name=name) for meta in self.tensors if (name := new[meta.name]) is not None]
        tied = {name: new[owner] for alias, owner in self.tied.items() if (name := new[alias]) is not None}
        kept = {name: owner for name, owner in tied.items() if owner is not None}
        return Manifest.of(Manifest(tuple(tensors), kept)), new


def manifest_of(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Manifest:
    """The manifest of a state dict, or of pairs such as `model.named_parameters()`; nothing is gathered.

    Shapes are those of whole tensors: a DTensor's is the one that `full_tensor()` gives. Names that share memory (tied
    weights) stand once, under the first, in a plain dict or list; each of an iterator's, or of another mapping's,
    stands by itself. Raises InvalidRequest for what is no tensor.
    """
    metas: list[TensorMeta] = []
    ties, tied = Ties(tensors), dict[str, str]()
    for name, tensor in _pairs(tensors):
        if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
            raise InvalidRequest(
                f"{name!r} is a {type(tensor).__name__}, not a tensor", hint="leave other entries of a state dict out"
            )
        owner = ties.owner(name, memory_of(name, tensor))
        if owner == name:
            metas.append(TensorMeta(name, tensor.dtype, tuple(tensor.shape)))
        else:
            tied[name] = owner
    return Manifest.of(Manifest(tuple(metas), tied))


def gathered(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each named tensor whole, one after the other: a DTensor (FSDP2, tensor parallelism) by `full_tensor()`.

    That is a collective: every rank has to go through this in step. Left early, it goes through the rest, which the
    other ranks are in. Pass `lambda: gathered(model.state_dict())` to `publish_stream`, so that it can begin again.
    """
    return to_the_end(_once(tensors), _gathered)


def _once(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each tensor under its first name. All where they are not held together: `publish_stream` compares tied ones."""
    seen: set[Hashable] = set()
    together = held_together(tensors)
    for name, tensor in _pairs(tensors):
        memory = memory_of(name, tensor)
        if memory not in seen or not together:
            seen.add(memory)
            yield name, tensor


def _gathered(pair: tuple[str, Any]) -> tuple[str, Any]:
    name, tensor = pair
    return name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def to_the_end(items: Iterator[T], make: Callable[[T], T]) -> Iterator[T]:
    """`make` of each item, a collective. Also of those that nobody takes, since the other ranks wait for this one: when
    what iterates over this raises, it is left early. An error of `make` itself goes through."""
    try:
        for item in items:
            yield make(item)
    except GeneratorExit:
        for item in items:
            make(item)
        raise


def _pairs(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def memory_of(name: str, tensor: Any) -> Hashable:
    """What two names share only if they are one tensor, while both are there; `name` itself where that cannot be
    seen."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return name
    from trainer_client import torch_sources

    return torch_sources.identity(name, tensor)
