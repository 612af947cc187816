"""`TensorSource`s of a trainer's tensors: names, dtypes, shapes, and how to read the bytes.

Invariants:
- every tensor that cannot be published is refused here, by name, before a byte moves;
- the caller's order is kept; a tensor with several names is published once, under the first;
- nothing imports torch: a torch tensor can only come from a caller that already did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paramserver.client import DTYPES, TensorSource
from protos.errors import InvalidRequest
from trainer_client.dtypes import CAST, NUMPY_DTYPES, float_name, unsupported_dtype

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
    owner_of: dict[object, str] = {}
    tied: dict[str, str] = {}
    floats = None if dtype is None else float_name(dtype)
    for name, tensor in _pairs(tensors):
        source, identity = _source(name, tensor, floats)
        owner = owner_of.setdefault(identity, name)
        if owner == name:
            kept.append(_nan_checked(source) if check_nan and source.dtype in _NAN else source)
        else:
            tied[name] = owner
    if not kept:
        raise InvalidRequest("no tensors to publish", hint="pass model.state_dict() or pairs (name, tensor)")
    return Sources(tuple(kept), tied)


Stable = bool | Collection[str] | Callable[[str], bool]
"""Which tensors stay as they are while they are read: all or none, some by name, or as a function says."""


def held_still(tensors: NamedTensors, stable: Stable) -> list[tuple[str, Any]]:
    """The pairs, with a copy in the place of every tensor that is not stable; tied ones share one copy.

    Raises InvalidRequest for what cannot be published.
    """
    copies: dict[object, Any] = {}
    held: list[tuple[str, Any]] = []
    for name, tensor in _pairs(tensors):
        identity = _source(name, tensor)[1]
        if not _is_stable(name, stable):
            if identity not in copies:
                copies[identity] = tensor.copy() if isinstance(tensor, np.ndarray) else tensor.detach().clone()
            tensor = copies[identity]
        held.append((name, tensor))
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


def _pairs(tensors: NamedTensors) -> list[tuple[str, Any]]:
    if not isinstance(tensors, Iterable):
        raise InvalidRequest(
            f"a {type(tensors).__name__} does not hold named tensors",
            hint="pass model.state_dict(), model.named_parameters() or a list of (name, tensor)",
        )
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    seen: set[str] = set()
    for pair in pairs:
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
    return pairs


def _source(name: str, tensor: Any, floats: str | None = None) -> tuple[TensorSource, object]:
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


def _numpy_source(name: str, array: np.ndarray[Any, Any], floats: str | None) -> tuple[TensorSource, object]:
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
    return TensorSource(name, dtype, array.shape, _numpy_reader(array, native), resident), identity


_NUMPY_FLOATS = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def _numpy_reader(array: np.ndarray[Any, Any], native: np.dtype[Any]) -> Callable[[], memoryview]:
    def read() -> memoryview:
        flat: Any = np.ascontiguousarray(array.astype(native, copy=False)).reshape(-1).view(np.uint8)
        return memoryview(flat)

    return read
