"""Dtypes of numpy as safetensors names them, and the error for all others."""

from __future__ import annotations

from collections.abc import Iterable

from protos.errors import InvalidRequest

NUMPY_DTYPES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",  # this and the float8 kinds are ml_dtypes' extension of numpy
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""numpy dtype name to safetensors dtype."""


def unsupported_dtype(name: str, dtype: str, supported: Iterable[str]) -> InvalidRequest:
    """The error for a tensor with another dtype; it names the tensor, its dtype and all supported ones."""
    return InvalidRequest(
        f"tensor {name!r} has dtype {dtype}, which safetensors cannot hold",
        hint=f"convert it first; supported: {', '.join(sorted(supported))}",
    )
