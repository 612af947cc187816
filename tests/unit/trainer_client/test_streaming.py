"""Manifests, name maps, shares of ranks and staging: what a stream needs before and besides its relay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from protos.errors import InvalidRequest
from trainer_client import Manifest, OneRank, TensorMeta, gathered, manifest_of
from trainer_client.streaming.names import rename
from trainer_client.streaming.passes import part_of
from trainer_client.streaming.staging import StagingRing

pytestmark = pytest.mark.slow  # torch takes a second to import


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "BF16"),
        (torch.float16, "F16"),
        (torch.float32, "F32"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.int8, "I8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (np.dtype("float16"), "F16"),
        (np.float32, None),
        ("BF16", "BF16"),
        ("bfloat16", "BF16"),
        (torch.complex128, None),
        ("float", None),
    ],
)
def test_a_dtype_is_given_as_torch_numpy_or_safetensors_name_it(dtype: object, name: str | None) -> None:
    if name is None:
        with pytest.raises(InvalidRequest, match="'w' has dtype"):
            TensorMeta("w", dtype, (2,))  # type: ignore[arg-type]
        return
    meta = TensorMeta("w", dtype, torch.Size([2, 3]))  # type: ignore[arg-type]
    assert (meta.dtype, meta.shape) == (name, (2, 3))


def test_a_manifest_is_made_of_metadata_and_names_tied_weights_once() -> None:
    shared = torch.zeros(4, 2, dtype=torch.bfloat16)
    tensors = {"embed": shared, "head": shared, "w": torch.ones(3), "far": torch.ones(5, device="meta")}
    manifest = manifest_of(tensors)
    assert manifest.tensors == (
        TensorMeta("embed", "BF16", (4, 2)),
        TensorMeta("w", "F32", (3,)),
        TensorMeta("far", "F32", (5,)),
    )
    assert manifest.tied == {"head": "embed"}
    assert [name for name, _ in gathered(tensors)] == ["embed", "w", "far"]
    with pytest.raises(InvalidRequest, match="'step' is a int"):
        manifest_of({"step": 3})
    with pytest.raises(InvalidRequest, match="'w' is announced twice"):
        Manifest.of([TensorMeta("w", "F32", ()), TensorMeta("w", "F32", ())])
    with pytest.raises(InvalidRequest, match="holds a tuple"):
        Manifest.of([("w", "F32", ())])  # type: ignore[list-item]


def test_names_are_mapped_by_pairs_or_a_function_and_left_out_by_none() -> None:
    pairs = [(r"^module\.", ""), (r"\.gamma$", ".weight"), (r"\.rotary_emb\.", None)]
    assert rename(pairs, "module.ln.gamma") == "ln.weight"
    assert rename(pairs, "module.attn.rotary_emb.inv_freq") is None
    assert rename(lambda name: name.upper(), "w") == "W"
    with pytest.raises(InvalidRequest, match="no map of names"):
        rename([("(", "")], "w")
    with pytest.raises(InvalidRequest, match="made 3 of 'w'"):
        rename(lambda name: 3, "w")  # type: ignore[arg-type,return-value]
    manifest = Manifest((TensorMeta("a.w", "F32", ()), TensorMeta("b.w", "F32", ())), {"a.t": "a.w", "b.t": "b.w"})
    renamed, new = manifest.renamed([("^a", "x"), ("^b", None)])
    assert (renamed.tensors, renamed.tied) == ((TensorMeta("x.w", "F32", ()),), {"x.t": "x.w"})
    assert new == {"a.w": "x.w", "a.t": "x.t", "b.w": None, "b.t": None}
    with pytest.raises(InvalidRequest, match="'w' is announced twice"):
        manifest.renamed(lambda name: name[2:])


def test_a_tensor_whose_own_name_is_left_out_is_published_under_the_first_that_is_tied_to_it() -> None:
    manifest = Manifest((TensorMeta("embed", "F32", (2,)),), {"x": "embed", "head": "embed", "copy": "embed"})
    renamed, new = manifest.renamed([("^embed$|^x$", None)])
    assert (renamed.tensors, renamed.tied) == ((TensorMeta("head", "F32", (2,)),), {"copy": "head"})
    assert new == {"embed": "head", "x": None, "head": None, "copy": "copy"}


def of_one_buffer(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor lies where the one before did, and is let go before the next is made."""
    buffer = np.zeros(4, np.float32)
    for number in range(count):
        buffer[:] = number
        yield f"w{number}", torch.from_numpy(buffer)


def of_one_tensor(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor that is filled anew."""
    buffer = torch.zeros(4)
    for number in range(count):
        yield f"w{number}", buffer.fill_(number)


@pytest.mark.parametrize("pairs", [of_one_buffer, of_one_tensor])
def test_only_tensors_that_are_there_together_are_tied(pairs: Callable[[int], Iterator[Any]]) -> None:
    manifest = manifest_of(pairs(3))
    assert [meta.name for meta in manifest.tensors] == ["w0", "w1", "w2"]
    assert manifest.tied == {}
    assert [(name, tensor[0].item()) for name, tensor in gathered(pairs(3))] == [("w0", 0), ("w1", 1), ("w2", 2)]


def test_tied_weights_are_found_in_a_generator_of_views_too() -> None:
    """The views come and go, and what they show stays."""
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    net["head"].weight = net["embed"].weight
    pairs = [(name, one.detach()) for name, one in net.named_parameters(remove_duplicate=False)]
    assert manifest_of((name, one.detach()) for name, one in pairs).tied == {"head.weight": "embed.weight"}
    conjugated = torch.ones(2, dtype=torch.complex64)
    assert manifest_of({"z": conjugated, "conj": conjugated.conj()}).tied == {}


class Seat:
    """One of several ranks, without the others."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def exchange(self, message: bytes) -> list[bytes]:
        raise AssertionError


def test_shares_cover_every_tensor_once_and_are_even() -> None:
    metas = tuple(TensorMeta(f"w{n}", "U8", (1000 - n,)) for n in range(101))
    parts = [part_of(Manifest(metas), Seat(n, 4), "all") for n in range(4)]
    names = [meta.name for part in parts if part for meta in part.metas]
    assert sorted(names) == sorted(meta.name for meta in metas)
    sizes = [sum(meta.size_bytes for meta in part.metas) for part in parts if part]
    assert max(sizes) - min(sizes) <= 1000
    assert part_of(Manifest(metas), Seat(1, 4), "first") is None
    assert part_of(Manifest(metas), OneRank(), "all") is not None
    with pytest.raises(InvalidRequest, match="1 tensors for 4 ranks"):
        part_of(Manifest(metas[:1]), Seat(0, 4), "all")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(100_003, dtype=torch.uint8),
        lambda: torch.rand(257, 129).T,
        lambda: torch.zeros(0),
        lambda: torch.rand(33, dtype=torch.float32).to(torch.float8_e4m3fn),
    ],
    ids=["bytes", "transposed", "empty", "fp8"],
)
def test_the_staging_ring_gives_all_bytes_in_two_buffers(make: Callable[[], torch.Tensor]) -> None:
    tensor, ring = make(), StagingRing(1000)
    size = tensor.numel() * tensor.element_size()
    found, buffers = b"", set()
    for piece in ring.pieces(tensor, [(at, min(at + 1000, size)) for at in range(0, size, 1000)]):
        buffers.add(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
        found += bytes(piece)
    assert found == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(buffers) <= 2
