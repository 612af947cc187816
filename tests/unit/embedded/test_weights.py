"""New weights: refused whole and by name before any is touched, or loaded whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gateway.engines.embedded.compute.weights import Snapshot
from gateway.engines.embedded.engine import Engine
from protos.errors import InvalidRequest, LaminarError, NotFound
from tests.support.tiny_model import tiny_model, tiny_snapshot, weights, write_tiny_model
from tests.unit.embedded.helpers import config, ids, prompts, request, run

pytestmark = pytest.mark.slow

PROMPT = prompts(25, seed=1)[0]


def answer(engine: Engine) -> list[int]:
    return ids(run(engine, request("a", PROMPT, max_tokens=12))["a"])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_loaded_snapshot_equals_an_engine_started_on_it(family: str, invariant: bool, tmp_path: Path) -> None:
    engine = Engine(config(tiny_model(family), batch_invariant=invariant))
    before = answer(engine)
    engine.load_weights(tiny_snapshot(family, seed=7))
    fresh = Engine(config(write_tiny_model(tmp_path / "m", family, "float32", 7), batch_invariant=invariant))
    assert answer(engine) == answer(fresh) != before


def test_the_prefix_cache_of_old_weights_is_not_used() -> None:
    engine = Engine(config())
    answer(engine)
    engine.load_weights(tiny_snapshot(seed=7))
    hits = engine.statistics().prefix_hits
    answer(engine)
    assert engine.statistics().prefix_hits == hits


def test_other_float_dtypes_are_converted() -> None:
    engine = Engine(config())
    engine.load_weights(tiny_snapshot(dtype="bfloat16", seed=7))
    exact = Engine(config())
    exact.load_weights(tiny_snapshot(seed=7))
    assert len(answer(engine)) == len(answer(exact))
    assert answer(engine) != answer(Engine(config())), "these are not the old weights"


def test_a_sharded_snapshot_loads_through_its_index(tmp_path: Path) -> None:
    tensors = weights("llama", "float32", 7)
    names = sorted(tensors)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    engine, whole = Engine(config()), Engine(config())
    engine.load_weights(tmp_path)
    whole.load_weights(tiny_snapshot(seed=7))
    assert answer(engine) == answer(whole)


def test_a_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    tensors = weights("qwen2", "float32", 7)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "w.safetensors")
    engine = Engine(config(tiny_model("qwen2")))
    engine.load_weights(tmp_path)


def test_a_head_that_contradicts_the_embeddings_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    """The model computes with the embeddings: a trainer whose head is another one trains another model."""
    tensors = weights("qwen2", "float32", 7)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "w.safetensors")
    engine = Engine(config(tiny_model("qwen2")))
    before = answer(engine)
    for attempt in (engine.check_weights, engine.load_weights):
        with pytest.raises(InvalidRequest, match=r"lm_head\.weight .* differs .*tie_word_embeddings"):
            attempt(tmp_path)
    save_file({**tensors, "lm_head.weight": head[:5].clone()}, tmp_path / "w.safetensors")
    with pytest.raises(InvalidRequest, match=r"lm_head\.weight .* differs"):
        engine.check_weights(tmp_path)
    assert answer(engine) == before


def broken(directory: Path, kind: str) -> None:
    tensors = weights("llama", "float32", 7)
    name = "model.layers.1.mlp.up_proj.weight"
    match kind:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        case "shape":
            tensors[name] = tensors[name][:-1].clone()
        case "dtype":
            tensors[name] = tensors[name].long()
    save_file(tensors, directory / "model.safetensors")
    if kind == "truncated":
        with (directory / "model.safetensors").open("r+b") as file:
            file.truncate(10_000)
    if kind == "index":
        (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    if kind == "escape":
        (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../model.safetensors"}}')
    if kind == "not-index":
        (directory / "model.safetensors.index.json").write_text("[1]")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        ("unknown", r"holds model\.layers\.9\.mlp\.up_proj\.weight, which this model does not have"),
        ("shape", r"has shape \[319, 64\].*the model has \[320, 64\]"),
        ("dtype", r"has dtype I64.*F32, BF16, F16"),
        ("truncated", "unreadable safetensors"),
        ("index", r"names gone\.safetensors"),
        ("escape", "outside its directory"),
        ("not-index", "is not a safetensors index"),
    ],
)
def test_a_wrong_snapshot_is_named_and_changes_nothing(tmp_path: Path, kind: str, message: str) -> None:
    broken(tmp_path, kind)
    engine = Engine(config())
    before = answer(engine)
    for attempt in (engine.check_weights, engine.load_weights):
        with pytest.raises(InvalidRequest, match=message):
            attempt(tmp_path)
    assert answer(engine) == before


def test_an_absent_or_empty_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not a directory"):
        Snapshot(tmp_path / "gone")
    with pytest.raises(InvalidRequest, match=r"holds no \*\.safetensors"):
        Snapshot(tmp_path)


def edited_config(directory: Path, **changes: object) -> Path:
    shutil.copytree(tiny_model(), directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported.*llama and qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"intermediate_size": 100}, "has shape"),
        ({"max_position_embeddings": 100}, "max_model_len 256 exceeds the model's context of 100"),
    ],
)
def test_a_model_that_we_cannot_run_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Engine(config(edited_config(tmp_path / "m", **changes)))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"is not a model directory: it has no config\.json"):
        Engine(config(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv_cache_tokens": 100}, "cannot hold a sequence of max_model_len 256.*--kv-cache-tokens to 256"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_batched_tokens": 2}, "below max_num_seqs"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_bounds_that_cannot_hold_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(LaminarError, match=message):
        Engine(config(**overrides))
