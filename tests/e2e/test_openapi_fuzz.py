"""The schema that a running gateway serves, fuzzed by schemathesis: no 5xx. `make fuzz` installs it beside `.venv`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support import processes
from tests.support.fleet import until
from tests.support.words import tokenizer

SCHEMATHESIS = Path(__file__).parents[2] / ".venv-fuzz/bin/schemathesis"
EXAMPLES = os.environ.get("LAMINAR_FUZZ_EXAMPLES", "15")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="`make fuzz` installs schemathesis"),
]


def test_schemathesis_finds_no_5xx(tmp_path: Path) -> None:
    kit = processes.start("kit", ["gateway", "faultkit", "--engines=1", "--cuts=0", "--pause-s=0"], tmp_path)
    command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={tokenizer(tmp_path / 'model')}"]
    gateway = processes.start("gateway", [*command, f"--engine=e0=vllm={kit.ready['e0']}"], tmp_path)
    url = gateway.ready["url"]
    until(lambda: httpx.get(f"{url}/healthz").status_code == 200, "a serving engine")
    fuzz = [
        str(SCHEMATHESIS),
        "run",
        f"{url}/openapi.json",
        "--checks=not_a_server_error",
        f"--max-examples={EXAMPLES}",
    ]
    narrowed = ["--phases=coverage,fuzzing", "--request-timeout=20", "--exclude-path-regex=/s/|experience/sample"]
    ran = subprocess.run([*fuzz, *narrowed], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    print("\n".join(re.findall(r"^ +(?:\d+ generated|Tested).*$", ran.stdout, re.MULTILINE)))
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert gateway.stop() == 0, gateway.log()[-3000:]
    assert kit.stop() == 0
