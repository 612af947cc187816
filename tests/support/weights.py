"""Tensors for relay tests, and how to hand them to `publish`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.client import TensorSource

NUMPY_DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}

Arrays = dict[str, npt.NDArray[Any]]


def weights(seed: int, scale: int = 1) -> Arrays:
    """Several dtypes, odd sizes, an empty and a scalar tensor: about 5.5 MiB times `scale`."""
    rng = np.random.default_rng(seed)
    return {
        "model.embed.weight": rng.random((512, 1024 * scale), np.float32),
        "model.layers.0.w": rng.random((333, 1001 * scale)).astype(np.float16),
        "model.layers.1.w": rng.random((701, 1001 * scale), np.float32),
        "ids": rng.integers(0, 1 << 40, 17),
        "mask": rng.integers(0, 2, (5, 3)).astype(bool),
        "bytes": rng.integers(0, 255, 12345).astype(np.uint8),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.5, np.float32),
    }


def source_of(tensors: Mapping[str, npt.NDArray[Any]]) -> list[TensorSource]:
    """Each array as a tensor to publish."""
    return [_source(name, array) for name, array in tensors.items()]


def _source(name: str, array: npt.NDArray[Any]) -> TensorSource:
    flat = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    return TensorSource(name, NUMPY_DTYPES[array.dtype.name], array.shape, lambda: flat)
