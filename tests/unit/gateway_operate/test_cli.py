"""`gateway` as its users meet it: what help teaches, and that every wrong word is answered with what would be right."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result

from gateway.cli import cli
from gateway.config import EngineSpec, GatewayConfig, parse_engine
from gateway.experience.stores import STORES, MemoryRows, StoreKind
from protos.errors import InvalidRequest, UnsupportedField
from tests.support import processes
from tests.support.scripted_engine import ScriptedEngine, until
from tests.support.words import tokenizer

pytestmark = pytest.mark.slow  # each starts the daemon itself

FORM = r"is not NAME=KIND=URL[@RELAY] (such as e0=vllm=http://127.0.0.1:8000@127.0.0.1:7070)"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def serve(directory: Path, *arguments: str) -> str:
    """What a `gateway serve` that must not start says, as a process: its exit status is 1 and nothing is dumped."""
    command = [sys.executable, "-m", "gateway", "serve", "--model=policy", f"--tokenizer={directory}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


# -- engines by their words


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("e0=vllm=http://h:1", EngineSpec("e0", "vllm", "http://h:1", None)),
        ("e0=vllm=https://h/below@r:2", EngineSpec("e0", "vllm", "https://h/below", "r:2")),
        ("e0=vllm=http://h:1@", EngineSpec("e0", "vllm", "http://h:1", None)),
    ],
)
def test_an_engines_words(text: str, spec: EngineSpec) -> None:
    assert parse_engine(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("", "e0", "e0=vllm", "e0=vllm=", "=vllm=http://h", "e0==http://h", "e0=vllm=h:80", "e0=http://h"),
        *("a=b=ftp:/", "e0=vllm=http://h:1@r", "e0=vllm=http://h:1@r:0"),
    ],
)
def test_what_is_no_engine_is_told_the_form(text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_engine(text)
    assert str(error.value) == f"--engine {text!r} {FORM}"


def test_an_unknown_kind_is_told_the_known_ones() -> None:
    with pytest.raises(UnsupportedField, match=r"no adapter for 'tgi' \(known kinds: vllm, sglang, embedded"):
        parse_engine("e0=tgi=http://h")


@pytest.mark.parametrize("url", ["http://", "http://h:99999", "http://h:port", "http://:80"])
def test_a_url_that_names_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="--engine"):
        parse_engine(f"e0=vllm={url}")


@pytest.mark.parametrize("text", ["e0", "e0=tgi=http://h"])
@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_what_is_no_engine_is_wrong_usage_which_no_supervisor_tries_again(command: str, text: str) -> None:
    refused = invoke(command, "--model=m", "--tokenizer=.", "--engine", text)
    assert (refused.exit_code, f"Error: --engine {text!r}" in refused.output) == (2, True), refused.output


# -- help


@pytest.mark.parametrize("arguments", [(), ("keys",)])
def test_lists_of_commands_break_no_sentence_off(arguments: tuple[str, ...]) -> None:
    found = invoke(*arguments, "--help").output
    assert "..." not in found.partition("Commands:")[2], found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["OpenAI-compatible", "gateway engine --model DIR", "--engine e0=embedded=", "/v1", "engine", "serve"]),
        (
            ["serve"],
            [
                "NAME=KIND=URL[@RELAY]",
                "[barrier|drain|repack|inflight]",
                "in memory",
                "Turns that one engine runs at once",
                "KV cache",
                "429",
            ],
        ),
    ],
)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_teaches(arguments: list[str], flag: str, words: list[str]) -> None:
    result = invoke(*arguments, flag)
    assert result.exit_code == 0
    for word in words:
        assert word in result.output


def test_serving_needs_no_torch() -> None:
    code = "import sys, gateway.cli, gateway.app; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# -- wrong usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "."], "Missing option '--model'"),
        (["--model", "m"], "Missing option '--tokenizer'"),
        (["--model", "", "--tokenizer", "."], "Invalid value for '--model': it is empty"),
        (["--relay", "host"], "'host' is not HOST:PORT, like 127.0.0.1:7000"),
        (["--etcd", "http://h:2379"], "'http://h:2379' is not HOST:PORT, like 127.0.0.1:7000"),
        (["--model", "m", "--tokenizer", "/nowhere"], "Directory '/nowhere' does not exist"),
        (["--model", "m", "--tokenizer", __file__], "is a file"),
        (["--mode", "fast"], "'fast' is not one of 'barrier', 'drain', 'repack', 'inflight'"),
        (["--max-running", "many"], "'many' is not a valid integer"),
        (["--kv-max", "most"], "'most' is not a valid float"),
        (["--data", __file__], "is a file"),
        (["--engines", "e0"], "No such option '--engines'"),
        (["engine"], "unexpected extra argument (engine)"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str) -> None:
    needed = [] if "--model" in arguments or "--tokenizer" in arguments else ["--model", "m", "--tokenizer", "."]
    result = invoke("serve", *needed, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_an_unknown_command_is_named() -> None:
    result = invoke("server")
    assert (result.exit_code, "No such command 'server'" in result.output) == (2, True)


@pytest.mark.parametrize("wrong", ["--port=99999", "--port=-1", "--kv-max=-1", "--max-running=0", "--log-level=loud"])
def test_a_value_out_of_its_range_is_named(wrong: str) -> None:
    engine = "--engine=nothing"  # so that what lets the value pass ends too
    result = invoke("serve", "--model=m", "--tokenizer=.", engine, wrong)
    assert result.exit_code == 2
    assert wrong.partition("=")[0] in result.output


def test_what_keeps_it_from_starting_is_named(tmp_path: Path) -> None:
    directory = tokenizer(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = serve(directory, f"--port={port}")
    taken_ = f"cannot listen on 127.0.0.1:{port}: Address already in use (choose another --port, or 0 for any free one)"
    assert taken_ in said
    said = serve(directory, "--port=0", "--host=192.0.2.1", "--insecure")  # nobody's, by RFC 5737
    assert "cannot listen on 192.0.2.1:0: Cannot assign requested address (choose another --host or --port)" in said
    said = serve(directory, "--port=0", f"--ready-file={tmp_path}/none/ready")
    assert f"cannot write {tmp_path}/none/ready: No such file or directory (choose another --ready-file)" in said
    assert "Unclosed" not in said
    said = serve(directory, "--port=0", f"--data={directory}/tokenizer.json/below")
    assert "Not a directory (give a --data directory that can be written, and is a gateway's or empty)" in said
    said = serve(tmp_path, "--port=0")
    assert f"no tokenizer.json in {tmp_path} (give a Hugging Face model directory with a fast tokenizer)" in said


@pytest.fixture(scope="module")
def two_of_one_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    engines = ["--engine=e0=vllm=http://127.0.0.1:1", "--engine=e0=vllm=http://127.0.0.1:2"]
    return serve(tokenizer(tmp_path_factory.mktemp("model")), "--port=0", *engines)


def test_two_engines_of_one_name_are_refused(two_of_one_name: str) -> None:
    assert "there is already an engine named 'e0' (taken: e0)" in two_of_one_name


def test_a_start_that_fails_lets_go_of_its_engines(two_of_one_name: str) -> None:
    assert "Unclosed" not in two_of_one_name


# -- a start that succeeds


async def test_it_serves_until_told_to_stop(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        flags = [
            f"--tokenizer={tokenizer(tmp_path / 'model')}",
            f"--engine=e0=vllm={e0.url}",
            f"--data={tmp_path / 'd'}",
        ]
        command = ["gateway", "serve", "--model=policy", "--port=0", "--mode=drain", *flags]
        daemon = await asyncio.to_thread(processes.start, "gateway", command, tmp_path)
        body = {"model": "policy", "prompt": [1, 2], "max_tokens": 4, "return_token_ids": True}
        async with aiohttp.ClientSession(daemon.ready["url"]) as http:
            await serving(http)
            async with http.post("/v1/completions", json=body) as answer:
                answered: dict[str, Any] = await answer.json()
        assert await asyncio.to_thread(daemon.stop) == 0
    assert answered["choices"][0]["finish_reason"] == "length", json.dumps(answered)
    assert (tmp_path / "d" / "gateway.sqlite").exists()
    log = daemon.log()
    assert "GatewayConfig(model='policy'" in log  # resolved once, told at the start
    assert [word in log for word in ("with 1 engines", "draining", "closed", "Traceback")] == [True, True, True, False]


@pytest.mark.parametrize("kept", [True, False], ids=["with data", "in memory"])
async def test_a_second_signal_waits_for_no_turn(tmp_path: Path, kept: bool) -> None:
    async with ScriptedEngine("e0", hold_at=2) as e0:
        flags = [f"--tokenizer={tokenizer(tmp_path / 'model')}", f"--engine=e0=vllm={e0.url}"]
        flags += [f"--data={tmp_path / 'd'}"] if kept else []
        command = ["gateway", "serve", "--model=policy", "--port=0", *flags]
        daemon = await asyncio.to_thread(processes.start, "gateway", command, tmp_path)
        body = {"model": "policy", "prompt": [1, 2], "max_tokens": 4}
        async with aiohttp.ClientSession(daemon.ready["url"]) as http:
            await serving(http)
            asked = asyncio.create_task(http.post("/v1/completions", json=body).__aenter__())
            await until(lambda: e0.said_tokens, "a running turn")
            daemon.process.send_signal(signal.SIGINT)
            await until(lambda: "1 turns run; another signal" in daemon.log(), "the drain", 180)
            daemon.process.send_signal(signal.SIGINT)
            answer = await asked
            assert answer.status == 503, "for the client to ask again"
            assert ("send it again: the turn will go on" in await answer.text()) == kept
        assert await asyncio.to_thread(daemon.process.wait, 180.0) == 0
    assert f"1 turns still run: {'the next start resumes them' if kept else 'they end here'}" in daemon.log()
    assert "Traceback" not in daemon.log()


async def serving(http: aiohttp.ClientSession) -> None:
    """Until some engine serves."""
    async with asyncio.timeout(180):
        while True:
            async with http.get("/healthz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("flags", "named"), [([], True), (["--no-session-from-user"], False)])
def test_whether_users_name_sessions_is_configured(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], named: bool
) -> None:
    seen: list[GatewayConfig] = []

    async def served(config: GatewayConfig, ready_file: Path | None) -> None:
        seen.append(config)

    monkeypatch.setattr("gateway.cli._serve", served)
    assert invoke("serve", "--model=m", "--tokenizer=.", *flags).exit_code == 0
    assert [config.session_from_user for config in seen] == [named]


@pytest.mark.parametrize(("flags", "store"), [([], "database"), (["--experience-store", "memory"], "memory")])
def test_where_trajectories_wait_is_configured(monkeypatch: pytest.MonkeyPatch, flags: list[str], store: str) -> None:
    seen: list[GatewayConfig] = []

    async def served(config: GatewayConfig, ready_file: Path | None) -> None:
        seen.append(config)

    monkeypatch.setattr("gateway.cli._serve", served)
    assert invoke("serve", "--model=m", "--tokenizer=.", *flags).exit_code == 0
    assert [config.experience_store for config in seen] == [store]
    refused = invoke("serve", "--model=m", "--tokenizer=.", "--experience-store=disk")
    assert refused.exit_code == 2
    assert f"it is none of {', '.join(map(repr, STORES))}, or the address of a Redis" in refused.output
    assert "redis://HOST:PORT/DB" in refused.output


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_store_is_named_and_explained_by_its_row_alone(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    names = "|".join(STORES)
    shown = " ".join(invoke(command, "--help").output.split())
    assert f"--experience-store {names}|redis://HOST:PORT/DB" in shown
    assert [name for name, kind in STORES.items() if f"`{name}`: {kind.help}." not in shown] == []
    assert "`memory`: never on disk, and lost at exit" in shown
    monkeypatch.setitem(STORES, "shelf", StoreKind(MemoryRows, "on a shelf"))  # type: ignore[arg-type]
    shown = " ".join(invoke(command, "--help").output.split())
    assert f"--experience-store {names}|shelf|redis://HOST:PORT/DB" in shown
    assert "`shelf`: on a shelf." in shown
    refused = invoke(command, "--model=m", "--tokenizer=.", "--experience-store=disk")
    assert ", 'shelf', or the address" in refused.output


def test_commands_that_need_no_store_start_without_it() -> None:
    """`gateway status` is typed often, and SQLite and numpy take half as long again to import as all that it needs."""
    code = "import sys, gateway.cli; sys.exit('gateway.experience' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_address_of_a_redis_is_configured_and_its_password_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GatewayConfig] = []

    async def served(config: GatewayConfig, ready_file: Path | None) -> None:
        seen.append(config)

    monkeypatch.setattr("gateway.cli._serve", served)
    flags = ("--experience-store=redis://:secret@host:7000/2", "--redis-namespace=run7", "--redis-unchecked")
    assert invoke("serve", "--model=m", "--tokenizer=.", *flags).exit_code == 0
    [config] = seen
    assert (str(config.experience_store), config.redis_namespace) == ("redis://host:7000/2", "run7")
    assert config.redis_unchecked
    assert "secret" not in repr(config)


@pytest.mark.parametrize("flag", ["queue-timeout-s", "poll-interval-s", "kv-max", "stall-timeout-s"])
def test_what_is_no_number_is_no_time(flag: str, tmp_path: Path) -> None:
    """Nothing is before or after it: one such timer would put all others out of order."""
    said = invoke("serve", "--model=policy", f"--tokenizer={tmp_path}", f"--{flag}", "nan")
    assert (said.exit_code, f"'--{flag}': nan is no number" in said.output) == (2, True), said.output


def test_an_interval_has_a_least(tmp_path: Path) -> None:
    for flag in ("--poll-interval-s", "--repack-interval-s"):
        said = invoke("serve", "--model=policy", f"--tokenizer={tmp_path}", flag, "1e-9")
        assert (said.exit_code, "x>=0.01" in said.output) == (2, True), said.output
