"""What may be published, and what is refused by name."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from protos.errors import InvalidRequest
from trainer_client.dtypes import NUMPY_DTYPES
from trainer_client.sources import DTYPES, source_bytes, sources_of
from trainer_client.torch_sources import TORCH_DTYPES

pytestmark = pytest.mark.slow  # torch takes a second to import


def published(tensors: Any) -> dict[str, bytes]:
    return {source.name: bytes(source.read()) for source in sources_of(tensors).tensors}


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES, key=str), ids=str)
def test_every_torch_dtype_is_read_as_its_own_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    (source,) = sources_of({"w": tensor}).tensors
    assert (source.name, source.dtype, source.shape) == ("w", TORCH_DTYPES[dtype], (3, 4))
    view = source.read()
    assert view.nbytes == source_bytes(source) == 12 * DTYPES[source.dtype]
    assert torch.equal(torch.frombuffer(view, dtype=dtype).reshape(3, 4), tensor)


@pytest.mark.parametrize("dtype", sorted(name for name in NUMPY_DTYPES if hasattr(np, name) or name == "bool"))
def test_every_numpy_dtype_is_read_as_its_own_bytes(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    (source,) = sources_of([("w", array)]).tensors
    assert (source.dtype, source.shape) == (NUMPY_DTYPES[dtype], (2, 3))
    assert bytes(source.read()) == array.tobytes()


def test_a_contiguous_cpu_tensor_is_read_without_a_copy() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    array = np.zeros(4, dtype=np.float32)
    views = [source.read() for source in sources_of({"t": tensor, "a": array}).tensors]
    tensor.fill_(1.0)
    array.fill(1.0)
    assert bytes(views[0]) == b"\x80\x3f" * 4
    assert bytes(views[1]) == b"\x00\x00\x80\x3f" * 4


def test_only_what_is_read_in_place_is_resident() -> None:
    square, complex_ = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.zeros(2, dtype=torch.complex64)
    tensors = {
        "contiguous": square,
        "array": square.numpy().copy(),
        "transposed": square.T,
        "conjugated": complex_.conj(),
        "strided": square.numpy()[:, ::2],
        "big-endian": np.arange(3, dtype=">i4"),
    }
    for check_nan in (True, False):
        sources = sources_of(tensors, check_nan=check_nan).tensors
        assert {source.name for source in sources if source.resident} == {"contiguous", "array"}


def test_what_is_not_contiguous_or_not_little_endian_is_copied_into_order() -> None:
    square = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    big_endian = np.arange(3, dtype=">i4")
    got = published({"t": square.T, "n": square.numpy()[:, ::2], "b": big_endian})
    assert got["t"] == np.array([0, 3, 1, 4, 2, 5], "<i4").tobytes()
    assert got["n"] == np.array([0, 2, 3, 5], "<i4").tobytes()
    assert got["b"] == np.arange(3, dtype="<i4").tobytes()


def test_scalars_empty_tensors_and_parameters_are_tensors_too() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    sources = sources_of({"scalar": torch.tensor(7), "empty": torch.zeros(0, 5), "parameter": parameter})
    assert [source.shape for source in sources.tensors] == [(), (0, 5), (2,)]
    assert [source.read().nbytes for source in sources.tensors] == [8, 0, 8]
    assert sources.size_bytes == 16
    assert published({"n": np.array(3, np.float32)})["n"] == np.float32(3).tobytes()


def test_tied_weights_travel_once_under_the_first_name() -> None:
    shared = torch.ones(3, 2)
    state = OrderedDict(
        [("embed", shared), ("norm", torch.ones(2)), ("head", shared), ("head_view", shared.view(3, 2))]
    )
    sources = sources_of(state)
    assert [source.name for source in sources.tensors] == ["embed", "norm"]
    assert sources.tied == {"head": "embed", "head_view": "embed"}
    array = np.ones(3)
    assert sources_of({"a": array, "b": array[:]}).tied == {"b": "a"}


def test_floats_are_cast_while_they_are_read_and_tied_ones_stay_tied() -> None:
    shared = torch.tensor([1.0, 1 / 3])
    tensors = {"embed": shared, "head": shared, "ids": torch.arange(2), "z": torch.ones(1, dtype=torch.complex64)}
    found = sources_of(tensors, dtype=torch.bfloat16)
    assert [(source.name, source.dtype) for source in found.tensors] == [
        ("embed", "BF16"),
        ("ids", "I64"),
        ("z", "C64"),
    ]
    assert found.tied == {"head": "embed"}
    shared.fill_(2.0)
    assert bytes(found.tensors[0].read()) == torch.full((2,), 2.0).bfloat16().view(torch.uint8).numpy().tobytes()
    arrays = {"w": np.array([1 / 3], ">f8"), "n": np.arange(2)}
    (w, n) = sources_of(arrays, dtype="F32").tensors
    assert (w.dtype, bytes(w.read()), n.dtype) == ("F32", np.array([1 / 3], "<f4").tobytes(), "I64")
    with pytest.raises(InvalidRequest, match=r"numpy cannot make BF16 of 'w' .*torch"):
        sources_of(arrays, dtype=torch.bfloat16)
    with pytest.raises(InvalidRequest, match=r"dtype=torch.int8 is none that floats are cast to"):
        sources_of(tensors, dtype=torch.int8)
    with pytest.raises(InvalidRequest, match="holds NaN"):
        sources_of({"w": torch.tensor([torch.nan])}, check_nan=True, dtype="BF16").tensors[0].read()


def test_a_cast_that_makes_finite_values_infinite_is_warned_of_by_name(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"wide": torch.tensor([1.0, -7e4]), "fine": torch.tensor([6e4]), "meant": torch.tensor([torch.inf])}
    arrays = {"array": np.array([1e6, np.inf]), "whole": np.array([2.0])}
    for source in (*sources_of(tensors, dtype=torch.float16).tensors, *sources_of(arrays, dtype="F16").tensors):
        source.read()
    assert [record.message.split("'")[1] for record in caplog.records] == ["wide", "array"]
    assert "values beyond torch.float16, which became infinite" in caplog.text


def test_views_that_merely_overlap_are_tensors_of_their_own() -> None:
    fused = torch.arange(6.0)
    sources = sources_of({"all": fused, "q": fused[:3], "k": fused[3:], "reshaped": fused.view(2, 3)})
    assert len(sources.tensors) == 4
    assert not sources.tied
    empty = torch.zeros(0)
    assert len(sources_of({"a": empty, "b": empty}).tensors) == 2


def test_equal_addresses_with_other_values_are_no_tied_weights() -> None:
    """A view may negate, conjugate or swap the bytes of the memory that it reads."""
    z = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex64)
    native = np.arange(3, dtype="<i4")
    views = {"z": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag, "n": native, "swapped": native.view(">i4")}
    assert not sources_of(views).tied
    got = published(views)
    assert got["conj"] == torch.tensor([1 - 2j, 3 - 4j], dtype=torch.complex64).numpy().tobytes()
    assert got["imag"] == np.array([2, 4], "<f4").tobytes()
    assert got["neg"] == np.array([-2, -4], "<f4").tobytes()
    assert got["swapped"] == native.byteswap().tobytes()


class Wrapper(torch.Tensor):
    """As quantisation libraries have them: a shape and a dtype, and the data in tensors inside."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    inner: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(args[0].inner, *args[1:], **(kwargs or {})))


