"""The layout against safetensors itself: equal byte for byte, for every dtype, odd names and shapes."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save

from paramserver.core.layout import DTYPES, INDEX_NAME, FileLayout, TensorSpec, check_step, plan_layout
from protos.errors import InvalidRequest, UnsupportedField
from tests.support.quick import examples

NUMPY = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
            lambda name: name != "__metadata__"
        ),
        dtype=st.sampled_from(sorted(NUMPY)),
        shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda spec: spec.name,
)


def assemble(file: FileLayout, contents: dict[str, bytes]) -> bytes:
    body = bytearray(file.size_bytes)
    body[: len(file.head)] = file.head
    for place in file.tensors:
        body[place.offset : place.offset + place.size_bytes] = contents[place.name]
    return bytes(body)


@examples(60)
@given(specs, st.one_of(st.none(), st.just({"format": "pt"})))
def test_equals_what_safetensors_writes(tensors: list[TensorSpec], metadata: dict[str, str] | None) -> None:
    import numpy as np

    arrays = {
        spec.name: np.zeros(spec.shape, NUMPY[spec.dtype])
        if spec.dtype == "BOOL"
        else np.arange(int(np.prod(spec.shape))).astype(NUMPY[spec.dtype]).reshape(spec.shape)
        for spec in tensors
    }
    (file,) = plan_layout(tensors, metadata=metadata)
    assert assemble(file, {name: array.tobytes() for name, array in arrays.items()}) == save(arrays, metadata)


def test_every_dtype_is_read_by_safetensors_with_its_size() -> None:
    tensors = [TensorSpec(f"t.{dtype}", dtype, (3, 2)) for dtype in DTYPES]
    (file,) = plan_layout(tensors)
    read = dict(deserialize(assemble(file, {t.name: bytes(t.size_bytes) for t in tensors})))
    assert {name: (entry["dtype"], len(entry["data"])) for name, entry in read.items()} == {
        f"t.{dtype}": (dtype, 6 * size) for dtype, size in DTYPES.items()
    }


def test_large_versions_split_into_files_with_an_index() -> None:
    tensors = [TensorSpec(f"layer.{i}", "BF16", (10,)) for i in range(5)]
    files = plan_layout(tensors, file_bytes_max=45)
    assert [file.name for file in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        INDEX_NAME,
    ]
    index = json.loads(files[-1].head)
    assert index["metadata"] == {"total_size": 100}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    assert [[place.name for place in file.tensors] for file in files[:2]] == [
        ["layer.0", "layer.1"],
        ["layer.2", "layer.3"],
    ]


def test_a_tensor_larger_than_a_file_gets_its_own() -> None:
    files = plan_layout(
        [TensorSpec("a", "U8", (1,)), TensorSpec("big", "U8", (100,)), TensorSpec("c", "U8", (1,))], file_bytes_max=10
    )
    assert [[place.name for place in file.tensors] for file in files] == [["a"], ["big"], ["c"], []]


def test_headers_end_on_eight_bytes_and_give_their_length() -> None:
    for length in range(1, 10):
        (file,) = plan_layout([TensorSpec("x" * length, "U8", (1,))])
        assert len(file.head) % 8 == 0
        assert struct.unpack("<Q", file.head[:8])[0] == len(file.head) - 8


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ([], InvalidRequest, "without tensors"),
        ([TensorSpec("w", "F4", (2,))], UnsupportedField, "'w' has dtype 'F4'"),
        ([TensorSpec("w", "float32", (2,))], UnsupportedField, "use one of U64"),
        ([TensorSpec("w", "F32", (2,)), TensorSpec("w", "F32", (2,))], InvalidRequest, "announced twice"),
        ([TensorSpec("w", "F32", (-1,))], InvalidRequest, r"shape \[-1\]"),
        ([TensorSpec("w", "F32", (1 << 63,))], InvalidRequest, r"shape \[9223372036854775808\].*64 bits"),
        ([TensorSpec("__metadata__", "F32", (1,))], InvalidRequest, "cannot name a tensor"),
        ([TensorSpec("a\ud800", "F32", (1,))], InvalidRequest, r"a tensor's name is 'a\\ud800'.*surrogates"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(
    tensors: list[TensorSpec], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_layout(tensors)


def test_a_label_that_no_message_can_carry_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"the metadata's 'tied:a' is '\\udcff'.*surrogates"):
        plan_layout([TensorSpec("a", "F32", (1,))], metadata={"tied:a": "\udcff"})
    with pytest.raises(InvalidRequest, match=f"step is {1 << 70}.*63 bits"):
        check_step(1 << 70)
    with pytest.raises(InvalidRequest, match=r"step is 1\.5.*whole number"):
        check_step(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"step is -1 .*from 0 on"):
        check_step(-1)


def test_a_tensor_of_more_dimensions_than_any_library_has_is_refused() -> None:
    """To multiply millions of them would take for ever, and keep the whole relay from its work."""
    assert plan_layout([TensorSpec("w", "U8", (1,) * 64)])
    with pytest.raises(InvalidRequest, match="tensor 'w' has 65 dimensions"):
        plan_layout([TensorSpec("w", "U8", (1,) * 65)])


def test_a_layout_that_is_kept_is_that_of_the_very_same_tensors() -> None:
    spec = TensorSpec("w", "F32", (2, 3))
    others = [TensorSpec("v", "F32", (2, 3)), TensorSpec("w", "I32", (2, 3)), TensorSpec("w", "F32", (3, 2))]
    asked: list[tuple[list[TensorSpec], dict[str, str] | None, int]] = [
        ([spec], None, 100),
        ([spec], {}, 100),
        ([spec], {"format": "pt"}, 100),
        *(([other], None, 100) for other in others),
        ([spec, others[0]], None, 100),
        ([spec, others[0]], None, 24),
    ]
    found = [plan_layout(specs, metadata=of, file_bytes_max=most) for specs, of, most in asked for _ in range(2)]
    assert found[0::2] == found[1::2]
    assert len({tuple((file.name, file.head) for file in files) for files in found}) == len(asked)
    (head,) = found[0]
    assert json.loads(head.head[8:]) == {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
