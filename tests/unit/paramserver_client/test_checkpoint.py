"""Checkpoint directories as something to publish: what is read, what rides along, what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paramserver.client import plain_files, read_checkpoint
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
    save_file({"a": TENSORS["a"]}, tmp_path / "x.safetensors")
    with pytest.raises(InvalidRequest, match=r"'a' stands in two files.*model.safetensors.index.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert [source.name for source in read_checkpoint(tmp_path).tensors] == ["a"]


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
        (_shrunk, "bytes too soon"),
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
    for name in ("trainer_state.json", "model.safetensors", "model.safetensors.index.json", ".x.json", "o.pt", "R.md"):
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
