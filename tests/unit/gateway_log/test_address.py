"""The address of a Redis, and what it has to be set to."""

from __future__ import annotations

import pytest

from gateway.core.addresses import RedisAddress
from gateway.log.durability import SETTINGS, check_role, check_settings, found_in_info
from protos.errors import InvalidRequest

DURABLE = {setting.name: setting.wanted for setting in SETTINGS}


@pytest.mark.parametrize(
    ("text", "shown", "user", "password"),
    [
        ("redis://10.0.0.5", "redis://10.0.0.5:6379/0", None, None),
        ("redis://host:7000/3", "redis://host:7000/3", None, None),
        ("rediss://trainer:p%40ss@host/1", "rediss://host:6379/1", "trainer", "p@ss"),
        ("redis://:secret@[::1]:7000", "redis://[::1]:7000/0", None, "secret"),
    ],
)
def test_an_address_is_shown_without_its_password(
    text: str, shown: str, user: str | None, password: str | None
) -> None:
    address = RedisAddress.parse(text)
    assert (str(address), address.user, address.password) == (shown, user, password)
    assert "secret" not in repr(address)


def test_the_password_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RedisAddress.PASSWORD_VARIABLE, "quiet")
    assert RedisAddress.parse("redis://host").password == "quiet"
    assert RedisAddress.parse("redis://:loud@host").password == "loud"


@pytest.mark.parametrize("text", ["host:1", "redis://", "redis://host/x", "redis://host:99999", "redis://h/0?a=1"])
def test_what_is_no_address_is_refused_with_the_form_of_one(text: str) -> None:
    with pytest.raises(InvalidRequest, match="redis://HOST:PORT/DB"):
        RedisAddress.parse(text)


@pytest.mark.parametrize(
    ("setting", "value"), [("appendonly", "no"), ("appendfsync", "everysec"), ("maxmemory-policy", "allkeys-lru")]
)
@pytest.mark.parametrize("accept", [False, True])
def test_a_setting_that_loses_data_is_refused_with_the_line_that_mends_it(
    setting: str, value: str, accept: bool
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_settings("redis://h:1/0", {**DURABLE, setting: value}, accept_unchecked=accept)
    text = str(refused.value)
    assert f"`{setting}` is `{value}` and has to be `{DURABLE[setting]}`" in text
    assert f"`{setting} {DURABLE[setting]}` into its redis.conf" in text


def test_what_cannot_be_checked_is_named_and_accepted_only_on_request() -> None:
    found = found_in_info({"aof_enabled": 1, "maxmemory_policy": "noeviction"})
    assert found == {"appendonly": "yes", "maxmemory-policy": "noeviction"}
    with pytest.raises(InvalidRequest, match=r"cannot check `appendfsync`.*no CONFIG here.*--redis-unchecked"):
        check_settings("redis://h:1/0", found, accept_unchecked=False, forbidden="no CONFIG here")
    assert check_settings("redis://h:1/0", found, accept_unchecked=True) == ["appendfsync"]
    assert check_settings("redis://h:1/0", DURABLE, accept_unchecked=False) == []


@pytest.mark.parametrize("info", [{"role": "slave"}, {"role": "master", "cluster_enabled": 1}])
def test_replicas_and_nodes_of_clusters_are_refused(info: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        check_role("redis://h:1/0", info)
    check_role("redis://h:1/0", {"role": "master", "cluster_enabled": 0})
