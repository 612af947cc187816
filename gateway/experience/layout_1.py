"""Brings a Redis that gateways of the release before shared up to date: from layout 1 (keys for each entry, lease and
group, and a script that changed them) to layout 2 (logs of commands). It goes with the next release.

Invariants:
- the number is changed last: what failed in between begins anew at the next start, and loses nothing;
- one gateway does it at a time, and none while a gateway of the release before is there.

What is kept: trajectories, leases with their ends, groups, which finishes have landed, acknowledgements, and the prompt
pool. Which sessions and engines are whose is claimed anew.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from gateway.core.addresses import RedisAddress
from gateway.core.experience import BufferState, LeaseState
from gateway.core.experience_commands import ENDED_S, EndLapsed, Known
from gateway.core.selection import Entry
from gateway.experience.buffer import BYTES_MAX, CAPACITY
from gateway.experience.shared import ROOM, ExperienceMachine
from gateway.log.attempts import LAYOUT, Namespace
from gateway.log.base import BEGIN, Batch, Body, CommandLog, parts_of
from gateway.log.redis import RedisStore
from gateway.log.redis_server import Words
from gateway.runtime.clock import unix_s
from gateway.store.damage import leaving_out
from protos.decoding import decode_msgpack
from protos.errors import Conflict, Unavailable
from protos.packed import Facts

log = logging.getLogger(__name__)

OLD_LAYOUT = "1"
AT_ONCE = 200
"""Commands of one round trip."""
SEEN_S = 15.0
"""A gateway of the release before shows itself every 5 s."""
LOCK_S = 600
WAIT_S = 60.0


class _Redis(RedisStore):
    """With a namespace that is not this release's yet."""

    async def _claim(self) -> None:
        """Later."""


async def migrate(address: RedisAddress, namespace: Namespace, *, accept_unchecked: bool = False) -> None:
    """Before a gateway connects; nothing for a namespace of another layout, or none. Conflict while a gateway of the
    release before is there, Unavailable while another one does the same."""
    store = _Redis(address, namespace, accept_unchecked=accept_unchecked)
    try:
        await _migrate(store)
    finally:
        await store.close()


async def _migrate(store: RedisStore) -> None:
    [found] = await store.send(("HMGET", store.prefix("layout"), "layout", "model", "vocabulary"), wait_s=0.0)
    if found[0] != OLD_LAYOUT.encode():
        return
    store.namespace.check(str(store.address), str(LAYOUT), found[1].decode(), found[2].decode())
    await _refuse_beside_others(store)
    async with _alone(store):
        where = store.namespace.name, store.address
        log.warning("namespace %s of %s is brought from layout %s to %d", *where, OLD_LAYOUT, LAYOUT)
        old = await _experience(store)
        await _prompt_pool(store)
        await _told(store, ("HSET", store.prefix("layout"), "layout", str(LAYOUT)))
        await _unlink(store, [*old, *await _named(store, store.prefix("gateways"), ("*",))])


async def _refuse_beside_others(store: RedisStore) -> None:
    seen = await _told(store, ("ZRANGE", store.prefix("gateways") + ":seen", 0, -1, "WITHSCORES"), ("TIME",))
    names, now = _pairs(seen[0]), int(seen[1][0])
    there = [name.decode() for name, at in names if now - float(at) < SEEN_S]
    if there:
        raise Conflict(
            f"namespace {store.namespace.name!r} of {store.address} has layout {OLD_LAYOUT}, and is in use by "
            f"{', '.join(there)} of the release before",
            hint="stop all gateways of the release before, and start this one again",
        )


@asynccontextmanager
async def _alone(store: RedisStore) -> AsyncIterator[None]:
    key, mine = store.prefix("migration"), secrets.token_hex(8)
    [taken] = await _told(store, ("SET", key, mine, "NX", "EX", LOCK_S))
    if taken is None:
        raise Unavailable(f"another gateway brings {store.address} up to date", hint="try again in a minute")
    try:
        yield
    finally:
        await _told(store, ("DEL", key))


async def _experience(store: RedisStore) -> list[bytes]:
    """Writes the log with its snapshot; returns the keys that it was made of."""
    prefix, command_log = store.prefix(ROOM), store.log(ROOM)
    await _unlink(store, await _named(store, prefix, ("log", "state", "sent:*", "body:*")))
    state, known = BufferState(CAPACITY, BYTES_MAX), Known()
    sessions, leases, closed, total = await _told(
        store,
        ("HGETALL", f"{prefix}:sessions"),
        ("ZRANGE", f"{prefix}:leases", 0, -1, "WITHSCORES"),
        ("ZRANGE", f"{prefix}:closed_order", 0, -1),
        ("HGET", f"{prefix}:totals", "seq"),
    )
    seqs = sorted(int(seq) for _, seq in _pairs(sessions))
    entries: dict[int, Entry] = {}
    for some in _batches(seqs):
        found = await _told(store, *(_read(prefix, seq) for seq in some))
        for seq, row in zip(some, found, strict=True):
            if (entry := await _moved(command_log, seq, row)) is not None:
                entries[seq] = entry
    leased: set[int] = set()
    for name, until_ms in _pairs(leases):
        key = f"{prefix}:lease:{name.decode()}"
        [(reader, uses_max, held)] = await _told(store, ("HMGET", key, "reader", "uses_max", "seqs"))
        mine = {int(seq): entries[int(seq)] for seq in held.split() if int(seq) in entries}
        leased |= mine.keys()
        state.hold(LeaseState(name.decode(), reader.decode(), float(until_ms) / 1000, mine, int(uses_max)))
    for seq, entry in entries.items():
        if seq not in leased:
            state.put(entry)
    state.last_seq = int(total or 0)
    for group in closed:
        [members] = await _told(store, ("HGET", f"{prefix}:closed", group))
        state.closed_groups[group.decode()] = int(members)
    await _remembered(store, prefix, known)
    await _keep(command_log, await ExperienceMachine(state, known).dump())
    log.warning("%d trajectories, %d of them leased, are in the log now", len(state), state.num_leased)
    damaged = {int(seq) for seq in (await _told(store, ("SMEMBERS", f"{prefix}:damaged")))[0]}
    names = ("totals", "sessions", "leases", "lease:*", "ended:*", "landed:*", "closed", "closed_order", "events")
    old = await _named(store, prefix, names)
    return [*old, *(f"{prefix}:entry:{seq}".encode() for seq in entries if seq not in damaged)]


