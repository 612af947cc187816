"""The proxy of docs/security.md in front of a gateway: TLS ends there, streams pass, and sessions are where it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_docs import blocks
from tests.support import processes
from tests.support.fleet import until
from tests.support.keys import CALL, by, key_file
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine, in_thread
from tests.support.skips import needs
from tests.support.words import tokenizer

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (NGINX and shutil.which("openssl")),
        reason=needs("nginx is not installed", "sudo make system-packages"),
    ),
]
HELD_AT = 4


def configuration(directory: Path, port: int, gateway: str) -> str:
    """The page's own server, at ports and with files of this test."""
    [server] = blocks("docs/security.md", "nginx")
    changes = {
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "rollouts.example.org": "localhost",
        "/etc/ssl/rollouts.pem": str(directory / "cert.pem"),
        "/etc/ssl/rollouts.key": str(directory / "key.pem"),
        "http://127.0.0.1:8080": gateway,
    }
    for shown, here in changes.items():
        assert shown in server, shown
        server = server.replace(shown, here)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    scratch = "\n".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
    head = f"daemon off; master_process off; pid {directory}/pid; error_log {directory}/errors.log; events {{}}"
    return f"{head}\nhttp {{ access_log off; {scratch}\n{server}}}\n"


@pytest.fixture
def engine() -> Iterator[tuple[ScriptedEngine, str]]:
    scripted = ScriptedEngine("e0", hold_at=HELD_AT, chunk=1)
    with in_thread(scripted) as url:
        yield scripted, url


def certificate(directory: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run([*command, *files, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)


def started(directory: Path, engine: str, public: str, request: pytest.FixtureRequest) -> Daemon:
    command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}"]
    command += [f"--engine=e0=vllm={engine}", f"--api-keys={key_file(directory)}", f"--public-url={public}"]
    gateway = processes.start("gateway", command, directory)
    request.addfinalizer(gateway.stop)
    until(lambda: httpx.get(f"{gateway.ready['url']}/healthz").status_code == 200, "a serving engine")
    return gateway


def test_a_session_behind_the_proxy(
    tmp_path: Path, engine: tuple[ScriptedEngine, str], request: pytest.FixtureRequest
) -> None:
    scripted, engine_url = engine
    certificate(tmp_path)
    with KeptPorts() as ports:
        port = ports.of("proxy")
        public = f"https://localhost:{port}"
        gateway = started(tmp_path, engine_url, public, request)
        path = tmp_path / "nginx.conf"
        path.write_text(configuration(tmp_path, port, gateway.ready["url"]))
        proxy = subprocess.Popen([str(NGINX), "-p", str(tmp_path), "-c", str(path)], stderr=subprocess.PIPE)
        request.addfinalizer(lambda: _ended(proxy))
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with httpx.Client(verify=trusted, timeout=60.0) as client:
            until(lambda: _answers(client, public), "the proxy answers")
            assert client.get(f"{public}/status").status_code == 401
            made = client.post(f"{public}/sessions", json={"session_id": "a%b"}, headers=by("alice")).json()
            assert made["base_url"] == f"{public}/sessions/a%25b/v1"
            own = {"Authorization": f"Bearer {made['api_key']}"}
            body = {**CALL, "max_tokens": 8, "stream": True}
            with client.stream("POST", f"{made['base_url']}/completions", json=body, headers=own) as stream:
                assert stream.status_code == 200
                lines = stream.iter_lines()
                first = next(line for line in lines if line.startswith("data: "))
                assert json.loads(first.removeprefix("data: "))["choices"], "it came while the engine holds the rest"
                scripted.go.set()
                rest = [line for line in lines if line.startswith("data: ")]
            assert rest[-1] == "data: [DONE]"
            session = client.get(f"{public}/sessions/a%25b", headers=by("alice")).json()
            assert (session["session_id"], session["turns"]) == ("a%b", 1)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def _ended(proxy: subprocess.Popen[bytes]) -> None:
    proxy.send_signal(signal.SIGTERM)
    _, errors = proxy.communicate(timeout=60.0)
    assert not re.search(rb"\[(emerg|alert|crit)\]", errors), errors
