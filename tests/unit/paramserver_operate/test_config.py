"""Configuration: sizes, names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paramserver.cli import cli
from paramserver.config import RelayConfig, show_bytes
from protos.errors import InvalidRequest
from protos.options import parse_bytes

POOL = Path("/dev/shm/laminar-test")


@pytest.mark.parametrize(
    ("text", "num"),
    [("0", 0), ("4096", 4096), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2tib", 2 << 40), ("64MIB", 64 << 20)],
)
def test_sizes(text: str, num: int) -> None:
    assert parse_bytes(text) == num


@pytest.mark.parametrize("text", ["", "lots", "4GB", "-1", "1 2", "4GiB/s"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_shown_short() -> None:
    assert [show_bytes(num) for num in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5 GiB",
        "3 TiB",
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "a/b"}, "cannot name a relay"),
        ({"retain": 0}, "--retain is 0"),
        ({"chunk_bytes": 10}, "chunks of 10 B .use 4 KiB"),
        ({"chunk_bytes": 8 << 30}, "chunks of 8 GiB"),
        ({"max_rate": 0}, "--max-rate is 0 B"),
        ({"max_rate": 1024}, "--max-rate is 1 KiB"),
        ({"lease_ttl_s": float("nan")}, "--lease-ttl-s is nan"),
        ({"lease_ttl_s": float("inf")}, "--lease-ttl-s is inf"),
        ({"silence_s": float("nan")}, "--silence-s is nan"),
        ({"silence_s": float("inf")}, "--silence-s is inf"),
        ({"spill": Path("/dev/shm/pool/spill"), "pool_dir": Path("/dev/shm/pool")}, "which is in memory"),
        ({"spill": Path("pool"), "pool_dir": Path("./pool")}, "which is in memory"),
        ({"host": "0.0.0.0"}, r"every address of this host.*--advertise"),
        ({"host": "::"}, "every address of this host"),
        ({"advertise": "0.0.0.0"}, "every address of this host"),
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        RelayConfig(**{"name": "a", "etcd": "h:1", "pool_dir": POOL, **wrong})  # type: ignore[arg-type]


def test_what_others_are_told_is_where_they_reach_it() -> None:
    assert RelayConfig("a", "h:1", pool_dir=POOL, host="10.0.0.1").reached_by == "10.0.0.1"
    named = RelayConfig("a", "h:1", pool_dir=POOL, host="0.0.0.0", advertise="trainer-0")
    assert named.reached_by == "trainer-0"


@pytest.mark.parametrize(
    "command",
    [
        ["adopt", "--continues", "x", "--model", "policy", "--above", "9" * 30],
        ["pull", "--model", "policy", "--out", "unused", "--version", "9" * 30],
    ],
)
def test_numbers_that_no_version_has_are_wrong_usage(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "--relay", "127.0.0.1:1"])
    assert done.exit_code == 2, done.output
    assert "is not in the range" in done.output


def test_an_engine_beside_a_relay_that_is_none_is_wrong_usage() -> None:
    done = CliRunner().invoke(cli, ["serve", "--engine", "vllm"])
    assert (done.exit_code, "Error: " in done.output) == (2, True), done.output


def test_a_daemon_that_writes_json_says_in_json_why_it_does_not_start() -> None:
    done = CliRunner().invoke(cli, ["serve", "--log-format", "json", "--etcd-user", "me", "--port", "0"])
    assert done.exit_code == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["level"], "add --etcd HOST:PORT" in last["message"]) == ("error", True), done.stderr
