"""What engines load from: proven byte for byte, read in layer order, refused with the reason."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from paramserver.plugins.snapshot import Share, Tensors, check_tied, layer_order, prove
from protos.errors import Corrupt, InvalidRequest, NotFound, Unavailable
from tests.support.snapshots import SealedSnapshot, seal

pytestmark = pytest.mark.slow  # torch takes a second to import

CHUNK_BYTES = 1 << 12


@pytest.fixture
def snapshot(tmp_path: Path) -> SealedSnapshot:
    tensors = {f"model.layers.{i}.w": torch.full((700,), float(i)) for i in range(12)}
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file(tensors, weights / "model.safetensors")
    return seal(tmp_path, 3, weights, chunk_bytes=CHUNK_BYTES)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_head_of_its_own_agrees_with_the_embeddings_or_is_refused(tmp_path: Path, prefix: str) -> None:
    embeddings = torch.arange(12.0).reshape(4, 3)
    tensors = {f"{prefix}model.embed_tokens.weight": embeddings, f"{prefix}lm_head.weight": embeddings.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    check_tied(tmp_path)
    tensors[f"{prefix}lm_head.weight"][1, 1] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=rf"{prefix}lm_head\.weight differs from {prefix}model\.embed_tokens"):
        check_tied(tmp_path)
    save_file({f"{prefix}model.embed_tokens.weight": embeddings}, tmp_path / "model.safetensors")
    check_tied(tmp_path)


def test_a_whole_snapshot_is_proven(snapshot: SealedSnapshot) -> None:
    prove(snapshot.path, snapshot.digest)
    snapshot.flip(-1 + (snapshot.path / "model.safetensors").stat().st_size)
    with pytest.raises(Corrupt, match="does not match its digest"):
        prove(snapshot.path, snapshot.digest)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_some_share_sees_any_flipped_bit(snapshot: SealedSnapshot, count: int) -> None:
    size = (snapshot.path / "model.safetensors").stat().st_size
    for at in (0, size // 2, size - 1):
        snapshot.flip(at)
        found = [index for index in range(count) if not whole(snapshot, Share(index, count))]
        assert found == [at // CHUNK_BYTES % count]
        snapshot.flip(at)


def whole(snapshot: SealedSnapshot, share: Share) -> bool:
    try:
        prove(snapshot.path, snapshot.digest, share)
    except Corrupt:
        return False
    return True


def test_another_version_is_not_the_one_wanted(snapshot: SealedSnapshot) -> None:
    with pytest.raises(Corrupt, match="holds root"):
        prove(snapshot.path, "00" * 16)


@pytest.mark.parametrize("damage", ["record", "cut_record", "truncated"])
def test_a_record_that_does_not_fit_is_refused(snapshot: SealedSnapshot, damage: str) -> None:
    match damage:
        case "record":
            snapshot.record.write_bytes(b"{}\n")
        case "cut_record":
            snapshot.record.write_bytes(snapshot.record.read_bytes()[:-1])
        case "truncated":
            file = snapshot.path / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Corrupt):
        prove(snapshot.path, snapshot.digest)


@pytest.mark.parametrize("path", ["/", "nowhere", "/no/such/place/at/all"])
def test_a_directory_that_no_relay_told_of(path: str) -> None:
    with pytest.raises(NotFound, match="no record"):
        prove(Path(path), "00" * 16)


def test_tensors_come_in_the_order_of_layers(snapshot: SealedSnapshot) -> None:
    with Tensors(snapshot.path) as tensors:
        found = [(name, float(tensor[0])) for name, tensor in tensors]
    assert found == [(f"model.layers.{i}.w", float(i)) for i in range(12)]


def test_what_cannot_be_read_is_said(snapshot: SealedSnapshot) -> None:
    (snapshot.path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(Unavailable, match="cannot be read"), Tensors(snapshot.path):
        pass
    (snapshot.path / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"no \*.safetensors file"), Tensors(snapshot.path):
        pass


NAMES = st.lists(
    st.builds(
        "{}.{}.{}".format,
        st.sampled_from(["model.layers", "visual.blocks"]),
        st.integers(0, 120),
        st.sampled_from(["mlp.experts.2.w", "mlp.experts.10.w", "self_attn.q_proj.weight", "norm.weight"]),
    )
    | st.sampled_from(["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "7"]),
    unique=True,
)


@given(NAMES, st.randoms())
def test_layers_stay_together_and_ascend(names: list[str], rng: random.Random) -> None:
    ordered = sorted(names, key=layer_order)
    shuffled = names[:]
    rng.shuffle(shuffled)
    assert sorted(shuffled, key=layer_order) == ordered
    for stack in ("model.layers", "visual.blocks"):
        layers = [(at, int(name.split(".")[2])) for at, name in enumerate(ordered) if name.startswith(stack)]
        assert [layer for _, layer in layers] == sorted(layer for _, layer in layers)
        assert not layers or layers[-1][0] - layers[0][0] == len(layers) - 1
