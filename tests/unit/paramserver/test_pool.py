"""The pool and the snapshots in it, on a real tmpfs: warm reuse, and never under a reader's mapping."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.core.records import Epoch, FileSpec, Manifest, digest
from paramserver.pool import Pool, PoolFile
from paramserver.store import Snapshot, Store
from protos.errors import Conflict, Corrupt, NotFound, OutOfCapacity, TooLarge

MIB = 1 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="laminar-pool-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def pool(directory: Path) -> Iterator[Pool]:
    found = Pool(directory / "pool", 16 * MIB)
    found.preallocate()
    yield found
    found.close()


def manifest(version: int, *sizes: int) -> Manifest:
    files = tuple(FileSpec(f"f{i}", size) for i, size in enumerate(sizes))
    return Manifest("policy", version, "run", 0, Epoch("store", 1), files, chunk_bytes=4096)


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def test_memory_is_allocated_and_touched_before_it_is_asked_for(pool: Pool) -> None:
    before = {path.stat().st_ino for path in (pool.directory / "free").iterdir()}
    (file,) = pool.take([4 * MIB])
    assert inode(file.fd) in before
    place, content = file.view(), os.urandom(4096)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for start in range(0, 4 * MIB, 4096):
        place[start : start + 4096] = content
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 512, "of 1024 pages hardly any is new"
    pool.give_back([file])


def test_memory_is_reused_by_the_next_take(pool: Pool) -> None:
    (first,) = pool.take([3 * MIB])
    assert os.fstat(first.fd).st_blocks * 512 >= 3 * MIB, "allocated before it was asked for"
    number = inode(first.fd)
    assert pool.give_back([first]) == 0
    (again,) = pool.take([3 * MIB])
    assert inode(again.fd) == number
    pool.give_back([again])


def test_it_never_gives_out_more_than_it_has(pool: Pool) -> None:
    files = pool.take([5 * MIB, 5 * MIB, 5 * MIB])
    with pytest.raises(OutOfCapacity, match=f"{2 * MIB} bytes wanted, {MIB} available"):
        pool.take([2 * MIB])
    assert pool.statistics().used_bytes == 15 * MIB
    pool.give_back(files)
    pool.give_back(pool.take([16 * MIB]))


def test_a_small_file_costs_no_more_warm_memory_than_its_size(pool: Pool) -> None:
    (small,) = pool.take([1000])
    files = pool.take([3 * MIB] * 4)
    assert pool.statistics().free_bytes == 16 * MIB - 12 * MIB - 1000
    pool.give_back([small, *files])


def test_files_have_exactly_the_size_asked_for_whatever_was_cut_before(pool: Pool) -> None:
    sizes = [3 * MIB + 1, 0, 17, MIB, 5 * MIB - 3]
    for _ in range(4):
        files = pool.take(sizes)
        assert [os.fstat(file.fd).st_size for file in files] == sizes
        pool.give_back(files)


def test_memory_that_a_reader_maps_is_quarantined_until_the_reader_lets_go(pool: Pool) -> None:
    (file,) = pool.take([4 * MIB])
    file.view()[:5] = b"first"
    with file.path.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    assert pool.give_back([file]) == 4 * MIB
    assert not list(pool.directory.glob("snapshots/*"))
    others = pool.take([4 * MIB, 4 * MIB, 4 * MIB])
    for other in others:
        other.view()[:5] = b"other"
    assert mapping[:5] == b"first"
    with pytest.raises(OutOfCapacity):
        pool.take([4 * MIB])
    assert pool.sweep() == 4 * MIB
    mapping.close()
    assert pool.sweep() == 0
    pool.give_back(pool.take([4 * MIB]) + others)


def test_the_publishers_mapping_through_the_passed_descriptor_does_not_block_reuse(pool: Pool) -> None:
    (file,) = pool.take([MIB])
    passed = os.dup(file.fd)  # what SCM_RIGHTS gives: the same open description
    with mmap.mmap(passed, MIB) as mapping:
        os.close(passed)
        mapping[:5] = b"bytes"
        assert pool.give_back([file]) == 0


def test_a_file_leaves_its_path_before_anybody_asks_whether_it_is_mapped(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader could open it by that path after the check, and see the next version's bytes."""
    (file,) = pool.take([2 * MIB])
    published = pool.directory / "published"
    file.move(published)
    looked: list[bool] = []
    real = PoolFile.mapped_elsewhere

    def mapped_elsewhere(self: PoolFile) -> bool:
        looked.append(published.exists())
        return real(self)

    monkeypatch.setattr(PoolFile, "mapped_elsewhere", mapped_elsewhere)
    pool.give_back([file])
    assert looked == [False]


