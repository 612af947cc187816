"""The life of versions on one relay: stories as event lists, and random ones that keep the invariants."""

from __future__ import annotations

import random

import msgspec
import pytest

from paramserver.core.records import Announced, Ended, Epoch, FileSpec, Manifest, Plan, Sealed
from paramserver.core.versions import TRANSITIONS, Drop, Fetch, ModelVersions, Notify, Show

EPOCH = Epoch("store", 1)


def announced(version: int) -> Announced:
    manifest = Manifest("policy", version, "run", version * 10, EPOCH, (FileSpec("f", 4),))
    return Announced(manifest, Plan(EPOCH, 1, ("a", "b")))


def sealed(version: int, root: str = "root") -> Sealed:
    return Sealed("policy", version, version * 10, "run", root, 4, 0.0)


def versions(retain: int = 2) -> ModelVersions:
    return ModelVersions("policy", retain=retain)


def bring(model: ModelVersions, version: int) -> None:
    """The whole good life up to shown."""
    model.announced(announced(version))
    assert model.next_fetch() == [Fetch(announced(version))]
    model.opened(announced(version))
    model.filled(version, "root")
    model.sealed(sealed(version))


def test_a_version_is_shown_only_when_it_is_complete_and_sealed() -> None:
    model = versions()
    model.announced(announced(1))
    model.opened(announced(1))
    assert model.filled(1, "root") == []
    assert model.shown() == []
    assert model.sealed(sealed(1)) == [Notify("sealed", sealed(1)), Show(sealed(1)), Notify("available", sealed(1))]
    assert model.shown() == [sealed(1)]


def test_bytes_that_are_whole_too_late_change_nothing() -> None:
    model = versions()
    model.opened(announced(1))
    model.ended(1, Ended("aborted", "its publisher left"))
    assert model.filled(1, "root") == []
    assert model.get(1).stage == "ended"  # type: ignore[union-attr]


def test_what_was_withdrawn_here_may_be_lost_to_everybody_later() -> None:
    model = versions()
    bring(model, 1)
    model.withdrawn(1, "a chunk changed in memory")
    assert model.ended(1, Ended("lost", "no verified holder is left")) == [Notify("lost", sealed(1))]
    assert model.newest_sealed is None


def test_a_number_that_another_master_gave_again_loses_what_it_meant_here() -> None:
    model = versions()
    bring(model, 1)
    other = Announced(msgspec.structs.replace(announced(1).manifest, epoch=Epoch("store", 2)), announced(1).plan)
    drop, told = model.announced(other)
    assert (drop, told) == (Drop(1, "another master gave its number to another version"), Notify("lost", sealed(1)))
    assert model.shown() == []
    assert model.next_fetch() == [Fetch(other)]


def test_the_seal_may_come_before_the_last_byte() -> None:
    model = versions()
    model.announced(announced(1))
    model.opened(announced(1))
    assert model.sealed(sealed(1)) == [Notify("sealed", sealed(1))]
    assert model.filled(1, "root") == [Show(sealed(1)), Notify("available", sealed(1))]


def test_bytes_that_do_not_match_the_sealed_root_are_never_shown() -> None:
    model = versions()
    model.opened(announced(1))
    model.sealed(sealed(1, root="other"))
    (drop,) = model.filled(1, "root")
    assert isinstance(drop, Drop)
    assert model.shown() == []
    assert model.next_fetch() == []


def test_one_version_is_fetched_at_a_time_oldest_first() -> None:
    model = versions()
    model.announced(announced(2))
    model.announced(announced(1))
    assert model.next_fetch() == [Fetch(announced(1))]
    model.opened(announced(1))
    assert model.next_fetch() == []
    model.filled(1, "root")
    assert model.next_fetch() == [Fetch(announced(2))]


def test_a_version_that_nobody_needs_any_more_is_skipped() -> None:
    model = versions()
    for version in (1, 2, 3):
        model.announced(announced(version))
        model.sealed(sealed(version))
    assert model.next_fetch() == [Fetch(announced(3))]
    assert [(version, state.stage) for version, state in model.items()] == [
        (1, "skipped"),
        (2, "skipped"),
        (3, "known"),
    ]


