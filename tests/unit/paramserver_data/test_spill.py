"""Versions on disk: what a life that ended in the middle left, and disks with too little room."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paramserver.core.notices import Notices
from paramserver.core.records import Epoch, FileSpec, Manifest, Sealed, digest
from paramserver.core.transfer import Want
from paramserver.data.frames import Greeting, LinkBroken
from paramserver.data.spill import Spill
from paramserver.memory import stored
from paramserver.memory.pool import Pool
from paramserver.memory.store import Snapshot, Store
from paramserver.memory.stored import StoredSnapshot
from protos.errors import Conflict, NotFound

SIZE = 10_000


EPOCH = Epoch("store", 1)


def manifest(version: int, epoch: Epoch = EPOCH) -> Manifest:
    return Manifest("policy", version, "run", 0, epoch, (FileSpec("w", SIZE),), chunk_bytes=4096)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(Pool(tmp_path / "pool", 1 << 20))
    yield found
    found.close()


@pytest.fixture
def notices() -> Notices:
    return Notices()


@pytest.fixture
def make_spill(tmp_path: Path, notices: Notices) -> Iterator[Callable[..., Spill]]:
    made: list[Spill] = []

    def make(retain: int = 2) -> Spill:
        made.append(Spill(tmp_path / "spill", retain=retain, notices=notices))
        return made[-1]

    yield make
    for spill in made:
        spill.close()


def shown(store: Store, version: int, epoch: Epoch = EPOCH) -> Snapshot:
    snapshot = store.open(manifest(version, epoch))
    for index in snapshot.missing():
        snapshot.present(index, digest(snapshot.place(index)))
    return snapshot


def sealed(snapshot: Snapshot) -> Sealed:
    return Sealed.of(snapshot.manifest, snapshot.root(), 1.0, {})


def write(spill: Spill, snapshot: Snapshot) -> None:
    spill._write(snapshot, sealed(snapshot))


def on_disk(spill: Spill) -> list[int]:
    return sorted(one.manifest.version for one in spill.versions())


class Disk:
    """As many bytes as it has, less what the spill has written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, num_bytes: int) -> None:
        self._directory, self._num_bytes = directory, num_bytes
        copy_out = stored.copy_out
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=self.free(), f_frsize=1))

        def writing(files: object, made: StoredSnapshot, reading: object) -> None:
            if self.free() < made.manifest.size_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            copy_out(files, made, reading)  # type: ignore[arg-type]

        monkeypatch.setattr(stored, "copy_out", writing)

    def free(self) -> int:
        return self._num_bytes - sum(p.stat().st_size for p in self._directory.glob("snapshots/*/*/w"))


@pytest.mark.parametrize("retain", [1, 2])
def test_a_disk_that_fits_exactly_what_is_retained_keeps_the_newest(
    store: Store, make_spill: Callable[..., Spill], monkeypatch: pytest.MonkeyPatch, retain: int
) -> None:
    spill = make_spill(retain)
    Disk(monkeypatch, spill.directory, retain * SIZE)
    for version in (1, 2, 3, 4):
        write(spill, shown(store, version))
    assert on_disk(spill) == [3, 4][-retain:]


@pytest.mark.parametrize("retain", [1, 2, 3, 4, 6])
def test_as_many_versions_stay_on_disk_as_are_retained(
    store: Store, make_spill: Callable[..., Spill], retain: int
) -> None:
    spill = make_spill(retain)
    for version in range(1, 9):
        write(spill, shown(store, version))
        assert on_disk(spill) == list(range(max(1, version - retain + 1), version + 1))


