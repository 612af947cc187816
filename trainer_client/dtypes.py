"""Dtypes of numpy as safetensors names them, and the error for all others."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paramserver.client import DTYPES
from protos.errors import InvalidRequest

log = logging.getLogger(__name__)

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


CAST = ("F64", "F32", "F16", "BF16")
"""Floating-point dtypes that are cast, and those to cast to. Smaller ones are quantised: their scales lie elsewhere."""


def unsupported_dtype(what: str, dtype: str, supported: Iterable[str]) -> InvalidRequest:
    """The error for a dtype of `what`, such as "tensor 'w'"; it names the dtype and all supported ones."""
    return InvalidRequest(
        f"{what} has dtype {dtype}, which safetensors cannot hold",
        hint=f"convert it first; supported: {', '.join(sorted(supported))}",
    )


def dtype_name(what: str, dtype: object) -> str:
    """safetensors' name of a dtype. torch's and numpy's names are the same but for a prefix, so torch is not needed."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    plain = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if plain not in NUMPY_DTYPES:
        raise unsupported_dtype(what, str(dtype), DTYPES)
    return NUMPY_DTYPES[plain]


def warn_of_overflow(name: str, dtype: object) -> None:
    log.warning("tensor %r has values beyond %s, which became infinite: engines get inf there", name, dtype)


def float_name(dtype: object) -> str:
    """safetensors' name of the dtype that floating-point tensors are to become."""
    found = dtype_name("dtype=", dtype)
    if found not in CAST:
        raise InvalidRequest(f"dtype={dtype} is none that floats are cast to", hint=f"one of {', '.join(CAST)}")
    return found