def test_tensors_without_memory_of_their_own_are_refused_and_never_taken_for_tied() -> None:
    with pytest.raises(InvalidRequest, match=r"'a' is a .*Wrapper.*no memory of its own.*dequantize"):
        sources_of({"a": Wrapper(torch.zeros(2)), "b": Wrapper(torch.ones(2))})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_tensor_that_holds_nan_is_refused_when_it_is_read(dtype: torch.dtype, sign: float) -> None:
    good = torch.tensor([0.0, -1.0, math.inf, -math.inf, torch.finfo(dtype).max], dtype=dtype)
    bad = torch.cat([good, torch.tensor([sign * math.nan], dtype=dtype).copysign(torch.tensor(sign, dtype=dtype))])
    first, second = sources_of({"good": good, "bad": bad}, check_nan=True).tensors
    assert first.read().nbytes == good.nbytes
    with pytest.raises(InvalidRequest, match=r"'bad' holds NaN: this version is not published.*check_nan=False"):
        second.read()
    assert sources_of({"bad": bad}).tensors[0].read().nbytes == bad.nbytes


def test_what_has_no_nan_is_read_as_it_is() -> None:
    tensors = {"ids": torch.full((3,), -1), "f8": torch.zeros(2).to(torch.float8_e4m3fn), "none": torch.zeros(0)}
    assert [s.read().nbytes for s in sources_of(tensors, check_nan=True).tensors] == [24, 2, 0]


def test_a_generator_of_pairs_is_read_once() -> None:
    layer = torch.nn.Linear(2, 2)
    assert list(published(layer.named_parameters())) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"z": torch.zeros(1, dtype=torch.complex128)}, r"'z' has dtype torch.complex128.*convert.*bfloat16"),
        ({"z": np.zeros(1, dtype=np.complex128)}, r"'z' has dtype numpy complex128"),
        ({"z": np.array(["a"])}, r"'z' has dtype numpy str"),
        ({"z": torch.zeros(2, device="meta")}, "'z' is on the meta device"),
        ({"z": torch.eye(2).to_sparse()}, r"'z' is torch.sparse_coo.*to_dense"),
        ({"z": 3.0}, r"'z' is a builtins.float, not a tensor"),
        ({"optimizer": {"w": torch.ones(1)}}, "'optimizer' is a builtins.dict"),
        ({}, "no tensors to publish"),
        ([("w", torch.ones(1)), ("w", torch.ones(1))], "'w' appears twice"),
        ({"__metadata__": torch.ones(1)}, "safetensors reserves it"),
        ({"": torch.ones(1)}, "cannot be a tensor's name"),
        ({1: torch.ones(1)}, "expected pairs"),
        (torch.nn.Linear(1, 1), "a Linear does not hold named tensors .*state_dict"),
        ([torch.ones(1)], "expected pairs.*state_dict"),
    ],
)
def test_refusals_name_the_tensor_and_what_would_be_right(tensors: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        sources_of(tensors)


class Sharded(torch.Tensor):
    """What marks a DTensor to us: it has `full_tensor`."""

    def full_tensor(self) -> torch.Tensor:
        raise NotImplementedError


def test_a_shard_is_not_published_as_if_it_were_the_whole() -> None:
    with pytest.raises(InvalidRequest, match=r"'w' is a DTensor.*full_tensor"):
        sources_of({"w": torch.ones(2).as_subclass(Sharded)})


def test_numpy_alone_is_enough() -> None:
    """The SDK publishes and packs in a process where torch was never imported."""
    program = """
import sys
import numpy as np
import trainer_client
from trainer_client.sources import sources_of
assert sources_of({"w": np.ones(2)}).tensors[0].read().nbytes == 16
assert trainer_client.pack([]).num_tokens == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
