"""The table of operations: who may do what, by role, by owner, and by a session's own keys."""

from __future__ import annotations

import itertools

import pytest

from gateway.core.access import (
    ATTACH,
    CALL,
    END,
    EXPERIENCE,
    GROUP,
    LEASE,
    LOOK,
    MODELS,
    OPEN,
    OPERATE,
    OPERATIONS,
    READ,
    STATUS,
    TASKS,
    Caller,
    FinishKey,
    Operation,
    SessionKey,
    Target,
    finish_key,
    owner_of,
    refusal,
    require,
)
from gateway.core.types import SessionId
from protos.access.roles import ROLES, ApiKey, Role
from protos.errors import Forbidden

MINE, THEIRS = SessionId("mine"), SessionId("theirs")


def key(role: Role, name: str = "a") -> ApiKey:
    return ApiKey(role, name, b"")


ADMIN, TRAINER, AGENT, READER = (key(role) for role in ROLES)
OTHER = key("agent", "b")
ACTS, ENDS = SessionKey(MINE), FinishKey(MINE)
ALLOWED: dict[Operation, tuple[Caller, ...]] = {
    STATUS: (ADMIN, TRAINER, READER),
    OPERATE: (ADMIN,),
    MODELS: (ADMIN, TRAINER, AGENT, OTHER, READER, ACTS, ENDS),
    CALL: (ADMIN, TRAINER, AGENT, ACTS),
    OPEN: (ADMIN, TRAINER, AGENT, OTHER),
    ATTACH: (ADMIN, TRAINER, AGENT),
    READ: (ADMIN, TRAINER, AGENT, READER, ACTS, ENDS),
    END: (ADMIN, TRAINER, AGENT, ENDS),
    GROUP: (ADMIN, TRAINER, AGENT),
    LEASE: (ADMIN, TRAINER, AGENT, OTHER),
    TASKS: (ADMIN, TRAINER),
    EXPERIENCE: (ADMIN, TRAINER),
}
"""To the session of `a` whose keys are there."""
EVERYBODY: tuple[Caller, ...] = (ADMIN, TRAINER, AGENT, OTHER, READER, ACTS, ENDS)


@pytest.mark.parametrize("operation", ALLOWED, ids=lambda operation: operation.name)
@pytest.mark.parametrize("caller", EVERYBODY, ids=repr)
def test_who_may_do_what_to_a_session_of_a(operation: Operation, caller: Caller) -> None:
    assert (refusal(operation, caller, Target(MINE, "a")) == "") == (caller in ALLOWED[operation])


def test_an_admin_may_do_everything_and_a_reader_changes_nothing() -> None:
    for operation in OPERATIONS:
        assert refusal(operation, ADMIN, Target(MINE, "b")) == ""
    changes = (OPERATE, CALL, OPEN, ATTACH, END, GROUP, LEASE, TASKS, EXPERIENCE)
    assert [operation.name for operation in changes if not refusal(operation, READER, None)] == []


def test_no_key_reaches_another_session() -> None:
    for operation, caller in itertools.product(OPERATIONS, (ACTS, ENDS)):
        if operation is not LOOK:
            assert refusal(operation, caller, Target(THEIRS, "a")), operation


def test_who_acts_does_not_reward_unless_the_gateway_is_told_so() -> None:
    assert "its own key does not allow this" in refusal(END, ACTS, Target(MINE, "a"))
    assert refusal(END, ACTS, Target(MINE, "a"), agents_may_reward=True) == ""
    assert refusal(END, ACTS, Target(THEIRS, "a"), agents_may_reward=True)
    assert refusal(OPERATE, ACTS, None, agents_may_reward=True)
    assert refusal(CALL, ENDS, Target(MINE, "a"), agents_may_reward=True), "the finish key does not act"


@pytest.mark.parametrize("operation", [CALL, READ, END, GROUP, ATTACH], ids=lambda operation: operation.name)
def test_what_nobodys_key_made_is_no_agents(operation: Operation) -> None:
    assert refusal(operation, AGENT, Target(MINE, ""))
    assert refusal(operation, key("agent", ""), Target(MINE, "")), "not even of an agent without a name"
    assert refusal(operation, TRAINER, Target(MINE, "")) == ""


def test_a_refusal_names_what_would_be_allowed() -> None:
    for operation, caller, named in (
        (OPERATE, TRAINER, "the key of a has the role trainer.*needs a key with the role admin"),
        (TASKS, AGENT, "needs a key with the role admin or trainer"),
        (END, OTHER, "was not made with a key of b.*agent's: of the name that made it.*or the session's finish key"),
        (CALL, SessionKey(THEIRS), "belongs to another session.*or the session's own key"),
    ):
        with pytest.raises(Forbidden, match=named):
            require(operation, caller, Target(MINE, "a"))
    require(OPERATE, None, Target(MINE, "a"))  # access control is off


def test_owners() -> None:
    assert [owner_of(caller) for caller in (AGENT, OTHER, ACTS, ENDS, None)] == ["a", "b", "", "", ""]


def test_a_finish_key_is_its_sessions_alone_and_the_same_in_every_life() -> None:
    mine = finish_key(b"secret", MINE)
    assert mine == finish_key(b"secret", MINE)
    assert mine.startswith("sk-finish-")
    assert len({mine, finish_key(b"secret", THEIRS), finish_key(b"other", MINE)}) == 3
