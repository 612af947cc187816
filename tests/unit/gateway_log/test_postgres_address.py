"""The address of a PostgreSQL, and of stores with several hosts."""

from __future__ import annotations

import pytest

from gateway.core.addresses import PostgresAddress, RedisAddress
from gateway.log.stores import kind_of, parse
from protos.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "shown", "user", "password"),
    [
        ("postgresql://laminar@10.0.0.5", "postgresql://10.0.0.5:5432/laminar", "laminar", None),
        ("postgresql://u:secret@one,two:7000/runs", "postgresql://one:5432,two:7000/runs", "u", "secret"),
        ("postgresqls://u@[::1]:7000/runs", "postgresqls://[::1]:7000/runs", "u", None),
        ("redis://:secret@one:1,two:2/3", "redis://one:1,two:2/3", None, "secret"),
    ],
)
def test_an_address_is_shown_without_its_password(
    text: str, shown: str, user: str | None, password: str | None
) -> None:
    address = parse(text)
    assert (str(address), address.user, address.password) == (shown, user, password)
    assert "secret" not in repr(address)
    assert isinstance(address, kind_of(address).ADDRESS)


def test_the_password_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PostgresAddress.PASSWORD_VARIABLE, "quiet")
    assert parse("postgresql://u@host").password == "quiet"


@pytest.mark.parametrize(
    "text", ["postgresql://", "postgresql://h:99999/x", "postgresql://h/x?a=1", "postgresql://h,/x"]
)
def test_what_is_no_address_is_refused_with_the_form_of_one(text: str) -> None:
    with pytest.raises(InvalidRequest, match="postgresql://USER@HOST:PORT/DATABASE"):
        parse(text)


def test_a_scheme_that_no_store_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse("mysql://host")
    assert RedisAddress.FORM in str(refused.value)
    assert PostgresAddress.FORM in str(refused.value)
