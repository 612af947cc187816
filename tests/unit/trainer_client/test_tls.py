"""A gateway behind a proxy that ends TLS: a mistake that no retry heals is named at once, in every client."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agents_env.failures import RunFailed
from agents_env.server import Sampling, Server
from paramserver.credentials.authority import Authority, Identity
from protos.errors import InvalidRequest, NotFound, WrongServer
from trainer_client import AsyncExperienceReader, AsyncPromptPool, AsyncSessions, Sessions
from trainer_client.sessions import Made

NOW = datetime.datetime.now(datetime.UTC)
REFUSAL = b'{"error": {"message": "nothing is here", "code": "not_found"}}'
ANSWER = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(REFUSAL), REFUSAL)


@asynccontextmanager
async def serving(context: ssl.SSLContext | None) -> AsyncIterator[str]:
    """The URL with https:// of a gateway that refuses everything; it speaks TLS only with a `context`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def secured(tmp_path: Path) -> ssl.SSLContext:
    """Of a server whose CA is `ca.pem`."""
    authority = Authority.new(NOW)
    issued = authority.issue(Identity("relay", "proxy"), ["127.0.0.1"], 1, NOW)
    for name, content in {"ca.pem": authority.pem, "cert.pem": issued.certificate, "key.pem": issued.key}.items():
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


async def threads(url: str) -> None:
    def opens() -> None:
        with Sessions(url) as sessions:
            sessions.open()

    await asyncio.to_thread(opens)


async def sessions(url: str) -> None:
    async with AsyncSessions(url) as client, client.open():
        pass


async def rows(url: str) -> None:
    async with AsyncExperienceReader(url) as reader:
        await reader.rows()


async def peek(url: str) -> None:
    async with AsyncExperienceReader(url) as reader:
        await reader.peek(trajectories=1)


async def pool(url: str) -> None:
    async with AsyncPromptPool(url) as client:
        await client.status()


async def runner(url: str) -> None:
    async with Server(url, Sampling("policy"), patience_s=60.0) as server:
        await server.check()


Door = Callable[[str], Awaitable[None]]


@pytest.mark.parametrize("door", [threads, sessions, rows, peek, pool])
async def test_a_mistake_of_tls_is_named_at_once(
    door: Door, secured: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(secured) as url:
        with pytest.raises(WrongServer, match=rf"the certificate of {url} is refused: .*SSL_CERT_FILE names a file"):
            await door(url)
    async with serving(None) as url:
        with pytest.raises(WrongServer, match=rf"what answers at {url} speaks no TLS \(begin the URL with http://\)"):
            await door(url)
    assert not [record for record in caplog.records if record.name != "asyncio"], "nothing is sent again"


async def test_a_runner_waits_for_none_of_them(secured: ssl.SSLContext, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "agents-env")
    for context, why in ((secured, "CERTIFICATE_VERIFY_FAILED"), (None, "WRONG_VERSION_NUMBER|record layer")):
        async with serving(context) as url:
            with pytest.raises(RunFailed, match=rf"{url} cannot be reached: .*({why})"):
                await runner(url)
    assert not [record for record in caplog.records if record.name == "agents-env"]


async def test_a_runner_names_certificates_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(RunFailed, match=r"SSL_CERT_FILE cannot be read: .*No such file.*it names a file"):
        await runner("http://127.0.0.1:9")


@pytest.mark.parametrize("door", [threads, sessions, rows, peek, pool])
async def test_a_ca_of_ones_own_is_named_by_the_environment(
    door: Door, secured: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with serving(secured) as url:
        with pytest.raises(NotFound, match="nothing is here"):
            await door(url)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(InvalidRequest, match=r"SSL_CERT_FILE cannot be read: .*No such file"):
        await door("https://127.0.0.1:9")


@pytest.mark.parametrize("door", [threads, sessions, rows, peek, pool])
async def test_certificates_that_cannot_be_read_matter_to_https_alone(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    async with serving(None) as url:
        with pytest.raises(NotFound, match="nothing is here"):
            await door(url.replace("https", "http"))


async def test_they_are_named_where_a_session_is_behind_https(
    secured: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(client: Sessions, url: str) -> None:
        client.post(Made("s0", f"{url}/sessions/s0/v1", ""), "/v1/completions", {})

    async with serving(secured) as url:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        with Sessions("http://127.0.0.1:9") as client, pytest.raises(NotFound, match="nothing is here"):
            await asyncio.to_thread(calls, client, url)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        with Sessions("http://127.0.0.1:9") as client, pytest.raises(InvalidRequest, match=r"be read: .*No such"):
            await asyncio.to_thread(calls, client, url)
