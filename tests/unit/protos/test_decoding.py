"""The first decoding of a kind may happen in several threads at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, threading
import msgspec
from protos.decoding import decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
ROUNDS, THREADS = 300, 4
for _ in range(ROUNDS):
    inner = msgspec.defstruct("Inner", [(f"field_{n}", "int") for n in range(20)])
    kind = msgspec.defstruct("Kind", [(f"part_{n}", inner) for n in range(5)])
    value = kind(*[inner(*range(20))] * 5)
    as_json, as_msgpack = msgspec.json.encode(value), msgspec.msgpack.encode(value)
    begin = threading.Barrier(THREADS)

    def decode():
        begin.wait()
        assert decode_json(as_json, kind) == value
        assert decode_msgpack(as_msgpack, kind) == value

    threads = [threading.Thread(target=decode) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.slow
def test_threads_that_decode_a_new_kind_at_once_crash_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_decoded_by_type_past_it() -> None:
    past = re.compile(r"msgspec\.(json|msgpack)\.decode\([^\n]*type=")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in ("paramserver", "gateway", "trainer_client", "agents_env")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if past.search(line)
    ]
    assert found == []