def test_what_was_skipped_or_retired_gets_its_turn_once_all_that_was_newer_is_lost() -> None:
    model = versions(retain=1)
    bring(model, 1)
    for version in (2, 3):
        model.announced(announced(version))
        model.sealed(sealed(version))
    assert model.next_fetch() == [Fetch(announced(3))], "2 is skipped"
    model.opened(announced(3))
    model.filled(3, "root")
    model.retire({})
    for lost, next_best in ((3, 2), (2, 1)):
        model.ended(lost, Ended("lost", "no verified holder is left"))
        assert model.next_fetch() == [Fetch(announced(next_best))]
        assert not model.settled


def test_what_was_withdrawn_here_is_had_again_from_others_or_from_disk() -> None:
    model = versions()
    bring(model, 1)
    model.withdrawn(1, "a chunk changed in memory")
    assert not model.settled
    assert model.next_fetch() == [Fetch(announced(1))]
    model.opened(announced(1))
    assert model.filled(1, "root") == [Show(sealed(1)), Notify("available", sealed(1))]


def left(version: int, revision: int = 5, store_id: str = "store") -> tuple[Manifest, Sealed]:
    manifest = msgspec.structs.replace(announced(version).manifest, epoch=Epoch(store_id, revision))
    return manifest, Sealed.of(manifest, "root", 0.0, {})


def restored(*records: tuple[int, int, str]) -> ModelVersions:
    """What it has after its restore: versions by number, the revision of their master, and what became of them."""
    model = versions()
    for version, revision, what in records:
        manifest, record = left(version, revision)
        model.announced(Announced(manifest, Plan(manifest.epoch, 1, ())))
        if what == "sealed":
            model.sealed(record)
        elif what == "aborted":
            model.ended(version, Ended("aborted", "reason"))
    return model


@pytest.mark.parametrize(
    ("records", "lost", "apart", "twice"),
    [
        ([], [2, 3], [], []),
        ([(1, 5, "sealed")], [2, 3], [], []),
        ([(1, 4, "sealed")], [2, 3], [], []),  # its master died after the backup
        ([(1, 5, "sealed"), (2, 5, "announced")], [2, 3], [], []),  # the backup was made before the seal
        ([(1, 5, "sealed"), (2, 5, "aborted")], [3], [], []),
        ([(2, 5, "sealed")], [3], [], []),
        ([(3, 5, "sealed")], [], [], []),  # 2 was dropped, or is long past
        ([(4, 9, "sealed")], [], [], []),
        ([(1, 9, "sealed")], [], [2, 3], []),  # sealed since, by the next master
        ([(1, 5, "sealed"), (2, 9, "sealed")], [], [3], [2]),
        ([(1, 5, "sealed"), (2, 9, "announced")], [], [3], [2]),
        ([(1, 5, "sealed"), (2, 3, "sealed")], [], [3], [2]),  # revisions went back with the registry
        ([(1, 5, "sealed"), (2, 9, "aborted")], [3], [], []),  # no weights of it are left
    ],
    ids=str,
)
def test_a_registry_that_went_back_lost_what_is_newer_than_all_it_has_unless_it_has_gone_on(
    records: list[tuple[int, int, str]], lost: list[int], apart: list[int], twice: list[int]
) -> None:
    gone = restored(*records).gone_back([left(2), left(3)], "store")
    found = ([of.version for of, _ in gone.lost], list(gone.apart), list(gone.twice))
    assert found == (lost, apart, twice)


def test_what_a_registry_sealed_itself_is_later_than_what_it_continues() -> None:
    assert [of.version for of, _ in restored((1, 5, "sealed")).gone_back([left(2, 3, "new")], "new").lost] == [2]
    assert restored((1, 5, "sealed")).gone_back([left(2, 9, "before")], "store").apart == (2,)


