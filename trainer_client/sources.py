"""`TensorSource`s of a trainer's tensors: names, dtypes, shapes, and how to read the bytes.

Invariants:
- every tensor that cannot be published is refused here, by name, before a byte moves;
- the caller's order is kept; a tensor with several names is published once, under the first;
- nothing imports torch: a torch tensor can only come from a caller that already did.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paramserver.client import DTYPES, TensorSource
from protos.errors import InvalidRequest
from trainer_client.dtypes import CAST, NUMPY_DTYPES, float_name, unsupported_dtype, warn_of_overflow

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""A state dict, or pairs (name, tensor), of torch tensors or numpy arrays."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The tensors to publish. `tied` maps each name that is left out to the name that carries its tensor."""

    tensors: tuple[TensorSource, ...]
    tied: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(source_bytes(source) for source in self.tensors)


def sources_of(tensors: NamedTensors, *, check_nan: bool = False, dtype: object = None) -> Sources:
    """Reads names, dtypes and shapes. Raises InvalidRequest for what is not a tensor or has no safetensors dtype.

    `dtype`: what floating-point tensors become, each when it is read; tied ones stay tied. With `check_nan`, reading a
    tensor that begins with NaN raises InvalidRequest as well.
    """
    kept: list[TensorSource] = []
    ties = Ties(tensors)
    tied: dict[str, str] = {}
    floats = None if dtype is None else float_name(dtype)
    for name, tensor in _pairs(tensors):
        source, identity = _source(name, tensor, floats)
        owner = ties.owner(name, identity)
        ties.check_kept(name, identity)
        if owner == name:
            kept.append(_nan_checked(source) if check_nan and source.dtype in _NAN else source)
        else:
            tied[name] = owner
    if not kept:
        raise InvalidRequest("no tensors to publish", hint="pass model.state_dict() or pairs (name, tensor)")
    return Sources(tuple(kept), tied)


_DICTS: tuple[dict[str, Any], ...] = ({}, OrderedDict())
_PLAIN: frozenset[type] = frozenset(
    (list, tuple, *(type(one) for plain in _DICTS for one in (plain, plain.items(), plain.values())))
)


def held_together(tensors: object) -> bool:
    """Whether all tensors are there while one is taken. Only plain containers and their views are known to hold them:
    any other collection, a subclass too, may make each tensor when it is asked for, and let it go."""
    return type(tensors) in _PLAIN


class Ties:
    """Which names are names of one tensor. A name's identity is what it reads, by address (`torch_sources.identity`).

    The tensors of a state dict or a list are there together (`held_together`), so names with one identity are tied. An
    iterator, or a mapping that makes tensors when they are asked for, may fill the same memory again for the next name,
    also through views that it keeps, and nothing in a tensor proves that it did not: `_version` is lacking under
    inference_mode, begins anew with each `.data`, and counts no write through numpy. So it ties none.
    """

    def __init__(self, tensors: object) -> None:
        self._together = held_together(tensors)
        self._owners: dict[Hashable, str] = {}
        self._kept: dict[Hashable, str] = {}  # the name at each address

    def owner(self, name: str, identity: Hashable) -> str:
        """The first name of this tensor."""
        return self._owners.setdefault(identity, name) if self._together else name

    def check_kept(self, name: str, identity: Hashable, *, keep: bool = True) -> None:
        """InvalidRequest when an earlier tensor that is read later may have another content by now. `keep`: this one is
        read later, too, and whoever does so holds its memory until then."""
        if self._together or not isinstance(identity, tuple):
            return
        if identity[0] in self._kept:
            raise InvalidRequest(
                f"{name!r} lies in the memory of {self._kept[identity[0]]!r}, which its iterator may have filled again",
                hint="publish_stream takes tensors of one buffer one by one; pass tied weights as a plain dict or list",
            )
        if keep:
            self._kept[identity[0]] = name


Stable = bool | Collection[str] | Callable[[str], bool]
"""Which tensors stay as they are while they are read: all or none, some by name, or as a function says."""


def held_still(tensors: NamedTensors, stable: Stable) -> list[tuple[str, Any]]:
    """The pairs, with a copy in the place of every tensor that is not stable; tied ones share one copy.

    Raises InvalidRequest for what cannot be published.
    """
    copies: dict[str, Any] = {}
    held: list[tuple[str, Any]] = []
    ties = Ties(tensors)
    for name, tensor in _pairs(tensors):
        identity = _source(name, tensor)[1]
        is_stable = _is_stable(name, stable)
        owner = ties.owner(name, identity)
        ties.check_kept(name, identity, keep=is_stable)
        plain = tensor.view() if isinstance(tensor, np.ndarray) else tensor.detach()
        if not is_stable:
            if owner not in copies:
                copies[owner] = plain.copy() if isinstance(plain, np.ndarray) else plain.clone()
            plain = copies[owner]
        held.append((name, plain))
    for device in {tensor.device for _, tensor in held if getattr(tensor, "is_cuda", False)}:
        sys.modules["torch"].cuda.current_stream(device).synchronize()  # they are read on another thread's stream
    return held


