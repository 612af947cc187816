"""Engine streams over HTTP/1.1: whatever the cuts of its bytes, the events are the same; when it is kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engines import http1, sockets
from gateway.engines.base import StreamCut
from gateway.engines.connections import Passed, Wire
from gateway.engines.http1 import EVENTS_WAITING_MAX, PASSED_WAITING_BYTES_MAX, Refused
from gateway.runtime import rounds
from tests.support.scripted_engine import pass_time, until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
STALL_S = 60.0


@pytest.fixture(autouse=True, params=["at-once", "in-later-rounds", "in-batches", "in-batches-of-one"])
def _share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether events are handed over by the read that brought them, or wait for another round of the loop, as over TLS;
    or sockets are read together."""
    if request.param.startswith("in-batches"):
        monkeypatch.setattr(sockets, "STREAMS_FEW", 1)
        monkeypatch.setattr(sockets, "SHARE_S", 0.0 if request.param == "in-batches-of-one" else sockets.SHARE_S)
    else:
        monkeypatch.setattr(http1, "plain_socket", lambda transport: None)
        monkeypatch.setattr(rounds, "SHARE_S", 0.0 if request.param == "in-later-rounds" else rounds.SHARE_S)


class Server:
    """Answers each request with the next script: the pieces as they are, then what `close` says. It hangs up on a
    request whose script is empty."""

    def __init__(self, *scripts: list[bytes], close: bool = False) -> None:
        self.scripts, self.close = list(scripts), close
        self.connections = self.left = self.open = 0
        self.url: str

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        hangs_up = self.close
        while self.scripts:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            if head.startswith(b"POST"):
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0]))
            if not self.scripts[0]:
                del self.scripts[0]
                hangs_up = True
                break
            async for piece in self.pieces():
                writer.write(piece)
                await asyncio.sleep(0)  # they go out one by one
        if not hangs_up:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        self.left += 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self.scripts.pop(0):
            yield piece


@asynccontextmanager
async def wire(server: Server, stall_timeout_s: float = STALL_S) -> AsyncIterator[Wire]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    made = Wire(server.url, stall_timeout_s=stall_timeout_s)
    try:
        yield made
    finally:
        await made.close()
        listening.close()
        await until(lambda: server.open == 0, "the server's connections closed")


async def read(made: Wire) -> list[bytes]:
    async with made.post("/v1/completions", b"{}") as events:
        return [data async for data in events]


async def delivered(made: Wire) -> list[bytes]:
    got: list[bytes] = []
    async with made.post("/v1/completions", b"{}") as events:
        await events.deliver(got.extend)
    return got


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(a, len(data)) for a in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


EVENT = st.binary(min_size=1, max_size=30).map(lambda data: data.hex().encode())


@given(
    st.lists(EVENT, max_size=6),
    st.lists(st.integers(0, 300), max_size=8),
    st.lists(st.integers(0, 700), max_size=8),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)
async def test_events_are_the_same_however_chunks_and_reads_cut_them(
    said: list[bytes], chunks: list[int], reads: list[int], end: bytes
) -> None:
    body = b"".join([b": a comment" + end, *(b"data: " + data + end for data in said), b"data: [DONE]" + end])
    answer = CHUNKED + b"".join(map(chunk, cut(body, chunks))) + b"0\r\n\r\n"
    server = Server(cut(answer, reads), cut(answer, reads))
    async with wire(server) as made:
        assert await read(made) == said
        assert await delivered(made) == said


async def test_a_connection_serves_again_once_its_answer_was_read_to_the_end() -> None:
    whole = CHUNKED + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    server = Server([whole], [whole])
    async with wire(server) as made:
        assert await read(made) == await read(made) == [b"1"]
        assert server.connections == 1


async def test_a_complete_answer_is_read_to_its_end_behind_the_back_of_who_left() -> None:
    first = CHUNKED + chunk(b"data: 1\n\n")
    server = Server([first, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"], [HEAD + b"Content-Length: 0\r\n\r\n"])
    async with wire(server) as made:
        async with made.post("/", b"{}") as events:
            async for _ in events:
                events.complete()
                break
        await until(lambda: bool(made.num_idle), "the connection's return")
        assert await read(made) == []
        assert server.connections == 1


async def test_leaving_early_closes_the_connection() -> None:
    server = Server([CHUNKED + chunk(b"data: 1\n\n")], [])
    async with wire(server) as made:
        async with made.post("/", b"{}") as events:
            async for _ in events:
                break
        await until(lambda: server.left == 1, "the server's end of file")


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with wire(Server([HEAD + b"\r\ndata: 1\n\n", b"data: 2\n\n"], close=True)) as made:
        assert await read(made) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot hex\r\n", "protocol"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "protocol"),
        (CHUNKED + b"7\r\ndata", "reset"),
        (HEAD, "reset"),
    ],
)
async def test_what_is_no_whole_answer_is_a_cut(answer: bytes, reason: str) -> None:
    async with wire(Server([answer], close=True)) as made:
        with pytest.raises(StreamCut) as found:
            await read(made)
        assert found.value.reason == reason