def test_a_copy_for_the_fleet_is_fetched_again_after_what_is_new_and_outside_the_chain() -> None:
    model = versions(retain=1)
    for version in (1, 2):
        bring(model, version)
    model.retire({})
    model.announced(announced(3))
    model.sealed(sealed(3))
    model.announced(announced(4))
    model.copy_here({1})
    assert model.next_fetch() == [Fetch(announced(3))]
    model.opened(announced(3))
    model.filled(3, "root")
    model.opened(announced(4))
    model.filled(4, "root")
    [fetch] = model.next_fetch()
    assert isinstance(fetch, Fetch)
    assert (fetch.announced.manifest.version, fetch.copy, fetch.announced.plan.order) == (1, True, ())
    model.copy_here(())
    assert model.next_fetch() == [], "nobody wants it any more"
    model.copy_here({1, 3})
    assert model.next_fetch() == [fetch], "3 is here"
    model.opened(fetch.announced)
    assert model.filled(1, "root") == [Show(sealed(1)), Notify("available", sealed(1))]
    assert model.retire({}) == [
        Drop(1, "retention"),
        Notify("retired", sealed(1)),
        Drop(2, "retention"),
        Notify("retired", sealed(2)),
    ]


def test_what_is_pinned_for_the_fleet_is_not_forgotten() -> None:
    model = versions(retain=1)
    for version in range(1, 6):
        bring(model, version)
    model.retire({})
    assert model.forgettable(1, pinned=[2]) == [1, 3, 4]
    model.forget([1, 3, 4])
    model.copy_here({2})
    [fetch] = model.next_fetch()
    assert isinstance(fetch, Fetch)
    assert fetch.announced.manifest.version == 2


def test_a_fetch_that_failed_is_tried_again_unless_overtaken() -> None:
    model = versions()
    model.announced(announced(1))
    model.opened(announced(1))
    model.gave_up(1)
    assert model.next_fetch() == [Fetch(announced(1))]
    model.sealed(sealed(2))
    assert model.next_fetch() == []


def test_retention_keeps_the_newest_and_what_is_pinned() -> None:
    model = versions(retain=2)
    for version in (1, 2, 3, 4):
        bring(model, version)
    assert model.retire({1: 1}) == [Drop(2, "retention"), Notify("retired", sealed(2))]
    assert [record.version for record in model.shown()] == [1, 3, 4]
    assert model.retire({1: 1}) == []
    assert model.retire({}) == [Drop(1, "retention"), Notify("retired", sealed(1))]


def test_an_aborted_version_is_dropped_and_only_a_sealed_one_is_told_as_lost() -> None:
    model = versions()
    model.opened(announced(1))
    assert model.ended(1, Ended("aborted", "publisher left")) == [Drop(1, "aborted: publisher left")]
    bring(model, 2)
    assert model.ended(2, Ended("lost", "gone")) == [Drop(2, "lost: gone"), Notify("lost", sealed(2))]
    assert model.newest_sealed is None
    assert model.newest_known == 2


def test_bad_memory_withdraws_this_relay_only() -> None:
    model = versions()
    bring(model, 1)
    assert model.withdrawn(1, "bit flip") == [Drop(1, "bit flip"), Notify("lost", sealed(1))]
    assert model.withdrawn(1, "again") == []
    assert model.newest_sealed == 1


def test_old_numbers_are_forgotten_but_never_what_is_still_here() -> None:
    model = versions(retain=1)
    for version in range(1, 7):
        bring(model, version)
    model.retire({2: 1})
    assert model.forgettable(2) == [1, 3, 4]
    model.forget([1, 3, 4])
    assert [record.version for record in model.shown()] == [2, 6]
    assert model.newest_known == 6


def test_the_next_number_is_above_all_that_were_seen_and_all_that_others_may_have_seen() -> None:
    model = versions()
    assert model.next_number == 1
    bring(model, 1)
    assert model.next_number == 2
    model.skip_to(1001)
    assert model.next_number == 1001
    bring(model, 1012)
    model.skip_to(1002)
    assert model.next_number == 1013