def _is_stable(name: str, stable: Stable) -> bool:
    if isinstance(stable, bool):
        return stable
    return stable(name) if callable(stable) else name in stable


NAN_CHECK_BYTES = 64 << 10
"""Bytes that are checked at the beginning of each tensor, while it is read. A training step that went wrong leaves NaN
everywhere, so the beginning is enough; a check of all bytes would take longer than their copy. Engines' probes find
the rest."""


def _floats(dtype: str) -> Callable[[memoryview], bool]:
    return lambda view: bool(np.isnan(np.frombuffer(view, dtype)).any())


_NAN: dict[str, Callable[[memoryview], bool]] = {
    "F64": _floats("<f8"),
    "F32": _floats("<f4"),
    "F16": _floats("<f2"),
    "BF16": lambda view: bool(((np.frombuffer(view, "<u2") & 0x7FFF) > 0x7F80).any()),
}
"""Whether bytes of a dtype hold NaN."""


def _nan_checked(source: TensorSource) -> TensorSource:
    def read() -> memoryview:
        view = source.read().cast("B")
        refuse_nan(source.name, source.dtype, view)
        return view

    return replace(source, read=read)


def refuse_nan(name: str, dtype: str, view: memoryview) -> None:
    """InvalidRequest when a tensor begins with NaN; `view`: its first bytes, or all of them."""
    if dtype in _NAN and _NAN[dtype](view[:NAN_CHECK_BYTES]):
        raise InvalidRequest(
            f"tensor {name!r} holds NaN: this version is not published",
            hint="look at the training step before; pass check_nan=False if it is meant to",
        )


def plain_source(name: str, tensor: Any) -> TensorSource:
    """One torch tensor or numpy array. Raises InvalidRequest for what cannot be published."""
    return _source(name, tensor)[0]


def source_bytes(source: TensorSource) -> int:
    """Size in bytes, from shape and dtype alone."""
    return int(np.prod(source.shape, dtype=np.int64)) * DTYPES[source.dtype]


def _pairs(tensors: NamedTensors) -> Iterator[tuple[str, Any]]:
    if not isinstance(tensors, Iterable):
        raise InvalidRequest(
            f"a {type(tensors).__name__} does not hold named tensors",
            hint="pass model.state_dict(), model.named_parameters() or a list of (name, tensor)",
        )
    seen: set[str] = set()
    for pair in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidRequest(
                f"expected pairs (name, tensor), got {type(pair).__name__}",
                hint="pass model.state_dict(), model.named_parameters() or a list of (name, tensor)",
            )
        if pair[0] in ("", "__metadata__"):
            raise InvalidRequest(f"{pair[0]!r} cannot be a tensor's name", hint="safetensors reserves it")
        if pair[0] in seen:
            raise InvalidRequest(f"tensor {pair[0]!r} appears twice", hint="every name must be published once")
        seen.add(pair[0])
        yield pair


def _source(name: str, tensor: Any, floats: str | None = None) -> tuple[TensorSource, Hashable]:
    """The source, and an identity that two names share only if they read the same values from the same memory.

    `floats`: the dtype that a floating-point tensor becomes.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        from trainer_client import torch_sources

        return torch_sources.source(name, tensor, floats)
    if isinstance(tensor, np.ndarray):
        return _numpy_source(name, tensor, floats)
    raise InvalidRequest(
        f"{name!r} is a {type(tensor).__module__}.{type(tensor).__name__}, not a tensor",
        hint="publish torch tensors or numpy arrays; leave other entries of a state dict out",
    )


def _numpy_source(name: str, array: np.ndarray[Any, Any], floats: str | None) -> tuple[TensorSource, Hashable]:
    dtype = NUMPY_DTYPES.get(array.dtype.name)
    if dtype is None:
        raise unsupported_dtype(f"tensor {name!r}", f"numpy {array.dtype.name}", NUMPY_DTYPES)
    native = array.dtype.newbyteorder("<")
    if floats not in (None, dtype) and dtype in CAST:
        if floats not in _NUMPY_FLOATS:
            raise InvalidRequest(f"numpy cannot make {floats} of {name!r}", hint="pass torch tensors")
        dtype, native = floats, _NUMPY_FLOATS[floats]
    address = array.__array_interface__["data"][0]
    identity = (address, array.shape, array.strides, array.dtype.name, array.dtype.byteorder) if array.size else name
    resident = array.flags.c_contiguous and array.dtype == native
    return TensorSource(name, dtype, array.shape, _numpy_reader(name, array.view(), native), resident), identity


_NUMPY_FLOATS = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def _numpy_reader(name: str, array: np.ndarray[Any, Any], native: np.dtype[Any]) -> Callable[[], memoryview]:
    def read() -> memoryview:
        with np.errstate(over="ignore"):
            made = array.astype(native, copy=False)
        if made.itemsize < array.itemsize and (np.isinf(made) & np.isfinite(array)).any():
            warn_of_overflow(name, native)
        flat: Any = np.ascontiguousarray(made).reshape(-1).view(np.uint8)
        return memoryview(flat)

    return read