def test_nothing_is_removed_from_a_disk_for_a_version_that_does_not_fit_all_the_same(
    store: Store, make_spill: Callable[..., Spill], monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = make_spill()
    for version in (5, 6):
        write(spill, shown(store, version))
    disk = Disk(monkeypatch, spill.directory, 2 * SIZE)
    with pytest.raises(OSError, match="are missing on it"):
        write(spill, shown(store, 4))
    assert on_disk(spill) == [5, 6], "what is newer stays"
    disk._num_bytes = SIZE // 2
    snapshot = shown(store, 7)
    with pytest.raises(OSError, match="are missing on it"):
        write(spill, snapshot)
    assert on_disk(spill) == [5, 6]


def test_a_copy_whose_record_cannot_be_written_takes_no_room(store: Store, make_spill: Callable[..., Spill]) -> None:
    spill = make_spill()
    (spill.directory / "records" / "policy" / "v00000001").mkdir(parents=True)  # as where the disk is full by then
    with pytest.raises(IsADirectoryError):
        write(spill, shown(store, 1))
    assert not list((spill.directory / "snapshots").glob("*/*"))


def test_what_a_killed_relay_left_half_written_is_removed(store: Store, make_spill: Callable[..., Spill]) -> None:
    spill = make_spill()
    write(spill, shown(store, 1))
    spill.close()
    snapshots, records = spill.directory / "snapshots" / "policy", spill.directory / "records" / "policy"
    (snapshots / "v00000002.partial").mkdir()
    (snapshots / "v00000002.partial" / "w").write_bytes(b"half")
    (snapshots / "v00000003").mkdir()  # killed before its record was written
    (records / "v00000003.partial").write_bytes(b"half")
    again = make_spill()
    assert on_disk(again) == [1]
    assert [path.name for path in snapshots.iterdir()] == ["v00000001"]
    assert [path.name for path in records.iterdir()] == ["v00000001"]


@pytest.mark.parametrize("damage", ["flipped", "shorter", "unreadable"])
def test_a_damaged_copy_is_offered_no_more_and_leaves_the_disk(
    store: Store, make_spill: Callable[..., Spill], notices: Notices, damage: str
) -> None:
    spill = make_spill()
    for version in (1, 2):
        write(spill, shown(store, version))
    file = spill.directory / "snapshots" / "policy" / "v00000002" / "w"
    if damage == "flipped":
        content = bytearray(file.read_bytes())
        content[5000] ^= 1
        file.write_bytes(content)
    elif damage == "shorter":
        os.truncate(file, 5000)
    else:
        file.unlink()
        file.mkdir()  # reading fails with EISDIR, as it does with EIO on a failing disk
    fetched = shown(store, 3)  # memory to read into
    link = spill.open(Greeting("fetch", "policy", 2, "a", Epoch("store", 1)))
    link.request(Want(1, 0, suspect=True))
    with contextlib.suppress(LinkBroken):
        link.receive(fetched.place, lambda _, __: None)
    link.close()
    assert spill.source(manifest(2)) is None
    assert spill.source(manifest(1)) is not None
    deadline = time.monotonic() + 60.0
    while (spill.directory / "records" / "policy" / "v00000002").exists() or file.parent.exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    [notice] = notices.all()
    assert notice.text.startswith(f"version 2 of policy in {spill.directory} is offered no more, and removed: ")


def test_a_record_that_is_damaged_leaves_the_disk_with_its_files(
    store: Store, make_spill: Callable[..., Spill]
) -> None:
    spill = make_spill()
    for version in (1, 2):
        write(spill, shown(store, version))
    spill.close()
    record = spill.directory / "records" / "policy" / "v00000002"
    record.write_bytes(record.read_bytes()[:-3])
    assert on_disk(make_spill()) == [1]
    assert [path.name for path in (spill.directory / "snapshots" / "policy").iterdir()] == ["v00000001"]


def test_a_directory_belongs_to_one_relay(make_spill: Callable[..., Spill]) -> None:
    make_spill()
    with pytest.raises(Conflict, match="is in use by another relay"):
        make_spill()


def test_a_version_that_is_wanted_is_written_by_the_spills_own_thread(
    store: Store, make_spill: Callable[..., Spill]
) -> None:
    spill, snapshot = make_spill(), shown(store, 1)
    spill.want(snapshot, sealed(snapshot))
    deadline = time.monotonic() + 60.0
    while not on_disk(spill):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert on_disk(spill) == [1]


def wait_written(spill: Spill, snapshot: Snapshot) -> None:
    spill.want(snapshot, sealed(snapshot))
    deadline = time.monotonic() + 60.0
    while spill.source(snapshot.manifest) is None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_disk_that_removes_nothing_says_so_and_takes_the_next_version(
    store: Store, make_spill: Callable[..., Spill], notices: Notices
) -> None:
    spill = make_spill()
    write(spill, shown(store, 1))
    record = spill.directory / "records" / "policy" / "v00000001"
    record.unlink()
    record.mkdir()  # unlink fails, as it does with EROFS on a disk that became read-only
    spill.withdraw(spill.versions()[0], "chunk 0 is damaged")
    wait_written(spill, shown(store, 2))
    assert spill.failures == 1
    assert notices.all()[-1].text == (
        f"version 1 of policy, which is offered no more, cannot be removed from {spill.directory}: Is a directory"
    )


def test_another_registrys_version_of_a_number_is_no_copy_of_this_ones_and_makes_way_for_it(
    store: Store, make_spill: Callable[..., Spill], notices: Notices
) -> None:
    spill, others = make_spill(), Epoch("other", 1)
    old = shown(store, 1, others)
    write(spill, old)
    store.remove(old, "another registry's")
    with pytest.raises(NotFound):
        spill.open(Greeting("fetch", "policy", 1, "a", EPOCH))
    wait_written(spill, shown(store, 1))
    assert spill.source(manifest(1, others)) is None
    [notice] = notices.all()
    assert notice.text == (
        f"version 1 of policy in {spill.directory}, of other/1, makes way for the registry's of that number"
    )


def test_what_was_dropped_leaves_the_disk(store: Store, make_spill: Callable[..., Spill]) -> None:
    spill = make_spill()
    for version in (1, 2):
        write(spill, shown(store, version))
    spill.drop("policy", 2)
    deadline = time.monotonic() + 60.0
    while on_disk(spill) != [2]:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    spill.close()
    assert on_disk(make_spill()) == [2]