def test_events_that_come_twice_change_nothing() -> None:
    model = versions()
    bring(model, 1)
    assert model.sealed(sealed(1)) == []
    assert model.announced(announced(1)) == []
    model.ended(1, Ended("lost", "gone"))
    assert model.ended(1, Ended("lost", "gone")) == []
    assert model.sealed(sealed(1)) == []


def test_every_stage_has_a_row_and_ended_is_final() -> None:
    assert {stage for row in TRANSITIONS.values() for stage in row} | {"known"} == set(TRANSITIONS)
    assert TRANSITIONS["ended"] == frozenset()


def test_retain_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="retain is 0"):
        versions(retain=0)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_in_whatever_order_the_invariants_hold(seed: int) -> None:
    rng = random.Random(seed)
    model = versions(retain=rng.randint(1, 3))
    dropped: set[int] = set()
    for _ in range(300):
        version = rng.randint(1, 12)
        state = model.get(version)
        effects = []
        match rng.choice(["announced", "sealed", "ended", "fetch", "filled", "gave_up", "retire", "copy"]):
            case "announced":
                effects = model.announced(announced(version))
            case "sealed":
                effects = model.sealed(sealed(version, rng.choice(["root"] * 5 + ["bad"])))
            case "ended" if rng.random() < 0.1:
                effects = model.ended(version, Ended("lost", "x"))
            case "fetch":
                for effect in model.next_fetch():
                    assert isinstance(effect, Fetch)
                    model.opened(effect.announced)
                    dropped.discard(effect.announced.manifest.version)
            case "copy":
                model.copy_here({version})
            case "filled" if state is not None and state.stage == "filling":
                effects = model.filled(version, "root")
            case "gave_up" if state is not None and state.stage == "filling":
                model.gave_up(version)
            case "retire":
                effects = model.retire({rng.randint(1, 12): 1})
        for effect in effects:
            if isinstance(effect, Drop):
                assert effect.version not in dropped, "memory goes back once"
                dropped.add(effect.version)
        check_invariants(model, dropped)


def check_invariants(model: ModelVersions, dropped: set[int]) -> None:
    stages = [state.stage for _, state in model.items()]
    assert stages.count("filling") <= 1
    for record in model.shown():
        state = model.get(record.version)
        assert state is not None
        assert state.root == record.root_digest
        assert state.ended is None
        assert record.version not in dropped


def test_what_was_dropped_is_known_no_more_and_its_numbers_are_not_given_again() -> None:
    versions = ModelVersions("policy", retain=2)
    assert versions.dropped(3) == []
    versions.holder(2, "b", present=False)
    versions.spilled(2, "b", present=False)
    assert versions.empty, "what leaves a version that is not known makes it no known one"
    assert versions.next_number == 3


def test_who_looks_only_at_what_is_not_settled_misses_nothing() -> None:
    versions = ModelVersions("policy", retain=1)
    revisions = [versions.revision]

    def changed() -> bool:
        revisions.append(versions.revision)
        return revisions[-1] != revisions[-2]

    assert versions.settled
    versions.announced(announced(1))
    assert (changed(), versions.settled) == (True, False), "it is to be fetched"
    versions.opened(announced(1))
    assert (changed(), versions.settled) == (True, False)
    versions.filled(1, "root")
    assert (changed(), versions.settled) == (True, False), "its seal may come"
    versions.sealed(sealed(1))
    assert (changed(), versions.settled, versions.newest_sealed) == (True, True, 1)
    versions.retire({})
    assert not changed()
    versions.announced(announced(2))
    versions.opened(announced(2))
    versions.filled(2, "root")
    versions.sealed(sealed(2))
    assert (changed(), versions.settled, versions.newest_sealed) == (True, False, 2), "there is one more than retained"
    versions.retire({})
    assert (changed(), versions.settled) == (True, True)
    versions.ended(2, Ended("lost", "gone"))
    assert (changed(), versions.newest_sealed) == (True, 1)
