"""Checkpoint directories as something to publish: what is read, what rides along, what is refused."""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paramserver.client import checkpoint, plain_files, read_checkpoint
from protos.errors import Corrupt, InvalidRequest, LaminarError

TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(5, dtype=np.uint8), "e": np.zeros((0, 2))}


def test_tensors_are_read_when_they_are_due_from_one_file_or_those_of_an_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt", "who": "me"})
    one = read_checkpoint(tmp_path)
    assert one.metadata == {"format": "pt", "who": "me"}
    assert [source.name for source in one.tensors] == ["a", "b", "e"]
    for source in one.tensors:
        assert source.shape == TENSORS[source.name].shape
        assert bytes(source.read()) == TENSORS[source.name].tobytes()
    (tmp_path / "model.safetensors").unlink()
    for name in ("x", "y"):
        save_file({"a": TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with pytest.raises(InvalidRequest, match=r"'a' stands in two files.*model.safetensors.index.json"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert [source.name for source in read_checkpoint(tmp_path).tensors] == ["a"]
    assert read_checkpoint(tmp_path).left_behind == ("y.safetensors",)


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model", "consolidated"], ["model"]),
        (["model", "adapter_model", "optimizer", "optimizer_0"], ["model"]),
        (["pytorch_model", "adapter_model", "random_states_0"], ["pytorch_model"]),
        (["m-00001-of-00002", "m-00002-of-00002", "optimizer"], ["m-00001-of-00002", "m-00002-of-00002"]),
        (["m-00001-of-00002", "optimizer"], "holds m-00001-of-00002.safetensors, and neither"),
        (["m-00001-of-00003", "m-00003-of-00003"], "neither model.safetensors nor an .*index.json says which"),
        (["weights", "consolidated"], "holds consolidated.safetensors, weights.safetensors, and neither"),
        (["adapter_model"], "no .* with weights, only adapter_model.safetensors .*merge_and_unload"),
    ],
)
def test_of_several_files_the_models_own_are_taken_or_it_is_refused(
    tmp_path: Path, names: list[str], weights: list[str] | str
) -> None:
    for name in names:
        save_file({f"in {name}": TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    if isinstance(weights, str):
        with pytest.raises(InvalidRequest, match=weights):
            read_checkpoint(tmp_path)
        return
    found = read_checkpoint(tmp_path)
    assert [source.name for source in found.tensors] == [f"in {name}" for name in weights]
    assert set(found.left_behind) == {f"{name}.safetensors" for name in {*names} - {*weights}}


def test_an_index_beside_a_file_that_it_does_not_name_is_refused(tmp_path: Path) -> None:
    for name in ("model", "x"):
        save_file({"a": TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(InvalidRequest, match=r"model.safetensors, and an .*out of date"):
        read_checkpoint(tmp_path)


def rewritten(path: Path, content: bytes) -> None:
    """In its place, and later than whatever the clock of the file system can tell apart."""
    later = path.stat().st_mtime + 1.0
    path.write_bytes(content)
    os.utime(path, (later, later))


@pytest.mark.parametrize("kind", ["weights", "plain"])
def test_a_file_that_is_replaced_stays_as_it_was_and_one_that_is_written_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": TENSORS["a"]}, path)
    before = path.read_bytes()

    def source() -> Callable[[], memoryview]:
        found = plain_files({"x": path}) if kind == "plain" else read_checkpoint(tmp_path).tensors
        return found[0].read

    read = source()
    (tmp_path / "new").write_bytes(before[::-1])
    (tmp_path / "new").rename(path)
    assert bytes(read()) == (before if kind == "plain" else TENSORS["a"].tobytes())
    path.write_bytes(before)
    read = source()
    rewritten(path, before[::-1])
    with pytest.raises(InvalidRequest, match=r"model\.safetensors changed while it was read"):
        read()
    del read
    gc.collect()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in _target(link)], "all are closed"


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # the one by which the folder is read
        return ""


def test_files_of_two_saves_are_not_taken_for_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        save_file({f"t{number}": TENSORS["a"]}, tmp_path / f"m-0000{number}-of-00002.safetensors")
    read_head = checkpoint._read_head

    def then_saved_again(path: Path, *args: Any) -> Any:
        found = read_head(path, *args)
        if "00001" in path.name:
            (tmp_path / "new").write_bytes(path.read_bytes())
            (tmp_path / "new").rename(path)
        return found

    monkeypatch.setattr(checkpoint, "_read_head", then_saved_again)
    with pytest.raises(InvalidRequest, match=r"m-00001-of-00002\.safetensors changed while it was read"):
        read_checkpoint(tmp_path)


def _pipe(directory: Path) -> Path:
    os.mkfifo(directory / "pipe")
    return directory / "pipe"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: {"x": 5}, "files has a int for 'x' .*bytes, text, or the Path"),
        (lambda _: {"x": None}, "files has a NoneType for 'x'"),
        (lambda _: {"x": Path("/dev/zero")}, "/dev/zero is no regular file"),
        (lambda directory: {"x": _pipe(directory)}, "pipe is no regular file"),
        (lambda directory: {"x": directory}, "is no regular file"),
        (lambda _: {"x": "half a pair: \ud800"}, "the content of 'x' is .* not valid Unicode"),
        (lambda _: {"\ud800": "x"}, "a file's name is .* not valid Unicode"),
    ],
)
def test_what_is_no_content_of_a_file_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plain_files(make(tmp_path))


def head(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header would take"),
        (head([]), "no safetensors file"),
        (head({"w": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
        (head({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "bytes 0 to 8 are not"),
        (head({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "bytes 0 to 4 are not"),
        (head({"w": {"dtype": "F3", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "'w' of .* is F3"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_before_anything_moves(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises((Corrupt, InvalidRequest), match=message):
        read_checkpoint(tmp_path)


def _pickled(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"x")
    read_checkpoint(directory)


def _escaping(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    read_checkpoint(directory)


def _shrunk(directory: Path) -> None:
    save_file(TENSORS, directory / "model.safetensors")
    source = read_checkpoint(directory).tensors[0]
    (directory / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-40])
    source.read()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_pickled, r"only pytorch_model.bin .*save_pretrained"),
        (_escaping, "outside of its directory"),
        (_shrunk, "changed while it was read"),
        (lambda directory: read_checkpoint(directory / "none"), "is no directory"),
    ],
)
def test_other_directories_are_refused_by_what_they_lack(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(LaminarError, match=message):
        make(tmp_path)


def test_plain_files_are_those_that_a_model_opens_with(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model", "model.py", "merges.txt"):
        (tmp_path / name).write_text(name)
    for name in (
        "trainer_state.json",
        "adapter_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        ".x.json",
        "o.pt",
        "R.md",
    ):
        (tmp_path / name).write_text("left behind")
    (tmp_path / "sub.json").mkdir()
    found = plain_files(tmp_path)
    assert {file.name: bytes(file.read()).decode() for file in found} == {
        name: name
        for name in (
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "tokenizer.model",
            "model.py",
            "merges.txt",
        )
    }
    given = plain_files({"a.json": "{}", "b": b"1", "c": tmp_path / "config.json"})
    assert [(file.name, file.size_bytes, bytes(file.read())) for file in given] == [
        ("a.json", 2, b"{}"),
        ("b", 1, b"1"),
        ("c", 11, b"config.json"),
    ]
    with pytest.raises(InvalidRequest, match="cannot be read"):
        plain_files({"c": tmp_path / "none"})


@pytest.mark.parametrize(
    ("config", "ties"),
    [({"tie_word_embeddings": True}, True), ({"text_config": {"tie_word_embeddings": True}}, True), ({}, False)],
)
def test_a_config_says_whether_the_head_is_the_embedding(tmp_path: Path, config: object, ties: bool) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert not read_checkpoint(tmp_path).ties_embeddings
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(tmp_path).ties_embeddings is ties