async def test_silence_is_a_cut_after_the_events_before_it() -> None:
    server = Server([CHUNKED + chunk(b"data: 1\n\n")], [])
    async with wire(server) as made, made.post("/", b"{}") as events:
        reading = aiter(events)
        assert await anext(reading) == b"1"
        pass_time(STALL_S)
        with pytest.raises(StreamCut) as found:
            await anext(reading)
    assert found.value.reason == "stalled"


async def test_a_stream_that_was_cut_from_this_side_is_not_whole_although_its_connection_closed() -> None:
    """The end of this stream is that of its connection."""
    async with wire(Server([HEAD + b"\r\ndata: 1\n\n"])) as made, made.post("/", b"{}") as events:
        reading = aiter(events)
        assert await anext(reading) == b"1"
        [connection] = made._busy
        await made.close()
        await until(lambda: connection._lost, "its end")
        with pytest.raises(StreamCut, match="the engine was taken out"):
            await anext(reading)


async def test_a_refusal_tells_what_the_server_said() -> None:
    async with wire(Server([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\nno, thanks"[:-1]])) as made:
        with pytest.raises(Refused) as found:
            await read(made)
    assert (found.value.status, found.value.text) == (400, "no, thank")


async def test_a_reader_that_lags_holds_the_engine_back_and_loses_nothing() -> None:
    said = [str(n).encode() for n in range(4 * EVENTS_WAITING_MAX)]
    pieces = [chunk(b"data: " + data + b"\n\n") for data in said]
    async with wire(Server([CHUNKED, *pieces, b"0\r\n\r\n"])) as made, made.post("/", b"{}") as events:
        reading = aiter(events)
        got = [await anext(reading)]
        await until(lambda: events.paused, "the engine's being held back")
        got += [data async for data in reading]
    assert got == said


async def test_more_than_may_wait_in_one_read_holds_nobody_back_who_takes_it_at_once() -> None:
    """As after a moment in which this process was late: what was held back has to be asked for again."""
    got: list[bytes] = []
    said = [b"data: %d\n\n" % n for n in range(2 * EVENTS_WAITING_MAX)]

    class Gated(Server):
        async def pieces(self) -> AsyncIterator[bytes]:
            self.scripts.clear()
            yield CHUNKED + chunk(said[0])
            await until(lambda: len(got) == 1, "the first, and that the rest is waited for")
            yield chunk(b"".join(said[1:-1]))
            await until(lambda: len(got) == len(said) - 1, "all but the last")
            yield chunk(said[-1]) + b"0\r\n\r\n"

    async with wire(Gated([b""])) as made, made.post("/", b"{}") as events, asyncio.timeout(60):
        await events.deliver(got.extend)
    assert got == [b"%d" % n for n in range(len(said))]


async def passed(made: Wire) -> tuple[int, str, bytes]:
    with contextlib.closing(await made.pass_on("/v1/completions", b"{}", stall_timeout_s=10.0)) as answer:
        return *await answer.head(), await rest(answer)


async def rest(answer: Passed) -> bytes:
    found = b""
    while data := await answer.some():
        found += data
    return found


@given(
    st.binary(max_size=80),
    st.lists(st.integers(0, 80), max_size=4),
    st.lists(st.integers(0, 300), max_size=8),
    st.booleans(),
    st.sampled_from([200, 400, 503]),
)
async def test_what_is_passed_on_is_the_same_however_chunks_and_reads_cut_it(
    body: bytes, chunks: list[int], reads: list[int], chunked: bool, status: int
) -> None:
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    head = b"HTTP/1.1 %d Said\r\nContent-Type: text/odd; charset=x\r\n%b\r\n\r\n" % (status, length)
    said = b"".join(map(chunk, cut(body, chunks))) + b"0\r\n\r\n" if chunked else body
    server = Server(cut(head + said, reads), cut(head + said, []))
    async with wire(server) as made:
        assert await passed(made) == (status, "text/odd; charset=x", body)
        assert await passed(made) == (status, "text/odd; charset=x", body)
        assert server.connections == 1


async def test_bytes_that_nobody_takes_hold_the_engine_back_and_the_connection_serves_again() -> None:
    size = 8 * PASSED_WAITING_BYTES_MAX
    server = Server([HEAD + b"Content-Length: %d\r\n\r\n" % size, bytes(size)], [HEAD + b"Content-Length: 1\r\n\r\nx"])
    async with wire(server) as made:
        with contextlib.closing(await made.pass_on("/", b"{}", stall_timeout_s=STALL_S)) as answer:
            await answer.head()
            await until(lambda: answer.paused, "the engine's being held back")
            pass_time(STALL_S)  # it is we who do not listen: no stall
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(await rest(answer)) == size
        assert (await passed(made))[2] == b"x"
        assert server.connections == 1


async def test_events_that_come_with_the_end_leave_the_connection_listening() -> None:
    many = b"".join(b"data: %d\n\n" % n for n in range(2 * EVENTS_WAITING_MAX))
    server = Server([HEAD + b"Content-Length: %d\r\n\r\n" % len(many) + many], [HEAD + b"Content-Length: 0\r\n\r\n"])
    async with wire(server) as made:
        assert len(await read(made)) == 2 * EVENTS_WAITING_MAX
        assert await read(made) == []
        assert server.connections == 1


async def test_who_waits_for_an_answer_gets_the_cut_that_another_made() -> None:
    async with wire(Server([b""], [])) as made:
        with contextlib.closing(await made.pass_on("/", b"{}", stall_timeout_s=10.0)) as answer:
            asyncio.get_running_loop().call_soon(answer.cut, StreamCut("abort", "it is needed"))
            with pytest.raises(StreamCut, match="it is needed"):
                await answer.head()


async def test_who_is_given_events_and_waits_holds_the_engine_back_and_loses_nothing() -> None:
    said = [str(n).encode() for n in range(4 * EVENTS_WAITING_MAX)]
    pieces = [chunk(b"data: " + data + b"\n\n") for data in said]
    got, go = list[bytes](), asyncio.Event()

    def take(events: list[bytes]) -> Awaitable[object] | None:
        got.extend(events)
        return None if go.is_set() else go.wait()

    async with wire(Server([CHUNKED, *pieces, b"0\r\n\r\n"])) as made, made.post("/", b"{}") as events:
        reading = asyncio.create_task(events.deliver(take))
        await until(lambda: events.paused, "the engine's being held back")
        assert len(got) < len(said)
        go.set()
        await reading
    assert got == said


async def test_what_the_taker_raises_is_raised_where_it_waits() -> None:
    def take(events: list[bytes]) -> None:
        raise StreamCut("version", f"not {events}")

    async with wire(Server([CHUNKED, chunk(b"data: 1\n\n")], [])) as made:
        with pytest.raises(StreamCut, match=r"not \[b'1'\]"):
            async with made.post("/", b"{}") as events:
                await events.deliver(take)


async def test_silence_cuts_a_delivery_after_the_events_before_it() -> None:
    got: list[bytes] = []

    def take(events: list[bytes]) -> None:
        got.extend(events)
        pass_time(STALL_S)

    async with wire(Server([CHUNKED + chunk(b"data: 1\n\n")], [])) as made:
        with pytest.raises(StreamCut) as found:
            async with made.post("/", b"{}") as events:
                await events.deliver(take)
    assert (got, found.value.reason) == ([b"1"], "stalled")


async def test_streams_side_by_side_get_their_own_events_in_order_whichever_round_they_wait_for() -> None:
    each = [[b"%d-%d" % (stream, at) for at in range(40)] for stream in range(8)]
    scripts = [[CHUNKED, *(chunk(b"data: " + data + b"\n\n") for data in events), DONE] for events in each]
    async with wire(Server(*scripts)) as made:
        got = await asyncio.gather(*(delivered(made) for _ in each))
    assert sorted(got) == sorted(each)


async def test_who_left_while_its_events_waited_for_a_round_is_given_none_and_others_get_theirs() -> None:
    script = [CHUNKED, *(chunk(b"data: %d\n\n" % at) for at in range(200))]
    other = [CHUNKED, *(chunk(b"data: %d\n\n" % at) for at in range(200)), DONE]
    async with wire(Server(script, other)) as made:
        given: list[bytes] = []
        leaver = asyncio.create_task(_deliver_to(made, given))
        await until(lambda: len(given) > 3, "its stream runs")
        stayer = asyncio.create_task(delivered(made))
        leaver.cancel()
        await asyncio.wait({leaver})
        num_given = len(given)
        assert await stayer == [b"%d" % at for at in range(200)]
        assert len(given) == num_given


async def _deliver_to(made: Wire, given: list[bytes]) -> None:
    async with made.post("/v1/completions", b"{}") as events:
        await events.deliver(given.extend)


class LaterRounds:
    """Nobody's turn comes before `come`."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def take(self, hand_over: Callable[[], None]) -> bool:
        self.waiting.append(hand_over)
        return False

    def come(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


async def test_a_connection_serves_again_while_its_last_answer_still_waits_for_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = LaterRounds()
    monkeypatch.setattr(rounds, "of", lambda loop: later)
    monkeypatch.setattr(http1, "plain_socket", lambda transport: None)
    server = Server(
        [CHUNKED, *(chunk(b"data: %d\n\n" % at) for at in range(5)), DONE], [CHUNKED + chunk(b"data: 9\n\n"), DONE]
    )
    async with wire(server) as made:
        given: list[bytes] = []
        leaver = asyncio.create_task(_deliver_to(made, given))
        await until(lambda: bool(later.waiting) and all(c.over for c in made._busy), "its end waits for a round")
        leaver.cancel()
        await asyncio.wait({leaver})
        assert made.num_idle == 1
        again: list[bytes] = []
        stayer = asyncio.create_task(_deliver_to(made, again))
        await until(lambda: again == [b"9"], "the first event of the next answer is handed over at once")
        later.come()
        await asyncio.wait_for(stayer, 60)
    assert server.connections == 1
    assert len(given) < 5


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 99999 OK\r\n\r\n",
        b"HTTP/1.1 7 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\nSet-Cookie: x\r\n\r\n",
        CHUNKED + b"-7\r\n",
        CHUNKED + b"5\r\n12345\r\n-7\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        CHUNKED + b"1" * (1 << 17),
    ],
)
async def test_what_no_http_has_cuts_the_stream_and_nothing_else(head: bytes) -> None:
    """A chunk of -7 bytes once held the whole event loop: it was read again and again."""
    async with wire(Server([head])) as found:
        with pytest.raises(StreamCut) as cut:
            await asyncio.wait_for(read(found), 10)
        assert cut.value.reason == "protocol"


PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"


async def test_whole_answers_come_over_the_connection_of_streams() -> None:
    server = Server([PAGE + b"hello"], [CHUNKED + DONE], [PAGE[:20], PAGE[20:] + b"th", b"ere"])
    async with wire(server) as made:
        assert (await made.get("/a", bytes_max=5))[:2] == (200, b"hello")
        assert await read(made) == []
        await until(lambda: made.num_idle == 1, "the connection kept")
        assert (await made.get("/b", bytes_max=5))[:2] == (200, b"there")
        assert (server.connections, made.num_idle) == (1, 1)


async def test_a_longer_answer_than_is_taken_is_refused() -> None:
    async with wire(Server([PAGE + b"hello"])) as made:
        with pytest.raises(ValueError, match="more than 4 bytes"):
            await made.get("/", bytes_max=4)


async def test_a_kept_connection_that_was_about_to_be_closed_costs_a_look_nothing() -> None:
    server = Server([PAGE + b"first"], [], [PAGE + b"again"], [], [])
    async with wire(server) as made:
        assert (await made.get("/a", bytes_max=5))[:2] == (200, b"first")
        assert (await made.get("/b", bytes_max=5))[:2] == (200, b"again")
        assert server.connections == 2
        with pytest.raises(StreamCut, match="broke the stream"):
            await made.get("/c", bytes_max=5)
        assert server.connections == 3, "a new connection that breaks is no kept one"


@pytest.mark.parametrize("behind", [PAGE + b"again", b"no HTTP at all\r\n\r\n"])
async def test_bytes_behind_an_answer_cost_its_connection_and_not_the_answer(behind: bytes) -> None:
    server = Server([PAGE + b"hello" + behind], [PAGE + b"other"])
    async with wire(server) as made:
        assert (await made.get("/a", bytes_max=5))[:2] == (200, b"hello")
        assert made.num_idle == 0
        assert server.connections == 1