def test_what_an_aborted_publisher_may_still_write_to_is_destroyed(pool: Pool) -> None:
    (file,) = pool.take([4 * MIB])
    passed = os.dup(file.fd)
    with mmap.mmap(passed, 4 * MIB) as stale:
        os.close(passed)
        pool.give_back([file], reuse=False)
        others = pool.take([4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB])
        stale[:] = b"\xff" * len(stale)
        assert [bytes(other.view()[:1]) for other in others] == [b"\0"] * 4
    pool.give_back(others)


def test_a_directory_belongs_to_one_relay(pool: Pool) -> None:
    with pytest.raises(Conflict, match="in use by another relay"):
        Pool(pool.directory, MIB)


def test_what_an_earlier_life_left_is_reclaimed(directory: Path) -> None:
    (directory / "snapshots/policy/v1").mkdir(parents=True)
    (directory / "snapshots/policy/v1/model.safetensors").write_bytes(b"old")
    pool = Pool(directory, MIB)
    assert not (directory / "snapshots").exists()
    pool.close()


@pytest.fixture
def store(pool: Pool) -> Store:
    return Store(pool)


def fill(snapshot: Snapshot) -> None:
    for index in snapshot.missing():
        place = snapshot.place(index)
        place[:] = bytes([index % 251]) * len(place)
        snapshot.present(index, digest(place))


def test_a_version_that_is_still_on_its_way_out_is_not_opened_again(store: Store) -> None:
    """Its removal would take the new one along."""
    old = store.open(manifest(1, 10_000))
    fill(old)
    store.publish(old)
    with pytest.raises(OutOfCapacity, match="another version 1 of policy is still on its way out"):
        store.open(manifest(1, 10_000))
    store.remove(old, "retention")
    new = store.open(manifest(1, 10_000))
    assert store.get("policy", 1) is new


def test_a_snapshot_appears_under_its_path_only_when_published(store: Store) -> None:
    snapshot = store.open(manifest(1, 10_000, 0, 5))
    fill(snapshot)
    assert snapshot.complete
    assert not (store.pool.directory / "snapshots/policy").exists()
    path = store.publish(snapshot)
    assert sorted(file.name for file in path.iterdir()) == ["f0", "f1", "f2"]
    assert (path / "f0").read_bytes()[:4096] == bytes(4096)
    assert (path / "f0").read_bytes()[4096:8192] == b"\x01" * 4096
    assert store.remove(snapshot, "retention") == 0
    assert not path.exists()
    assert store.get("policy", 1) is None


def test_a_version_larger_than_the_pool_is_refused_with_the_sizes(store: Store) -> None:
    with pytest.raises(TooLarge, match=f"takes {17 * MIB} bytes, the pool has {16 * MIB}"):
        store.open(manifest(1, 17 * MIB))


def test_waiters_wake_when_their_chunk_is_there_and_when_the_snapshot_goes(store: Store) -> None:
    snapshot = store.open(manifest(1, 5000))
    got: list[bytes | None] = []
    waiter = threading.Thread(target=lambda: got.append(snapshot.wait_chunk(1, 10.0)))
    waiter.start()
    snapshot.present(1, b"digest")
    waiter.join(5.0)
    assert got == [b"digest"]
    assert snapshot.wait_chunk(0, 0.0) is None
    store.remove(snapshot, "aborted")
    with pytest.raises(NotFound, match="is gone: aborted"):
        snapshot.wait_chunk(0, 10.0)
    with pytest.raises(Conflict, match="was closed: aborted"):
        snapshot.present(0, b"late")


def test_memory_is_not_given_back_while_somebody_reads_it(store: Store) -> None:
    snapshot = store.open(manifest(1, 5000))
    inside, leave, removed = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with snapshot.reading():
            inside.set()
            leave.wait(10.0)

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait(5.0)
    remover = threading.Thread(target=lambda: (store.remove(snapshot, "retention"), removed.set()))
    remover.start()
    assert not removed.wait(0.05)
    leave.set()
    assert removed.wait(5.0)
    reader.join(5.0)
    remover.join(5.0)


def test_a_chunk_that_changed_in_memory_is_found_when_it_is_checked(store: Store) -> None:
    snapshot = store.open(manifest(1, 5000))
    fill(snapshot)
    snapshot.recheck(0)
    snapshot.place(0)[7:8] = b"\xff"
    with pytest.raises(Corrupt, match="chunk 0 of version 1 of policy changed in memory"):
        snapshot.recheck(0)
