"""What is published: tensors and plain files, each with a function that gives its bytes when they are due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paramserver.core.layout import PlainFile, TensorSpec


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor to publish: safetensors dtype ("BF16", "F32", ...) and shape; `read` gives its contiguous
    little-endian bytes, valid while publish copies. `resident`: they lie in this host's memory, `read` returns at once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]
    resident: bool = False

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, tuple(self.shape))


@dataclass(frozen=True, slots=True)
class FileSource:
    """A plain file to publish beside the tensors, as it is; `read` gives its bytes."""

    name: str
    size_bytes: int
    read: Callable[[], memoryview]

    @property
    def spec(self) -> PlainFile:
        return PlainFile(self.name, self.size_bytes)
