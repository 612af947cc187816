"""The pool and the snapshots in it, on a real tmpfs: warm reuse, and never under a reader's mapping."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from paramserver.core.notices import Notices
from paramserver.core.records import Epoch, FileSpec, Manifest, Sealed, digest
from paramserver.daemon.memory import find_again
from paramserver.memory import pool as pool_module
from paramserver.memory import store as store_module
from paramserver.memory import stored
from paramserver.memory.mapping import HUGE_BYTES, FileMapping, available_memory
from paramserver.memory.pool import Pool, PoolFile
from paramserver.memory.store import Snapshot, Store
from protos.errors import Conflict, Corrupt, NotFound, OutOfCapacity, TooLarge
from tests.sim.actors import abandon
from tests.support.skips import needs

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
    with pytest.raises(OutOfCapacity, match="2 MiB wanted, 1 MiB available"):
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


# ---- cut in advance


def free_sizes(pool: Pool) -> list[int]:
    return sorted(file.size_bytes for file in pool._free)


def test_free_memory_is_cut_to_the_sizes_of_the_next_version(pool: Pool) -> None:
    sizes = [MIB, MIB + 4096, 2 * MIB, 17]
    pool.expect("policy", sizes)
    assert pool.uncut
    pool.cut()
    assert not pool.uncut
    assert pool.reserve(sizes).ready
    pool.cut()
    assert pool.reserve(sizes).ready, "and again for the one after it"
    assert pool.statistics().used_bytes == 2 * sum(sizes)


def test_each_models_next_version_is_cut_for_as_far_as_there_is_room(pool: Pool) -> None:
    pool.expect("critic", [6 * MIB])
    pool.expect("reward", [9 * MIB])
    pool.expect("policy", [3 * MIB, 3 * MIB])
    pool.cut()
    assert pool.reserve([3 * MIB, 3 * MIB]).ready
    assert pool.reserve([9 * MIB]).ready, "the newest expected comes first"
    pool.cut()
    assert not pool.uncut, "there is no room for the others: nothing is cut in vain"
    assert pool.statistics().free_bytes == MIB


def test_what_was_cut_for_one_model_is_left_alone_while_another_finds_memory_elsewhere(pool: Pool) -> None:
    pool.expect("policy", [3 * MIB, 2 * MIB])
    pool.cut()
    taken = pool.take([5 * MIB, 5 * MIB])
    assert pool.reserve([3 * MIB, 2 * MIB]).ready
    with pytest.raises(OutOfCapacity):
        pool.take([2 * MIB])
    pool.give_back(taken)


def test_memory_promised_to_one_is_refused_to_others_and_free_again_when_released(pool: Pool) -> None:
    promised = pool.reserve([5 * MIB, 6 * MIB])
    assert not promised.ready
    with pytest.raises(OutOfCapacity, match="6 MiB wanted, 5 MiB available"):
        pool.reserve([6 * MIB])
    pool.release(promised)
    pool.give_back(pool.take([16 * MIB]))


def test_cutting_gives_way_to_who_wants_files_now(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, begun, go_on = os.posix_fallocate, threading.Event(), threading.Event()

    def slow(fd: int, offset: int, length: int) -> None:
        begun.set()
        assert go_on.wait(60.0)
        allocate(fd, offset, length)

    pool.expect("policy", [7 * MIB])
    monkeypatch.setattr(os, "posix_fallocate", slow)
    cutter = threading.Thread(target=pool.cut)
    cutter.start()
    assert begun.wait(60.0)
    allotment = pool.reserve([5 * MIB])
    filler = threading.Thread(target=pool.fill, args=(allotment,))
    filler.start()
    while not pool._num_filling:
        time.sleep(0.001)
    go_on.set()
    filler.join(60.0)
    cutter.join(60.0)
    assert allotment.ready
    assert (7 * MIB) not in free_sizes(pool), "what it had begun was given up"
    pool.cut()
    assert (7 * MIB) in free_sizes(pool)


def test_the_file_system_that_has_less_than_was_promised_costs_the_allotment_alone(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfCapacity, match="has no room for 5 MiB"):
        pool.take([4 * MIB, 5 * MIB])
    monkeypatch.undo()
    assert pool.statistics().used_bytes == 0
    pool.give_back(pool.take([4 * MIB, 5 * MIB]))


def test_files_of_the_sdks_default_size_are_cut_without_allocating(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "BLANK_BYTES_MAX", 2 * MIB)
    pool = Pool(directory / "pool", 16 * MIB)
    pool.preallocate()
    assert free_sizes(pool) == [2 * MIB] * 8
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was allocated"))
    pool.give_back(pool.take([2 * MIB - 4096] * 5))
    pool.close()


@pytest.fixture
def store(pool: Pool) -> Store:
    return Store(pool)


def fill(snapshot: Snapshot) -> None:
    for index in snapshot.missing():
        place = snapshot.place(index)
        place[:] = bytes([index % 251]) * len(place)
        snapshot.present(index, digest(place))


def sealed(snapshot: Snapshot) -> Sealed:
    return Sealed.of(snapshot.manifest, snapshot.root(), 1234567890.5, {"note": "a label"})


def test_a_version_that_is_still_on_its_way_out_is_not_opened_again(store: Store) -> None:
    """Its removal would take the new one along."""
    old = store.open(manifest(1, 10_000))
    fill(old)
    store.publish(old, sealed(old))
    with pytest.raises(OutOfCapacity, match="another version 1 of policy is still on its way out"):
        store.open(manifest(1, 10_000))
    with old.reading():
        removing = threading.Thread(target=store.remove, args=(old, "retention"))
        removing.start()
        wait_closed(old)
        with pytest.raises(OutOfCapacity, match="another version 1 of policy is still on its way out"):
            store.open(manifest(1, 10_000))
    removing.join(60.0)
    new = store.open(manifest(1, 10_000))
    assert store.get("policy", 1) is new


def wait_closed(snapshot: Snapshot) -> None:
    deadline = time.monotonic() + 60.0
    with contextlib.suppress(NotFound):
        while time.monotonic() < deadline:
            snapshot.check_open()
            threading.Event().wait(0.005)
        raise AssertionError("its removal did not begin")


def test_a_snapshot_appears_under_its_path_only_when_published(store: Store) -> None:
    snapshot = store.open(manifest(1, 10_000, 0, 5))
    fill(snapshot)
    assert snapshot.complete
    assert not (store.pool.directory / "snapshots/policy").exists()
    path = store.publish(snapshot, sealed(snapshot))
    assert sorted(file.name for file in path.iterdir()) == ["f0", "f1", "f2"]
    assert (path / "f0").read_bytes()[:4096] == bytes(4096)
    assert (path / "f0").read_bytes()[4096:8192] == b"\x01" * 4096
    assert store.remove(snapshot, "retention") == 0
    assert not path.exists()
    assert store.get("policy", 1) is None


def test_a_version_larger_than_the_pool_is_refused_with_the_sizes(store: Store) -> None:
    with pytest.raises(TooLarge, match="takes 17 MiB, the pool has 16 MiB"):
        store.open(manifest(1, 17 * MIB))


def test_waiters_wake_when_their_chunk_is_there_and_when_the_snapshot_goes(store: Store) -> None:
    snapshot = store.open(manifest(1, 5000))
    got: list[bytes | None] = []
    waiter = threading.Thread(target=lambda: got.append(snapshot.wait_chunk(1, 60.0)))
    waiter.start()
    snapshot.present(1, b"digest")
    waiter.join(60.0)
    assert got == [b"digest"]
    assert snapshot.wait_chunk(0, 0.0) is None
    store.remove(snapshot, "aborted")
    with pytest.raises(NotFound, match="is gone: aborted"):
        snapshot.wait_chunk(0, 60.0)
    with pytest.raises(Conflict, match="was closed: aborted"):
        snapshot.present(0, b"late")


def test_memory_is_not_given_back_while_somebody_reads_it(store: Store) -> None:
    snapshot = store.open(manifest(1, 5000))
    inside, leave, removed = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with snapshot.reading():
            inside.set()
            leave.wait(60.0)

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait(60.0)
    remover = threading.Thread(target=lambda: (store.remove(snapshot, "retention"), removed.set()))
    remover.start()
    assert not removed.wait(0.05)
    leave.set()
    assert removed.wait(60.0)
    reader.join(60.0)
    remover.join(60.0)


def test_a_chunk_that_changed_in_memory_is_found_when_it_is_checked(store: Store) -> None:
    snapshot = store.open(manifest(1, 5000))
    fill(snapshot)
    snapshot.recheck(0)
    snapshot.place(0)[7:8] = b"\xff"
    with pytest.raises(Corrupt, match="chunk 0 of version 1 of policy changed in memory"):
        snapshot.recheck(0)


def test_who_takes_too_long_inside_a_version_that_goes_is_broken_off(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "GRACE_S", 0.01)
    snapshot = store.open(manifest(1, 5000))
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with snapshot.reading(leave.set):
            inside.set()
            assert leave.wait(60.0)

    reader = threading.Thread(target=read)
    reader.start()
    assert inside.wait(60.0)
    assert store.remove(snapshot, "retention") == 0
    reader.join(60.0)
    assert store.pool.statistics().used_bytes == 0


def test_descriptors_that_leave_while_a_version_is_given_up_keep_its_memory_from_being_reused(store: Store) -> None:
    """The publisher maps what it got, and no check of the kernel's sees that."""
    snapshot = store.open(manifest(1, 2 * MIB))
    passed: list[int] = []
    inside, remover = threading.Event(), threading.Thread(target=lambda: store.remove(snapshot, "aborted"))
    with snapshot.reading():
        remover.start()
        snapshot.written_elsewhere = True
        passed.append(os.dup(snapshot.files[0].fd))
        inside.set()
    remover.join(60.0)
    with mmap.mmap(passed[0], 2 * MIB) as stale:
        os.close(passed[0])
        files = store.pool.take([2 * MIB] * 8)
        stale[:5] = b"stale"
        assert all(bytes(file.view()[:5]) != b"stale" for file in files)