def _read(prefix: str, seq: int) -> Words:
    return ("HMGET", f"{prefix}:entry:{seq}", "session", "group", "oldest", "facts", "uses", "edits", "body")


async def _moved(command_log: CommandLog, seq: int, row: Sequence[bytes]) -> Entry | None:
    """None for one whose facts do not decode: it is named in the log, and stays where it is."""
    session, group, oldest, facts, uses, edits, content = row
    with leaving_out("experience", seq):
        body = Body(f"b{int(unix_s()):x}-{secrets.token_hex(8)}", len(parts_of(content)))
        known = decode_msgpack(facts, Facts)
        entry = Entry(seq, session.decode(), group.decode(), int(oldest), known, int(uses), body.name, int(edits))
        await command_log.put(body, content, wait_s=WAIT_S)
        return entry
    return None


async def _remembered(store: RedisStore, prefix: str, known: Known) -> None:
    async for key in _keys(store, f"{prefix}:landed:*"):
        [found] = await _told(store, ("ZRANGE", key, 0, -1, "WITHSCORES"))
        sender = key.decode().rpartition(":")[2]
        known.landed[sender] = {finish.decode(): float(at) / 1000 for finish, at in _pairs(found)}
    async for key in _keys(store, f"{prefix}:ended:*"):
        number, ttl_ms = await _told(store, ("GET", key), ("PTTL", key))
        if number is not None:
            known.ended[key.decode().removeprefix(f"{prefix}:ended:")] = int(number), unix_s() - ENDED_S + ttl_ms / 1000
    known.ended = dict(sorted(known.ended.items(), key=lambda item: item[1][1]))


async def _keep(command_log: CommandLog, dumped: Sequence[bytes]) -> None:
    """A log with one command, and a snapshot up to it."""
    batch = Batch(f"layout-{OLD_LAYOUT}", 1, [msgspec.msgpack.encode(EndLapsed())])
    found = await command_log.exchange(BEGIN, batch, wait_s=WAIT_S)
    content = msgspec.msgpack.encode(list(dumped))
    body = Body(f"s{int(unix_s()):x}-{secrets.token_hex(8)}", len(parts_of(content)))
    await command_log.put(body, content, wait_s=WAIT_S)
    await command_log.keep(found.logged[-1].place, body)


async def _prompt_pool(store: RedisStore) -> None:
    """Its log stays as it is; the parts of its snapshot become a body."""
    prefix, command_log = store.prefix("tasks"), store.log("tasks")
    [(where, num_parts)] = await _told(store, ("HMGET", f"{prefix}:state", "snapshot", "parts"))
    if where is None:
        return
    key = f"{prefix}:snapshot:{where.decode()}"
    parts = [(await _told(store, ("HGET", key, number)))[0] for number in range(int(num_parts))]
    content = msgspec.msgpack.encode(parts)
    body = Body(f"s{int(unix_s()):x}-{secrets.token_hex(8)}", len(parts_of(content)))
    await command_log.put(body, content, wait_s=WAIT_S)
    await _told(store, ("HSET", f"{prefix}:state", "body", body.name, "parts", body.num_parts), ("UNLINK", key))


async def _told(store: RedisStore, *commands: Words) -> list[Any]:
    return await store.send(*commands, wait_s=WAIT_S)


async def _named(store: RedisStore, prefix: str, names: Sequence[str]) -> list[bytes]:
    return [key for name in names async for key in _keys(store, f"{prefix}:{name}")]


async def _unlink(store: RedisStore, keys: Sequence[bytes]) -> None:
    for some in _batches(keys):
        await _told(store, ("UNLINK", *some))


async def _keys(store: RedisStore, pattern: str) -> AsyncIterator[bytes]:
    cursor: bytes | int = b"0"
    while True:
        [(cursor, keys)] = await _told(store, ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
        for key in keys:
            yield key
        if cursor in (b"0", 0):
            return


def _pairs(found: Sequence[Any]) -> list[tuple[bytes, bytes]]:
    """Of a reply to HGETALL or ZRANGE, as the package gives it or as it is."""
    if isinstance(found, dict):
        return list(found.items())
    if found and isinstance(found[0], tuple | list):
        return [(name, value) for name, value in found]
    return list(zip(found[::2], found[1::2], strict=True))


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[at : at + AT_ONCE] for at in range(0, len(items), AT_ONCE))
