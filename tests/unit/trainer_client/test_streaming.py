"""Manifests, name maps, shares of ranks and staging: what a stream needs before and besides its relay."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from protos.errors import InvalidRequest
from trainer_client import Manifest, OneRank, TensorMeta, gathered, manifest_of
from trainer_client.sources import held_still, sources_of
from trainer_client.streaming.names import rename, renamed
from trainer_client.streaming.passes import part_of
from trainer_client.streaming.shards import shards_of
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


def of_inference(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.inference_mode():
        yield from of_one_tensor(count)


def of_data(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in of_one_tensor(count):
        yield name, buffer.data


def of_writes_through_numpy(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    buffer = torch.zeros(4)
    for number in range(count):
        buffer.numpy()[:] = number
        yield f"w{number}", buffer


def of_a_scratch_module(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    scratch = torch.nn.Linear(4, 1, bias=False)
    for number in range(count):
        scratch.weight.data.fill_(number)
        yield from ((f"w{number}", one) for one in scratch.state_dict(keep_vars=True).values())


def of_arrays(count: int) -> Iterator[tuple[str, Any]]:
    buffer = np.zeros(4, np.float32)
    for number in range(count):
        buffer[:] = number
        yield f"w{number}", buffer[:]


def of_kept_views(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    buffer = torch.zeros(4)
    views = {f"w{number}": buffer.view(2, 2) for number in range(count)}
    for number, (name, view) in enumerate(views.items()):
        view.copy_(torch.full((2, 2), number))
        yield name, view


class OfALoader:
    """No iterator, and yet each tensor is made when it is taken."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return of_data(self._count)


def of_other_shapes(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    buffer = torch.zeros(4)
    for number in range(count):
        buffer.fill_(number)
        yield f"w{number}", buffer[: 4 - number]


REFILLED: list[Callable[[int], Any]] = [of_one_buffer, of_one_tensor, of_inference, of_data, of_writes_through_numpy]
REFILLED += [of_a_scratch_module, of_other_shapes, of_kept_views, OfALoader]


@pytest.mark.parametrize("pairs", REFILLED)
def test_only_tensors_that_are_there_together_are_tied(pairs: Callable[[int], Iterator[Any]]) -> None:
    manifest = manifest_of(pairs(3))
    assert [meta.name for meta in manifest.tensors] == ["w0", "w1", "w2"]
    assert manifest.tied == {}
    found = [(name, tensor.flatten()[0].item()) for name, tensor in gathered(pairs(3))]
    assert found == [("w0", 0), ("w1", 1), ("w2", 2)]


@pytest.mark.parametrize("pairs", [*REFILLED, of_arrays])
def test_an_iterator_that_fills_its_memory_again_is_refused_where_it_is_read_at_the_end(
    pairs: Callable[[int], Iterator[Any]],
) -> None:
    """Its earlier tensors have gone by then."""
    for taken in (pairs(3), renamed(pairs(3), [("^w", "x")])):
        with pytest.raises(InvalidRequest, match=r"'.1' lies in the memory of '.0', which.*publish_stream"):
            sources_of(taken)
    with pytest.raises(InvalidRequest, match="lies in the memory of"):
        held_still(pairs(3), lambda name: name == "w0")
    assert [np.asarray(tensor.data).flat[0] for _, tensor in held_still(pairs(3), False)] == [0, 1, 2], "copied in time"


def test_shards_of_an_iterator_that_fills_its_memory_again_are_refused() -> None:
    for pairs in REFILLED:
        with pytest.raises(InvalidRequest, match="'w1' lies in the memory of 'w0'"):
            shards_of(pairs(3), None, None)


def test_an_iterator_of_fresh_tensors_is_taken_although_their_memory_is_given_again() -> None:
    fresh = lambda: ((f"w{number}", torch.full((1000,), number)) for number in range(20))  # noqa: E731
    assert (
        len(manifest_of(fresh()).tensors) == len(sources_of(fresh()).tensors) == len(held_still(fresh(), False)) == 20
    )
    assert [int(one.read().cast("B")[0]) for one in sources_of(fresh()).tensors] == list(range(20))


class Lazy(UserDict[str, torch.Tensor]):
    """A mapping that makes each tensor when it is asked for it."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.data[name].to(torch.bfloat16)


class LazyDict(dict[str, torch.Tensor]):
    def items(self) -> Any:
        return ((name, one.to(torch.bfloat16)) for name, one in super().items())


class LazyOrderedDict(OrderedDict[str, torch.Tensor]):
    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).to(torch.bfloat16)

    def items(self) -> Any:
        return ((name, self[name]) for name in self)


class LazyList(list[tuple[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, one.to(torch.bfloat16)) for name, one in super().__iter__())


@pytest.mark.parametrize("make", [Lazy, lambda base: Lazy(base).items(), LazyDict, LazyOrderedDict, LazyList])
@pytest.mark.parametrize("names", [None, [("^w", "x")]])
def test_a_collection_that_makes_its_tensors_when_they_are_taken_ties_none(
    make: Callable[[Any], Any], names: Any
) -> None:
    base = {f"w{number}": torch.full((64, 64 if number % 3 else 256), float(number)) for number in range(12)}
    values = [float(number) for number in range(12)]

    def taken() -> Any:
        return renamed(make(list(base.items()) if make is LazyList else base), names)

    assert names is None or not isinstance(taken(), list), "all would be held at once"
    manifest = manifest_of(taken())
    assert (manifest.tied, len(manifest.tensors)) == ({}, 12)
    assert [one.flatten()[0].item() for _, one in gathered(taken())] == values
    for stable in (False, True):
        assert [one.flatten()[0].item() for _, one in held_still(taken(), stable)] == values
    assert (sources_of(taken()).tied, len(shards_of(taken(), None, None))) == ({}, 12)


def test_tied_weights_are_found_where_their_tensors_are_held() -> None:
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    net["head"].weight = net["embed"].weight
    state = net.state_dict()
    tied = {"head.weight": "embed.weight"}
    with torch.no_grad():
        net["embed"].weight.add_(1)
    mixed = {"embed.weight": net["embed"].weight, "head.weight": net["embed"].weight.data}
    together = (state, mixed, dict(state), mixed.items(), list(state.items()), tuple(state.items()), state.items())
    assert [[name for name, _ in gathered(one)] for one in together] == [["embed.weight"]] * len(together)
    for held in together:
        assert (manifest_of(held).tied, sources_of(held).tied) == (tied, tied)
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