def test_the_record_of_a_version_has_its_room_before_the_version_comes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines prove a version by its record: a tmpfs that others fill meanwhile must not keep it from them."""
    snapshot = store.open(manifest(1, 10_000, 0, 5), labels={"note": "a label"})
    (partial,) = store.pool.directory.glob("records/policy/*")
    reserved = partial.stat()
    assert reserved.st_blocks * 512 >= reserved.st_size
    fill(snapshot)
    path = store.publish(snapshot, sealed(snapshot))
    (record,) = store.pool.directory.glob("records/policy/*")
    assert record.stat().st_ino == reserved.st_ino
    assert record.stat().st_size <= reserved.st_size
    assert stored.beside(path).sealed == sealed(snapshot)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfCapacity, match=r"the file system of .* is full"):
        store.open(manifest(2, 10_000))


def test_a_record_that_could_not_be_written_is_written_as_soon_as_it_can_be(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    snapshot = store.open(manifest(1, 10_000))
    fill(snapshot)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_record", failing)
        path = store.publish(snapshot, sealed(snapshot))
    with pytest.raises(NotFound, match="has no record"):
        stored.beside(path)
    store.record_shown()
    assert stored.beside(path).root_digest == snapshot.root()


# ---- file systems without leases


def no_leases(fd: int, command: int, argument: int = 0) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_without_leases_memory_is_never_reused_and_readers_keep_what_they_map(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module.fcntl, "fcntl", no_leases)
    pool = Pool(directory / "pool", 16 * MIB)
    assert "knows no leases (Invalid argument)" in caplog.text
    pool.preallocate()
    (file,) = pool.take([4 * MIB])
    file.view()[:5] = b"first"
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert pool.give_back([file]) == 0
        assert pool.sweep() == 0
        files = pool.take([4 * MIB] * 4)
        for other in files:
            other.view()[:5] = b"other"
        assert mapping[:5] == b"first"
    pool.give_back(files)
    assert pool.statistics().used_bytes == 0
    pool.close()


def test_a_file_whose_readers_nobody_can_tell_costs_itself_alone(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = pool.take([4 * MIB, 2 * MIB])
    with monkeypatch.context() as patch:
        patch.setattr(pool_module.fcntl, "fcntl", no_leases)
        assert pool.give_back(files[:1]) == 4 * MIB
        assert pool.sweep() == 4 * MIB
    assert caplog.text.count("cannot be checked for readers") == 1
    assert pool.uncut
    pool.cut()
    assert pool.sweep() == 0
    pool.give_back(files[1:])
    pool.give_back(pool.take([16 * MIB]))


def test_free_memory_that_makes_room_is_nobodys_though_a_publisher_kept_its_mapping(pool: Pool) -> None:
    """It unmaps what it kept when it publishes next: until then the host would hold that beside the pool."""
    files = pool.take([6 * MIB, 6 * MIB])
    kept = [os.dup(file.fd) for file in files]
    maps = [mmap.mmap(fd, 6 * MIB) for fd in kept]
    assert pool.give_back(files) == 0
    pool.take([15 * MIB])
    assert sum(os.fstat(fd).st_blocks for fd in kept) * 512 <= MIB, "what is left of the pool"
    for one, fd in zip(maps, kept, strict=True):
        one.close()
        os.close(fd)


# ---- huge pages


def small_pages_only(mapping: FileMapping, start: int, num_bytes: int) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def huge_bytes(file: PoolFile) -> int:
    """How much of the file is mapped here by huge pages."""
    file.touch()
    rows = Path("/proc/self/smaps").read_text().splitlines()
    start = next(at for at, row in enumerate(rows) if row.endswith(str(file.path)))
    row = next(row for row in rows[start:] if row.startswith("ShmemPmdMapped:"))
    return int(row.split()[1]) << 10


def test_a_file_costs_its_size_whether_in_huge_pages_or_not(directory: Path) -> None:
    pool = Pool(directory / "pool", 32 * MIB)
    sizes = [9 * MIB + 5, 4 * MIB, 2 * MIB - 1, 17]
    for file, size in zip(pool.take(sizes), sizes, strict=True):
        held = os.fstat(file.fd).st_blocks * 512
        assert size <= held < size + 4096
    pool.close()


def test_memory_is_in_huge_pages_as_far_as_they_fit_and_the_rest_of_a_cut_one_is_given_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str | None] = []
    collapse = FileMapping.collapse

    def noted(mapping: FileMapping, start: int, num_bytes: int) -> None:
        try:
            collapse(mapping, start, num_bytes)
        except OSError as error:  # of an old kernel, or of one whose memory is in pieces just now
            refused.append(error.strerror)
            raise

    monkeypatch.setattr(FileMapping, "collapse", noted)
    pool = Pool(directory / "pool", 16 * MIB)
    (file,) = pool.take([9 * MIB])
    found = huge_bytes(file)
    file.view()[-5:] = b"whole"
    pool.give_back([file])
    (cut,) = pool.take([5 * MIB])
    assert inode(cut.fd) == inode(file.fd)
    assert os.fstat(cut.fd).st_blocks * 512 == 5 * MIB
    left = huge_bytes(cut)
    pool.close()
    if refused:
        pytest.skip(needs(f"huge pages in shared memory ({refused[0]})", "Linux 6.1, and memory to spare"))
    assert (found, left) == (8 * MIB, 4 * MIB)


def test_a_kernel_that_makes_no_huge_pages_is_said_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FileMapping, "collapse", small_pages_only)
    pool_module._log_small.cache_clear()
    caplog.set_level("DEBUG")
    pool = Pool(directory / "pool", 16 * MIB)
    pool.preallocate()
    assert caplog.text.count("stays in small pages: Invalid argument") == 1
    for file in pool.take([4 * MIB, 4 * MIB]):
        assert os.fstat(file.fd).st_blocks * 512 == 4 * MIB
        file.view()[:5] = b"bytes"
    pool.close()


def test_a_mapping_begins_where_huge_pages_do_and_goes_with_its_last_view(directory: Path) -> None:
    with (directory / "file").open("w+b") as file:
        file.truncate(3 * MIB)
        mapping = FileMapping(file.fileno(), 3 * MIB)
    view = mapping.view()
    assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % HUGE_BYTES == 0
    assert len(view) == len(mapping) == 3 * MIB
    mapping.close()
    view[-4:] = b"last"
    assert (directory / "file").read_bytes()[-4:] == b"last"
    assert str(directory / "file") in Path("/proc/self/maps").read_text()
    view.release()
    mapping.close()
    assert str(directory / "file") not in Path("/proc/self/maps").read_text()


def test_a_detached_mapping_holds_its_file_no_more_and_its_views_stay_readable(directory: Path) -> None:
    with (directory / "file").open("w+b") as file:
        file.truncate(3 * MIB)
        mapping = FileMapping(file.fileno(), 3 * MIB)
    view = mapping.view()
    view[:4] = b"kept"
    mapping.detach()
    assert str(directory / "file") not in Path("/proc/self/maps").read_text()
    assert bytes(view[:4]) == bytes(4)
    view[:4] = b"lost"
    assert (directory / "file").read_bytes()[:4] == b"kept"


def test_what_cannot_be_mapped_is_refused_with_its_reason() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        FileMapping(-1, MIB)


def test_a_file_with_a_hard_link_is_not_written_again_before_the_link_goes(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = pool.take([4 * MIB])
    file.view()[:5] = b"first"
    kept = pool.directory.parent / "kept"
    os.link(file.path, kept)
    assert pool.give_back([file]) == 4 * MIB
    assert "has another name (a hard link)" in caplog.text
    others = pool.take([4 * MIB] * 3)
    for other in others:
        other.view()[:5] = b"other"
    with pytest.raises(OutOfCapacity):
        pool.take([4 * MIB])
    assert kept.read_bytes()[:5] == b"first"
    kept.unlink()
    assert pool.sweep() == 0
    pool.give_back(pool.take([4 * MIB]) + others)


def test_files_that_are_free_leave_descriptors_to_those_that_are_wanted(pool: Pool) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (pool_module.DESCRIPTORS_KEPT + 200, limits[1]))
    try:
        for size in range(1000, 10_000, 1000):  # a layout of its own each time: no file is of use to the next version
            pool.give_back(pool.take([size] * 150))
            assert len(os.listdir("/proc/self/fd")) <= others + 200
        pool.give_back(pool.take([16 * MIB]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_sizes_that_differ_by_little_are_told_apart(pool: Pool, store: Store) -> None:
    with pytest.raises(OutOfCapacity, match="16,777,217 bytes wanted, 16,777,216 bytes available in the pool"):
        pool.take([16 * MIB + 1])
    with pytest.raises(TooLarge, match=r"takes [0-9,]+ bytes, the pool has [0-9,]+ bytes"):
        store.check_size("it", store.pool.pool_bytes + 1)


def test_a_smaller_pool_keeps_every_models_newest_and_of_those_the_last_sealed(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(Pool(directory / "pool", 16 * MIB))
    for at, (model, version) in enumerate([("b", 1), ("b", 2), ("c", 7), ("c", 8), ("a", 3), ("a", 4)]):
        snapshot = store.open(msgspec.structs.replace(manifest(version, MIB), model=model))
        fill(snapshot)
        store.publish(snapshot, Sealed.of(snapshot.manifest, snapshot.root(), 100.0 + at, {}))
    abandon(store.pool)
    for pool_bytes, kept in ((4 * MIB, ["a4", "c8", "b2", "a3"]), (2 * MIB, ["a4", "c8"])):
        left = stored.find(directory / "pool")
        smaller = Pool(directory / "pool", pool_bytes, keep=[path for one in left for path in one.paths])
        found = find_again(Store(smaller, left), left, Notices())
        assert [f"{one.manifest.model}{one.manifest.version}" for one in found] == kept
        abandon(smaller)
    assert "version 2 of b, left by an earlier life, is dropped: 1 MiB wanted, 0 B left of --pool-bytes" in caplog.text


def allocated(directory: Path) -> int:
    """Of the files of versions, free ones included; records are small."""
    files = [path for kind in ("free", "snapshots") for path in (directory / "pool" / kind).rglob("*")]
    return sum(path.stat().st_blocks * 512 for path in files if path.is_file())


@pytest.mark.parametrize("pool_bytes", [16 * MIB, 8 * MIB], ids=["as before", "smaller"])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_memory_of_what_turns_out_damaged_is_the_pools_and_no_more_than_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, pool_bytes: int, is_mapped: bool
) -> None:
    store = Store(Pool(directory / "pool", 16 * MIB))
    for version in (1, 2, 3):
        snapshot = store.open(manifest(version, 4 * MIB))
        fill(snapshot)
        store.publish(snapshot, sealed(snapshot))
    abandon(store.pool)
    left = stored.find(directory / "pool")
    damaged = left[0].files[0]
    with damaged.open("r+b") as file:
        file.seek(MIB)
        file.write(b"damage")
    pool = Pool(directory / "pool", pool_bytes, keep=[path for one in left for path in one.paths])
    with damaged.open("rb") as file:
        reader = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if is_mapped else None
    found = find_again(Store(pool, left), left, Notices())
    assert len(found) == (1 if is_mapped and pool_bytes == 8 * MIB else 2)
    free_bytes = pool_bytes - allocated(directory)  # a file system made for this pool
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
    pool.preallocate()
    statistics = pool.statistics()
    assert statistics.quarantined_bytes == (4 * MIB if is_mapped else 0)
    assert allocated(directory) <= pool_bytes
    if reader is not None:
        reader.close()
    pool.close()


def test_a_containers_limit_counts_where_it_leaves_less_than_the_host_has(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for folder in (tmp_path / "proc", group):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemFree:  10 kB\nMemAvailable:    4096 kB\nSwapFree:      1024 kB\n")
    assert available_memory(tmp_path) == 5 << 20
    for limit, available in (("max", 5 << 20), (f"{6 << 20}", 4 << 20), (f"{1 << 20}", 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{3 << 20}\n")
        (group / "memory.stat").write_text(f"anon 100\nactive_file {512 << 10}\ninactive_file {512 << 10}\n")
        assert available_memory(tmp_path) == available
    assert available_memory() > 0


def test_more_than_the_hosts_memory_is_refused_before_any_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.memory.pool.mount_of", lambda _: ("tmpfs", ""))
    monkeypatch.setattr("paramserver.memory.pool.available_memory", lambda: 1 << 20)
    pool = Pool(tmp_path / "pool", 2 << 20)
    with pytest.raises(OutOfCapacity, match=r"needs 2 MiB, and this host has 1 MiB of memory available \(lower"):
        pool.preallocate()
    assert [path for path in (tmp_path / "pool").rglob("*") if path.is_file() and path.stat().st_size > 1 << 16] == []
    pool.close()
    smaller = Pool(tmp_path / "pool", 1 << 20)
    smaller.preallocate()
    smaller.close()
