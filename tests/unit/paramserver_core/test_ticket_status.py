"""The status of a ticket: of its own version, and only as far as this relay has seen."""

from __future__ import annotations

import pytest

from paramserver.core.records import Announced, Ended, Epoch, FileSpec, Manifest, Plan, Sealed
from paramserver.core.ticket_status import GivenUp, TicketQuery, TicketStatus, ticket_status
from paramserver.core.versions import VersionState

OLD, NOW, OTHER_STORE = Epoch("store", 5), Epoch("store", 9), Epoch("replaced", 70)
CHAIN = ("a", "b", "c")


def state(
    epoch: Epoch = NOW, run: str = "run", *, is_sealed: bool = True, holders: tuple[str, ...] = ("a",)
) -> VersionState:
    manifest = Manifest("policy", 3, run, 1, epoch, (FileSpec("f", 4),))
    sealed = Sealed("policy", 3, 1, run, "root", 4, 0.0) if is_sealed else None
    return VersionState(announced=Announced(manifest, Plan(epoch, 1, CHAIN)), sealed=sealed, holders=set(holders))


def status_of(query: TicketQuery, known: VersionState | None, given_up: GivenUp | None = None) -> TicketStatus | None:
    return ticket_status(query, known, given_up, members={"a", "b"}, store_id="store")


@pytest.mark.parametrize(
    ("holders", "stage"), [((), "sealed"), (("a",), "sealed"), (("a", "c"), "k_relays"), (("a", "b"), "all")]
)
def test_the_stage_follows_the_holders_and_all_means_the_living(holders: tuple[str, ...], stage: str) -> None:
    found = status_of(TicketQuery("run", NOW), state(holders=holders))
    assert found is not None
    assert (found.stage, found.holders, found.chain) == (stage, tuple(sorted(holders)), CHAIN)


def test_without_a_seal_it_is_copied_and_no_more() -> None:
    assert status_of(TicketQuery("run", NOW), state(is_sealed=False, holders=("a", "b"))) == TicketStatus(
        "copied", chain=CHAIN
    )


def test_a_number_given_again_answers_lost_to_the_old_ticket() -> None:
    found = status_of(TicketQuery("run", OLD), state(NOW))
    assert found == TicketStatus("lost", "that number was given again in epoch store/9")
    assert status_of(TicketQuery("run", OTHER_STORE), state(NOW)) == found, "a registry that was replaced is older"


def test_a_ticket_of_an_epoch_that_this_relay_has_not_heard_of_is_not_called_lost() -> None:
    assert status_of(TicketQuery("run", NOW), state(OLD)) is None
    given_up = state(OLD, is_sealed=False)
    given_up.ended = Ended("aborted", "its master died")
    assert status_of(TicketQuery("run", NOW), given_up) is None
    assert status_of(TicketQuery("run", NOW), state(OTHER_STORE)) is None, "adopted, and its records not here yet"
    assert status_of(TicketQuery("run", NOW), None) is None


def test_what_a_master_gave_up_is_lost_to_its_own_ticket_only() -> None:
    given_up = GivenUp(OLD, "the publisher left")
    assert status_of(TicketQuery("run", OLD), state(OLD, is_sealed=False), given_up) == TicketStatus(
        "lost", "the publisher left"
    )
    assert status_of(TicketQuery("run", None), None, given_up) == TicketStatus("lost", "the publisher left")
    assert status_of(TicketQuery("run", NOW), state(OLD, is_sealed=False), given_up) is None, (
        "another version of that number"
    )
    later = status_of(TicketQuery("run", NOW), state(NOW), given_up)
    assert later is not None
    assert later.stage == "sealed"


def test_another_runs_version_and_one_that_ended_are_lost() -> None:
    assert status_of(TicketQuery("mine", None), state(run="theirs")) == TicketStatus(
        "lost", "that number belongs to run theirs"
    )
    over = state()
    over.ended = Ended("lost", "no verified holder is left")
    assert status_of(TicketQuery("run", NOW), over) == TicketStatus("lost", "no verified holder is left")
