"""`paramserver doctor`: this host, etcd and other relays, looked at from here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from paramserver.client.relay import RelayClient
from paramserver.data import frames
from paramserver.host import judge, judge_clock, look
from paramserver.membership.etcd import EtcdRegistry
from paramserver.membership.local import find_etcd
from protos.access.etcd import EtcdAccess
from protos.errors import LaminarError, Unavailable
from protos.findings import Finding

CONNECT_TIMEOUT_S = 3.0
ETCD_ROUNDS = 5
REACH = "is its port open in the firewall, and the relay started with --host of a reachable address?"


async def examine(
    pool_dir: Path,
    pool_bytes: int,
    etcd: str | None,
    relays: Sequence[RelayClient],
    lease_ttl_s: float,
    access: EtcdAccess,
) -> list[Finding]:
    """Every finding, right or wrong; nothing is changed."""
    findings = judge(await asyncio.to_thread(look, pool_dir), pool_bytes)
    findings.append(await _etcd(etcd, lease_ttl_s, access) if etcd else _etcd_here())
    for relay in relays:
        findings += await _relay(relay)
    return findings


def _etcd_here() -> Finding:
    """What a relay without --etcd starts."""
    what = "etcd of its own"
    try:
        return Finding(what, True, str(find_etcd()))
    except Unavailable as error:
        return Finding(what, False, error.message, f"without --etcd a relay does not start: {error.hint}", advice=True)


async def _etcd(endpoint: str, lease_ttl_s: float, access: EtcdAccess) -> Finding:
    """The slowest of a few reads."""
    try:
        registry = await EtcdRegistry.connect(endpoint, access=access)
    except LaminarError as error:
        return Finding("etcd answers in time", False, error.message, error.hint)
    slowest = 0.0
    try:
        for _ in range(ETCD_ROUNDS):
            started = time.monotonic()
            await registry.list("/laminar/store")
            slowest = max(slowest, time.monotonic() - started)
    except LaminarError as error:
        return Finding("etcd answers in time", False, error.message, error.hint)
    finally:
        await registry.close()
    return judge_clock(slowest, lease_ttl_s)


async def _relay(relay: RelayClient) -> list[Finding]:
    address, relay.timeout_s = relay.address, CONNECT_TIMEOUT_S
    async with relay as client:
        try:
            status = await client.status()
        except LaminarError as error:
            return [
                Finding(
                    f"control port of {address}",
                    False,
                    error.message,
                    f"{error.hint}; {REACH}" if error.hint else REACH,
                )
            ]
    control = Finding(f"control port of {address}", True, f"relay {status.relay}")
    what = f"data port of {status.relay}"
    try:
        sock = await asyncio.to_thread(frames.connect, status.data_address, CONNECT_TIMEOUT_S)
    except LaminarError as error:
        return [control, Finding(what, False, error.message, REACH)]
    sock.close()
    return [control, Finding(what, True, status.data_address)]
