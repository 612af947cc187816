"""What every log of commands must do: one order, each batch once, a place that is proven, bodies and a snapshot."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from gateway.log.base import BEGIN, PART_BYTES, REPLY_BYTES_MAX, Batch, Body, CommandLog, Logged, Place, parts_of
from protos.errors import NotFound
from tests.support.shared_stores import SHARED, connect

WAIT_S = 60.0
Opener = Callable[[str], CommandLog]


@pytest.fixture(params=SHARED)
async def opened(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Opener]:
    """Opens the log of a room."""
    async with AsyncExitStack() as stack:
        yield (await connect(stack, request, request.param, namespace)).log


@pytest.fixture
def log(opened: Opener) -> CommandLog:
    return opened("room")


def batch(number: int, *commands: bytes, life: str = "a", needs: Body | None = None) -> Batch:
    return Batch(life, number, commands, [] if needs is None else [needs])


async def append(log: CommandLog, request: Batch, place: Place = BEGIN) -> list[Logged]:
    found = await log.exchange(place, request, wait_s=WAIT_S)
    assert found.proven
    return list(found.logged)


async def everything(log: CommandLog, place: Place = BEGIN) -> list[Logged]:
    found: list[Logged] = []
    while some := await append(log, batch(0), place):
        found += some
        place = some[-1].place
    return found


async def put(log: CommandLog, content: bytes, name: str = "") -> Body:
    body = Body(name or f"b{secrets.token_hex(8)}", len(parts_of(content)))
    await log.put(body, content, wait_s=WAIT_S)
    return body


async def test_commands_have_one_order_with_times_that_never_go_back(log: CommandLog) -> None:
    await append(log, batch(1, b"one", b"two"))
    await append(log, batch(1, b"three", life="b"))
    found = await everything(log)
    assert [(one.life, one.number, one.at, one.command) for one in found] == [
        ("a", 1, 0, b"one"),
        ("a", 1, 1, b"two"),
        ("b", 1, 0, b"three"),
    ]
    assert [one.position for one in found] == sorted({one.position for one in found})
    assert [one.unix_s for one in found] == sorted(one.unix_s for one in found)


async def test_a_batch_is_in_it_once_and_an_older_one_of_its_life_never_comes_after_it(log: CommandLog) -> None:
    for number, command in ((1, b"one"), (1, b"one"), (3, b"three"), (2, b"late"), (3, b"three")):
        await append(log, batch(number, command))
    assert [one.command for one in await everything(log)] == [b"one", b"three"]


async def test_a_place_that_it_does_not_have_gets_nothing_and_appends_nothing(log: CommandLog) -> None:
    [one] = await append(log, batch(1, b"one"))
    for place in (Place(one.position, "b-1-0"), Place((one.position[0] + 7, one.position[1]), one.place.mark)):
        refused = await log.exchange(place, batch(2, b"two"), wait_s=WAIT_S)
        assert (refused.proven, list(refused.logged)) == (False, [])
    assert [found.command for found in await append(log, batch(2, b"two"), one.place)] == [b"two"]


async def test_no_reply_is_larger_than_its_bound_and_none_is_empty_while_there_is_more(log: CommandLog) -> None:
    large = secrets.token_bytes(REPLY_BYTES_MAX // 3)
    await append(log, batch(1, *[large] * 7, b"small"))
    place, replies = BEGIN, []
    while some := await append(log, batch(0), place):
        replies.append(sum(len(one.command) for one in some))
        place = some[-1].place
    assert len(replies) == 3
    assert max(replies) <= REPLY_BYTES_MAX


async def test_what_needs_a_body_is_appended_once_all_of_it_is_there(log: CommandLog) -> None:
    content = secrets.token_bytes(3 * PART_BYTES + 5)
    body = Body("whole", len(parts_of(content)))
    for name in (body, Body("never", 1)):
        with pytest.raises(NotFound, match=name.name):
            await append(log, batch(1, b"first", needs=name))
    await log.put(Body("whole", 3), content[: 3 * PART_BYTES], wait_s=WAIT_S)
    with pytest.raises(NotFound):
        await append(log, batch(1, b"first", needs=body))
    for _ in range(2):
        await log.put(body, content, wait_s=WAIT_S)
    assert [one.command for one in await append(log, batch(1, b"first", needs=body))] == [b"first"]
    assert await log.read([body], wait_s=WAIT_S) == [content]


async def test_bodies_are_read_named_and_dropped(log: CommandLog, opened: Opener) -> None:
    contents = [b"", b"x", secrets.token_bytes(PART_BYTES), secrets.token_bytes(20 * PART_BYTES + 1)]
    bodies = [await put(log, content) for content in contents]
    assert await log.read([*bodies, Body("never", 1)], wait_s=WAIT_S) == [*contents, None]
    assert await log.names() == sorted(body.name for body in bodies)
    assert await opened("other").names() == []
    await log.drop([body.name for body in bodies[:2]])
    await log.drop([bodies[0].name])
    assert await log.read(bodies, wait_s=WAIT_S) == [None, None, *contents[2:]]


async def test_a_snapshot_takes_the_place_of_what_stands_before_the_one_before(log: CommandLog) -> None:
    assert (await log.snapshot()).body is None
    logged = [(await append(log, batch(number, b"x")))[-1] for number in range(1, 2)]
    for number in range(2, 7):
        logged += await append(log, batch(number, b"x"), logged[-1].place)
    first, second = [await put(log, b"state") for _ in range(2)]
    await log.keep(logged[1].place, first)
    found = await log.snapshot()
    assert (found.place, found.body) == (logged[1].place, first)
    assert len(await everything(log)) == 6, "a gateway that is a little behind need not begin anew"
    assert (await log.exchange(logged[5].place, batch(0), wait_s=WAIT_S)).since == 4
    await log.keep(logged[3].place, second)
    assert await log.names() == [second.name]
    assert not (await log.exchange(BEGIN, batch(0), wait_s=WAIT_S)).proven
    assert not (await log.exchange(logged[0].place, batch(0), wait_s=WAIT_S)).proven
    assert [one.position for one in await everything(log, logged[1].place)] == [one.position for one in logged[2:]]


async def test_an_older_snapshot_and_one_of_another_log_are_not_kept(log: CommandLog) -> None:
    [one, two, three] = await append(log, batch(1, b"1", b"2", b"3"))
    newest = await put(log, b"newest")
    await log.keep(two.place, newest)
    for place in (one.place, two.place, Place(three.position, "b-1-0")):
        late = await put(log, b"late")
        await log.keep(place, late)
        assert (await log.snapshot()).body == newest
        assert await log.names() == [newest.name]
