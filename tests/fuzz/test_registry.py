"""The registry's keys and values, whatever is written there: what a relay and a gateway make of them."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from gateway.fleet.registrations import registered
from paramserver.client.engines import EngineView
from paramserver.client.relay import RelayClient
from paramserver.core.view import ENGINES, ROOT, STORE, View
from paramserver.membership import EtcdRegistry
from paramserver.membership.registry import Changed, Entry, Put, Removed
from protos.errors import LaminarError
from tests.fuzz.cases import EXAMPLES, Case, cases
from tests.fuzz.watched import unharmed
from tests.support.relays import Relays

KEY_BYTES_MAX = 2000


def test_a_view_takes_any_key_and_forgets_it() -> None:
    """A key that cannot be read costs itself alone, and leaves nothing behind once it is gone."""
    whole = View()
    for case in cases("registry", EXAMPLES * 400):
        try:
            for view in (View(), whole):
                view.put(case.of, case.data, 1)
                view.put(case.of, case.data + b" ", 2)
        except Exception as error:
            raise AssertionError(f"{case}: {error!r}") from error
    for key in list(whole._raw):
        try:
            whole.remove(key)
        except Exception as error:
            raise AssertionError(f"{key!r} is not removed: {error!r}") from error
    left = (whole.members, whole.masters, whole.pins, whole.continues, whole.unreadable, whole.dropped, whole._raw)
    assert left == ({}, {}, {}, set(), {}, {}, {})
    for model in whole.keyless():
        whole.forget(model)
    assert (whole.models, whole.plans) == (set(), {})


def test_a_gateway_takes_any_registration() -> None:
    view = EngineView()
    keys = set[str]()
    for case in cases("registry", EXAMPLES * 200):
        if not case.of.startswith(ENGINES):
            continue
        try:
            engines = view.take(Changed(Entry(case.of, case.data, 1), 1), "")
            for engine in engines.values():
                registered(engine)
        except LaminarError:
            pass  # it is refused by name
        except Exception as error:
            raise AssertionError(f"{case}: {error!r}") from error
        keys.add(case.of)
    for key in keys:
        view.take(Removed(key, 2), "")
    assert (view.now, view.before) == ({}, {})


async def test_a_relay_lives_with_any_registry(relays: Relays) -> None:
    """Keys of others: the relay's own and the store's are as they were, so that it has its seat to the end."""
    daemon = relays.start("a")
    registry = await EtcdRegistry.connect(relays.etcd)
    relay = RelayClient(daemon.ready["grpc"])
    try:
        with unharmed(daemon):
            written = [case.of for case in cases("registry", EXAMPLES * 8) if await _written(registry, case)]
            assert len(written) > EXAMPLES, "most of them can be keys at all"
            await _answers(relay, "it answers with all of that in its registry")
            with httpx.Client(
                base_url=f"http://{relays.etcd}", timeout=60.0
            ) as etcd:  # to start one costs more than a call
                for key in set(written):
                    await asyncio.to_thread(_delete, etcd, key)
            await _until(lambda: _forgotten(relay), "what is gone from the registry is forgotten")
    finally:
        await relay.close()
        await registry.close()


async def _written(registry: EtcdRegistry, case: Case) -> bool:
    """False for what is no key of another relay, or cannot be written to etcd."""
    own = case.of == STORE or case.of.endswith("/a") or not case.of.startswith(ROOT)
    if own or len(case.of) > KEY_BYTES_MAX or not case.of.isprintable():
        return False
    await registry.transact([], [Put(case.of, case.data)])
    return True


def _delete(etcd: httpx.Client, key: str) -> None:
    body = {"key": base64.b64encode(key.encode()).decode()}
    etcd.post("/v3/kv/deleterange", json=body).raise_for_status()


async def _answers(relay: RelayClient, what: str) -> None:
    status = await relay.status()
    assert status.relay == "a", what


async def _forgotten(relay: RelayClient) -> bool:
    return list((await relay.status()).members) == ["a"]


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not await condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within 60 s: {what}")
        await asyncio.sleep(0.05)
