"""`gateway engine` as a process: it teaches, starts, serves, ends cleanly, and names what is wrong with its options."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.engines.embedded.cli import check_free, engine
from protos.errors import Conflict
from tests.support import processes
from tests.support.tiny_model import tiny_model

SMALL = ["--dtype", "float32", "--max-model-len", "128", "--kv-cache-tokens", "256", "--max-num-seqs", "2"]


def test_help_teaches() -> None:
    text = CliRunner().invoke(engine, ["--help"]).output
    for word in ("--model", "--batch-invariant", "--kv-cache-tokens", "curl", "transformers"):
        assert word in text


def test_help_needs_no_torch() -> None:
    code = "import sys, gateway.engines.embedded.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "Missing option '--model'"),
        (["--model", "/x"], 2, "Directory '/x' does not exist"),
        (["--model", "/", "--dtype", "int8"], 2, "'int8' is not one of 'float32', 'bfloat16'"),
        (["--model", "/", "--max-num-seqs", "many"], 2, "'many' is not a valid integer"),
        (["--model", "/", "--max-num-seqs", "-5"], 2, "-5 is not in the range x>=1"),
        (["--model", "/", "--threads", "0"], 2, "0 is not in the range x>=1"),
        (["--model", "/", "--port", "99999"], 2, "99999 is not in the range 0<=x<=65535"),
        (["--model", "/", "--log-level", "loud"], 2, "'loud' is not one of 'debug', 'info'"),
        (["--model", "/", "--device", "tpu"], 2, "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
    ],
)
def test_wrong_usage(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(engine, arguments)
    assert result.exit_code == status
    assert message in result.output


def test_a_port_in_use_is_found_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
    with pytest.raises(Conflict, match="choose another --host or --port"):
        check_free("192.0.2.1", 0)


def fails(*arguments: str) -> str:
    command = [sys.executable, "-m", "gateway.engines.embedded", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_wrong_model_directory_and_taken_port_are_one_clear_line(tmp_path: Path) -> None:
    assert "has no tokenizer.json" in fails("--model", str(tmp_path), *SMALL)
    assert "cannot hold a sequence" in fails("--model", str(tiny_model()), "--kv-cache-tokens", "64")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = fails("--model", str(tiny_model()), *SMALL, "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use (choose another --port" in said
    said = fails("--model", str(tiny_model()), *SMALL, "--ready-file", str(tmp_path / "none" / "ready"))
    assert "No such file or directory (choose another --ready-file)" in said


@pytest.mark.slow
def test_starts_serves_and_ends_cleanly(tmp_path: Path) -> None:
    command = ["gateway.engines.embedded", "--model", str(tiny_model()), *SMALL, "--weight-version", "3"]
    daemon = processes.start("engine", command, tmp_path)
    try:
        url = daemon.ready["url"]
        with urllib.request.urlopen(f"{url}/weight_info", timeout=60) as response:
            assert json.load(response) == {"weight_version": "3"}
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", data=body, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
    finally:
        assert daemon.stop() == 0, daemon.log()


@pytest.mark.slow
def test_dtype_auto_is_measured_and_told(tmp_path: Path) -> None:
    command = ["gateway.engines.embedded", "--model", str(tiny_model()), *SMALL, "--dtype", "auto"]
    daemon = processes.start("engine", command, tmp_path)
    try:
        with urllib.request.urlopen(f"{daemon.ready['url']}/v1/models", timeout=60) as response:
            dtype = json.load(response)["data"][0]["dtype"]
        assert f"--dtype auto: {dtype}: bfloat16 is " in daemon.log()
        assert "chosen" in daemon.log()
    finally:
        assert daemon.stop() == 0, daemon.log()
