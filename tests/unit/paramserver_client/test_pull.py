"""What `paramserver pull` writes into its directory, without a relay."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paramserver.client.pull import PartialFiles
from paramserver.core.records import Epoch, FileSpec, Manifest, digest, version_root
from protos.errors import Conflict, Unavailable

CHUNK = 4096


def files_of(version: int, directory: Path) -> tuple[PartialFiles, list[bytes]]:
    """Files for a version whose chunks are all bytes of its number, and those chunks."""
    manifest = Manifest("policy", version, "run", 0, Epoch("s", 1), (FileSpec("w", 2 * CHUNK),), chunk_bytes=CHUNK)
    chunks = [bytes([version]) * CHUNK] * 2
    return PartialFiles(manifest, version_root(manifest, [digest(chunk) for chunk in chunks]), directory), chunks


def put(files: PartialFiles, chunks: list[bytes]) -> None:
    for index in files.missing():
        files.place(index)[:] = chunks[index]
        files.present(index, digest(chunks[index]))


def test_two_pulls_do_not_write_into_one_directory(tmp_path: Path) -> None:
    """The bytes of one would stand in the files of the other, which was verified before."""
    first, chunks = files_of(1, tmp_path / "out")
    with first:
        put(first, chunks)
        second, others = files_of(2, tmp_path / "out")
        with pytest.raises(Conflict, match="another pull writes there"), second:
            put(second, others)
        first.finish()
    assert (tmp_path / "out" / "w").read_bytes() == b"".join(chunks)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["w"]


def test_a_pull_goes_on_where_one_that_ended_stopped(tmp_path: Path) -> None:
    first, chunks = files_of(1, tmp_path / "out")
    with first:
        first.place(0)[:] = chunks[0]
        first.present(0, digest(chunks[0]))
    again, _ = files_of(1, tmp_path / "out")
    with again:
        assert again.missing() == [1]


def test_a_directory_that_has_the_files_already_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"mine")
    files, _ = files_of(1, tmp_path)
    with pytest.raises(Conflict, match="w exists"), files:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


class Killed(BaseException):
    """As by SIGKILL: nothing of the process runs any more."""


def three_files(directory: Path, *, version: int = 1) -> tuple[PartialFiles, list[bytes]]:
    """One of two chunks, one of one, an empty one; and their chunks."""
    specs = (FileSpec("a", CHUNK + 7), FileSpec("b", 9), FileSpec("c", 0))
    chunks = [b"a" * CHUNK, b"A" * 7, b"b" * 9]
    manifest = Manifest("policy", version, "run", 0, Epoch("s", 1), specs, chunk_bytes=CHUNK)
    return PartialFiles(manifest, version_root(manifest, [digest(chunk) for chunk in chunks]), directory), chunks


def killed_while_it_finishes(out: Path, num_renamed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files, chunks = three_files(out)
    rename, calls = os.rename, [0]

    def killed_at(source: Path, target: Path) -> None:
        calls[0] += 1
        if calls[0] > num_renamed:
            raise Killed
        rename(source, target)

    def killed(path: Path) -> None:
        raise Killed

    with files:
        put(files, chunks)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", killed_at)
            patch.setattr(Path, "unlink", killed)
            with pytest.raises(Killed):
                files.finish()


@pytest.mark.parametrize("num_renamed", [0, 1, 2, 3])
def test_a_pull_killed_between_its_renames_is_resumed(
    tmp_path: Path, num_renamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed_while_it_finishes(out, num_renamed, monkeypatch)
    assert len([path for path in out.iterdir() if path.name in "abc"]) == num_renamed
    again, _ = three_files(out)
    with again:
        assert again.missing() == []
        again.finish()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        "a": b"a" * CHUNK + b"A" * 7,
        "b": b"b" * 9,
        "c": b"",
    }


def test_a_pull_killed_while_it_resumes_after_that_is_resumed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal alone proves the files that have their names: it is never emptied on the way."""
    out = tmp_path / "out"
    killed_while_it_finishes(out, 1, monkeypatch)
    again, _ = three_files(out)

    def killed(index: int) -> memoryview:
        raise Killed

    monkeypatch.setattr(again, "place", killed)
    with pytest.raises(Killed), again:
        pass
    again._close()  # what the kernel does with a dead process's descriptors
    third, _ = three_files(out)
    with third:
        assert third.missing() == []
        third.finish()
    assert sorted(path.name for path in out.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("changed", [b"mine", b"x" * (CHUNK + 7)], ids=["shorter", "as long"])
def test_a_file_that_is_not_what_a_killed_pull_named_is_left_as_it_is(
    tmp_path: Path, changed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed_while_it_finishes(out, 1, monkeypatch)
    (out / "a").write_bytes(changed)
    again, _ = three_files(out)
    with pytest.raises(Conflict, match="a exists"), again:
        pass
    assert (out / "a").read_bytes() == changed
    other, _ = three_files(out, version=2)
    with pytest.raises(Conflict, match="a exists"), other:
        pass
    assert (out / "a").read_bytes() == changed


def test_a_disk_that_fills_up_costs_the_journal_and_not_the_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for the files is taken before their first byte; the journal only saves work when a pull is cut."""
    files, chunks = files_of(1, tmp_path / "out")
    with files:

        def full(fd: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        put(files, chunks)
        files.finish()
    assert (tmp_path / "out" / "w").read_bytes() == b"".join(chunks)
    assert caplog.text.count("No space left on device") == 1


def test_files_that_cannot_be_finished_are_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, chunks = files_of(1, tmp_path / "out")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with files:
        put(files, chunks)
        monkeypatch.setattr(os, "rename", fails)
        with pytest.raises(Unavailable, match="Input/output error"):
            files.finish()
