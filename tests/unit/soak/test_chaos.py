"""Faults are drawn by seed, in bounded times, and leave one of each kind alive in the second half."""

from __future__ import annotations

import itertools

import pytest

from tests.soak.chaos import PERIOD_S, TABLE, faults, spared

PARTS = {
    **{kind: [f"{kind}-{n}" for n in (1, 2, 3)] for kind in ("engine", "relay", "gateway", "runner")},
    "trainer": ["trainer"],
    "redis": ["redis"],
    "etcd": ["etcd"],
    "link": ["a", "b"],
    "disk": ["gateway-1", "redis"],
    "shm": ["relay-1"],
    "clock": ["gateway-1", "relay-1"],
}


def test_a_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert list(faults(PARTS, 1, 3600)) == list(faults(PARTS, 1, 3600)) != list(faults(PARTS, 2, 3600))


def test_every_row_of_the_table_is_drawn_in_some_hours_and_times_are_those_of_the_table() -> None:
    drawn = list(faults(PARTS, 3, 4 * 3600))
    assert {fault.action for fault in drawn} == {row.action for row in TABLE}
    for before, after in itertools.pairwise(drawn):
        assert PERIOD_S[0] <= after.at_s - before.at_s <= PERIOD_S[1]
    killed = {fault.target for fault in drawn if fault.action == "kill"}
    assert killed == {
        name for kind in ("engine", "relay", "gateway", "runner", "trainer", "redis", "etcd") for name in PARTS[kind]
    }


@pytest.mark.parametrize("seed", range(8))
def test_the_first_faults_are_one_of_each_row(seed: int) -> None:
    first = list(faults(PARTS, seed, 4 * 3600))[: len(TABLE)]
    rows = {
        (f.action, next(kind for kind in PARTS if f.target in PARTS[kind]))
        for f in first
        if f.action in ("kill", "stop")
    }
    assert rows == {(row.action, row.part) for row in TABLE if row.action in ("kill", "stop")}
    assert {f.action for f in first} == {row.action for row in TABLE}


def test_one_process_of_each_kind_lives_through_the_second_half() -> None:
    kept = spared(PARTS, 3)
    assert sorted(name.partition("-")[0] for name in kept) == ["engine", "gateway", "relay", "runner"]
    late = {f.target for f in faults(PARTS, 3, 4 * 3600) if f.action == "kill" and f.at_s >= 2 * 3600}
    assert not kept & late
    assert {"trainer", "redis", "etcd"} <= late, "of which there is one"


def test_what_a_machine_cannot_do_is_not_drawn() -> None:
    less = {kind: names for kind, names in PARTS.items() if kind not in ("disk", "shm", "clock")}
    actions = {fault.action for fault in faults(less, 1, 4 * 3600)}
    assert not actions & {"full disk", "full shm", "clock step"}
    assert "kill" in actions


def test_a_fault_is_told_in_a_line() -> None:
    shown = {fault.action: str(fault) for fault in faults(PARTS, 3, 4 * 3600)}
    assert "KiB/s" in shown["slow link"]
    assert " s" in shown["clock step"]
