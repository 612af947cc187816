"""A Redis as gateways of the release before left it: a full buffer with live leases, and a prompt pool, go on."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.addresses import RedisAddress
from gateway.core.experience_commands import AddSession
from gateway.core.tasks import NewTask
from gateway.experience import ExperienceBuffer, layout_1
from gateway.experience.shared import shared_store
from gateway.log.attempts import Namespace
from gateway.log.redis import RedisStore
from gateway.log.replicated import shared
from gateway.store import Database
from gateway.tasks import PromptPool, rows
from protos import packed
from protos.errors import Conflict, NotFound
from tests.support.redis_servers import connect
from tests.unit.gateway_store.test_experience import names, sample, trajectory

MODEL, VOCABULARY = "policy", "v"
FULL = 40


class Before(layout_1._Redis):
    """Writes as the release before did."""

    async def write(self, *words: str | bytes | float) -> None:
        await self.send(words, wait_s=60.0)  # type: ignore[arg-type]

    async def entry(self, seq: int, *, lease: str = "", uses: int = 0) -> None:
        name, at = f"s{seq}", self.prefix("experience")
        row = packed.pack([trajectory(name, group=f"g{seq // 4}")])
        facts = msgspec.msgpack.encode(packed.facts_of([trajectory(name)], len(row)))
        known = ("session", name, "group", f"g{seq // 4}", "oldest", 1, "facts", facts, "uses", uses, "lease", lease)
        more = ("gateway", "gateway-old", "bytes", len(row), "edits", 0, "body", row)
        await self.write("HSET", f"{at}:entry:{seq}", *known, *more)
        await self.write("HSET", f"{at}:sessions", name, seq)
        await self.write("ZADD", f"{at}:landed:gateway-old", "+inf", f"{seq} {name}")

    async def lease(self, name: str, lasts_s: float, *seqs: int, uses_max: int = 1) -> None:
        at = self.prefix("experience")
        held = " ".join(map(str, seqs))
        await self.write(
            "HSET", f"{at}:lease:{name}", "reader", "t/0", "uses_max", uses_max, "seqs", held, "gateway", "x"
        )
        await self.write("ZADD", f"{at}:leases", round((time.time() + lasts_s) * 1000), name)
        for seq in seqs:
            await self.write("HSET", f"{at}:entry:{seq}", "lease", name)


@pytest.fixture
async def before(shared_redis: str, namespace: str) -> AsyncIterator[Before]:
    store = Before(RedisAddress.parse(shared_redis), Namespace(namespace, MODEL, VOCABULARY))
    layout = store.prefix("layout")
    await store.write("HSET", layout, "layout", 1, "model", MODEL, "vocabulary", VOCABULARY, "epoch", "e")
    yield store
    await store.close()


async def migrate(before: Before) -> None:
    await layout_1.migrate(before.address, before.namespace)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def gateway(before: Before, path: Path) -> AsyncIterator[tuple[ExperienceBuffer, PromptPool]]:
    async with contextlib.AsyncExitStack() as stack:
        store = await RedisStore.connect(
            before.address,
            namespace=before.namespace.name,
            model=MODEL,
            vocabulary=VOCABULARY,  # type: ignore[arg-type]
        )
        stack.push_async_callback(store.close)
        database = await stack.enter_async_context(Database(path))
        buffer = ExperienceBuffer(database, store=shared_store(database, store), capacity=FULL)
        pool = PromptPool(await stack.enter_async_context(Database(None)), order=shared(store, "tasks"))
        for part in (buffer, pool):
            await part.open()
            stack.push_async_callback(part.close)
        yield buffer, pool


async def test_a_full_buffer_with_live_leases_goes_on(before: Before, tmp_path: Path) -> None:
    at = before.prefix("experience")
    for seq in range(1, FULL + 1):
        await before.entry(seq, uses=int(seq == 40))
    await before.lease("lives", 1000, 1, 2)
    await before.lease("over", -1, 3)
    await before.write("HSET", f"{at}:totals", "seq", FULL + 5, "entries", FULL, "leased", 3, "revision", 99)
    await before.write("HSET", f"{at}:closed", "g10", 1)
    await before.write("ZADD", f"{at}:closed_order", 7, "g10")
    await before.write("SET", f"{at}:ended:used", 8, "EX", 1800)
    await migrate(before)
    async with gateway(before, tmp_path / "a") as (buffer, _):
        assert (buffer.statistics().leased, len(buffer._state)) == (3, FULL)
        assert await buffer.ack("lives") == 2
        assert await buffer.ack("used") == 8
        with pytest.raises(NotFound):
            await buffer.ack("over")
        got = await sample(buffer, "t", trajectories=FULL, trainer_version=1, uses_max=2)
        assert names(got) == [f"s{seq}" for seq in (*range(3, FULL), FULL)]
        assert got[1][0] == trajectory("s3", group="g0")
        assert (buffer._state.last_seq, buffer._state.closed_groups) == (FULL + 5, {"g10": 1})
        await buffer.release(got[0])
        again = AddSession("s4", "g1", 1, packed.Facts(), FULL, None, "gateway-old", "4 s4")
        await buffer._store._commands.run(again)  # type: ignore[attr-defined]
        assert len(buffer._state) == FULL - 2, "a finish that had landed"
        assert buffer._store.known.landed["gateway-old"]["4 s4"] == math.inf
    kept = [key.decode().removeprefix(at) async for key in layout_1._keys(before, f"{at}:*")]
    assert [key for key in kept if not key.startswith((":log", ":state", ":body:", ":sent:"))] == []


async def test_a_prompt_pool_goes_on_from_its_snapshot_and_what_stands_behind_it(
    before: Before, shared_redis: str, tmp_path: Path
) -> None:
    at = before.prefix("tasks")
    async with gateway(await _current(before), tmp_path / "x") as (_, pool):
        await pool.add("p", [NewTask("one", b"{}")])
        where = pool._commands._place  # type: ignore[attr-defined]
        parts = await pool._database.run(rows.dump)
        await pool.add("p", [NewTask("two", b"{}")])
    text = f"{where.position[0]}-{where.position[1]}"
    for number, part in enumerate(parts):
        await before.write("HSET", f"{at}:snapshot:{text}", number, part)
    await before.write("HSET", f"{at}:state", "snapshot", text, "parts", len(parts), "born", "x", "trimmed", "0-0")
    await before.write("HSET", before.prefix("layout"), "layout", 1)
    for _ in range(2):
        await migrate(before)
    async with gateway(before, tmp_path / "a") as (_, pool):
        assert [(await pool.lease("p", "r")).leases[0].task_id for _ in range(2)] == ["one", "two"]


async def _current(before: Before) -> Before:
    await before.write("HSET", before.prefix("layout"), "layout", 2)
    return before


async def test_it_waits_for_the_end_of_gateways_of_the_release_before(before: Before, tmp_path: Path) -> None:
    seen = before.prefix("gateways") + ":seen"
    await before.write("ZADD", seen, time.time(), "gateway-old")
    with pytest.raises(Conflict, match=r"in use by gateway-old.*stop all gateways of the release before"):
        await migrate(before)
    await before.write("ZADD", seen, time.time() - 60, "gateway-old")
    await migrate(before)
    async with gateway(before, tmp_path / "a") as (buffer, _):
        assert len(buffer._state) == 0


async def test_nothing_happens_to_a_namespace_of_today_or_of_another_model(
    before: Before, shared_redis: str, namespace: str
) -> None:
    with pytest.raises(Conflict, match="policy"):
        await layout_1.migrate(RedisAddress.parse(shared_redis), Namespace(namespace, "critic", VOCABULARY))
    await migrate(before)
    found: Any = await before.send(("HGETALL", before.prefix("layout")))
    await migrate(before)
    assert await before.send(("HGETALL", before.prefix("layout"))) == found
    async with contextlib.AsyncExitStack() as stack:
        await layout_1.migrate(RedisAddress.parse(shared_redis), Namespace(f"{namespace}-new"))
        await connect(stack, shared_redis, f"{namespace}-new")
