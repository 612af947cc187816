"""torch tensors as `TensorSource`s. The only module of the SDK that imports torch.

Invariants:
- a contiguous CPU tensor is read in place: no copy before the one into the relay's memory;
- a GPU tensor goes through pinned host memory, one tensor at a time, while the publish copies;
- the memory behind a `memoryview` lives as long as the view (it holds the tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from paramserver.client import TensorSource
from protos.errors import InvalidRequest
from trainer_client.dtypes import CAST, unsupported_dtype, warn_of_overflow

TORCH_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def source(name: str, tensor: torch.Tensor, floats: str | None = None) -> tuple[TensorSource, Hashable]:
    """One tensor to publish, and its identity (see `trainer_client.sources`). `floats`: what floats become."""
    _check_has_bytes(name, tensor)
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise unsupported_dtype(f"tensor {name!r}", str(tensor.dtype), map(str, TORCH_DTYPES))
    data = tensor.detach()
    if floats not in (None, dtype) and dtype in CAST:
        made = next(one for one, its in TORCH_DTYPES.items() if its == floats)
        return TensorSource(name, floats, tuple(data.shape), _reader(data, name, made)), identity(name, data)
    plain = data.device.type == "cpu" and data.is_contiguous() and not (data.is_neg() or data.is_conj())
    return TensorSource(name, dtype, tuple(data.shape), _reader(data), resident=plain), identity(name, data)


def _check_has_bytes(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "full_tensor"):  # torch.distributed.tensor.DTensor, without importing torch.distributed
        raise InvalidRequest(
            f"tensor {name!r} is a DTensor: this process holds only a shard of it",
            hint="call .full_tensor() on every rank and publish the result from one",
        )
    if tensor.is_meta:
        raise InvalidRequest(f"tensor {name!r} is on the meta device and has no bytes", hint="materialise it first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidRequest(
            f"tensor {name!r} is {'quantised' if tensor.is_quantized else tensor.layout}, not a dense array",
            hint="call .to_dense() or .dequantize(), or publish its parts as tensors of their own",
        )
    if tensor.numel() and tensor.data_ptr() == 0:  # a wrapper of other tensors; at address 0 all would seem tied
        raise InvalidRequest(
            f"tensor {name!r} is a {type(tensor).__module__}.{type(tensor).__name__} with no memory of its own",
            hint="call .dequantize(), or publish the tensors inside it under names of their own",
        )


def identity(name: str, tensor: torch.Tensor) -> Hashable:
    """What the names of tied weights share: the same memory, read the same way. Views that merely overlap have
    different ones: each is a tensor of its own. So have views that read other values from the same memory: torch
    negates and conjugates when a view is read. Of a DTensor it is that of the part here, which may have no rows.

    It begins with the address, which is given again once a tensor is let go: see `trainer_client.sources.Ties`.
    """
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not tensor.numel() or local.layout is not torch.strided:
        return name
    return (
        local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset()),  # a meta tensor has no address
        tuple(local.shape),
        local.stride(),
        local.dtype,
        local.is_neg(),
        local.is_conj(),
        tuple(tensor.shape),
    )


def cast(name: str, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`data` as `dtype`, with a warning where finite values become infinite."""
    made = data.to(dtype)
    # BF16 is as wide as F32 but for its last half percent: a pass over all values is not worth that.
    are_floats = {TORCH_DTYPES.get(dtype), TORCH_DTYPES.get(data.dtype)} <= set(CAST)
    is_narrower = are_floats and torch.finfo(dtype).max < torch.finfo(data.dtype).max / 2
    if is_narrower and (infinite := made.isinf()).any() and (infinite & data.isfinite()).any():
        warn_of_overflow(name, dtype)
    return made


def _reader(data: torch.Tensor, name: str = "", dtype: torch.dtype | None = None) -> Callable[[], memoryview]:
    def read() -> memoryview:
        made = data if dtype is None else cast(name, data, dtype)
        return _bytes_of(made if made.device.type == "cpu" else _to_host(made))

    return read


def _bytes_of(data: torch.Tensor) -> memoryview:
    flat: Any = data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _to_host(data: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, from torch's caching host allocator: tensors of one size reuse one buffer."""
    pinned = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.device.type == "cuda")
    return pinned.copy_(data)


def from_numpy(array: Any) -> torch.Tensor:
    """A torch tensor that shares the memory of `array`."""
    return torch.from_numpy(array)
