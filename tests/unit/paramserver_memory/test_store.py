"""The snapshots of one relay: who may open a number, and when."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from paramserver.core.records import Epoch, FileSpec, Manifest, Sealed, digest
from paramserver.memory.pool import Pool
from paramserver.memory.store import Snapshot, Store
from protos.errors import NotFound, OutOfCapacity

MANIFEST = Manifest("policy", 1, "run", 0, Epoch("store", 1), (FileSpec("w", 10_000),), chunk_bytes=4096)


def show(store: Store) -> Snapshot:
    snapshot = store.open(MANIFEST)
    for index in snapshot.missing():
        snapshot.present(index, digest(snapshot.place(index)))
    store.publish(snapshot, Sealed.of(MANIFEST, snapshot.root(), 1.0, {}))
    return snapshot


def wait_closed(snapshot: Snapshot) -> None:
    deadline = time.monotonic() + 60.0
    with contextlib.suppress(NotFound):
        while time.monotonic() < deadline:
            snapshot.check_open()
            threading.Event().wait(0.005)
        raise AssertionError("its removal did not begin")


def test_a_number_is_taken_until_the_memory_of_its_last_snapshot_is_back(tmp_path: Path) -> None:
    store = Store(Pool(tmp_path / "pool", 1 << 20))
    old = show(store)
    with old.reading():
        removing = threading.Thread(target=store.remove, args=(old, "damaged"))
        removing.start()
        wait_closed(old)
        with pytest.raises(OutOfCapacity, match="another version 1 of policy is still on its way out"):
            store.open(MANIFEST)
    removing.join(60.0)
    new = show(store)
    assert new.directory.is_dir()
    assert list((tmp_path / "pool" / "records" / "policy").iterdir()) == [tmp_path / "pool/records/policy/v00000001"]
    store.close()
