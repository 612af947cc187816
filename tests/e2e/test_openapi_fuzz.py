"""The schema that a running gateway serves, fuzzed by schemathesis: no 5xx, no answer besides the schema.

`make fuzz` installs schemathesis beside `.venv`, and says how many examples of each operation (`EXAMPLES=50`).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support import processes
from tests.support.fleet import until
from tests.support.skips import needs
from tests.support.words import tokenizer

ROOT = Path(__file__).parents[2]
SCHEMATHESIS = ROOT / ".venv-fuzz/bin/schemathesis"
EXAMPLES = os.environ.get("LAMINAR_FUZZ_EXAMPLES", "15")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",  # every refusal has OpenAI's error body
    "negative_data_rejection",  # what the schema does not allow is refused
    "unsupported_method",
    "allow_header_conformance",
)
"""Not that all that is valid is taken: a schema cannot say which model is served, or which fields exclude others."""
SAME_HANDLERS = "/s/"
ENDLESS = "/ui/feed$"
"""A stream that goes on until the client leaves."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SCHEMATHESIS.exists(), reason=needs("schemathesis is not installed", "`make fuzz`")),
]


def test_what_the_schema_promises_is_kept_whatever_is_asked(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kit = processes.start("kit", ["gateway", "faultkit", "--engines=1", "--cuts=0", "--pause-s=0"], tmp_path)
    request.addfinalizer(kit.kill)
    command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={tokenizer(tmp_path / 'model')}"]
    command += ["--queue-timeout-s=1", "--disconnect-grace-s=0"]
    gateway = processes.start("gateway", [*command, f"--engine=e0=vllm={kit.ready['e0']}"], tmp_path)
    request.addfinalizer(gateway.kill)
    url = gateway.ready["url"]
    until(lambda: httpx.get(f"{url}/healthz").status_code == 200, "a serving engine")
    fuzz = [str(SCHEMATHESIS), "run", f"{url}/openapi.json", f"--checks={','.join(CHECKS)}"]
    how = [f"--max-examples={EXAMPLES}", "--phases=coverage,fuzzing", "--request-timeout=20", "--continue-on-failure"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.support.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*fuzz, *how, f"--exclude-path-regex={SAME_HANDLERS}|{ENDLESS}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    found = re.findall(r"^ +(Operations: .*|\d+ generated.*)$|^(Seed: .*)$", ran.stdout, re.MULTILINE)
    print(f"checked of every answer: {', '.join(CHECKS)}; {EXAMPLES} examples of each operation")
    print("\n".join(operations or seed for operations, seed in found))
    turns = httpx.get(f"{url}/status").raise_for_status().json()["counters"]
    print(f"turns: {turns['turns_started']} started, {turns['turns_completed']} completed")
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert turns["turns_started"] > 0, "some of what was asked was put to an engine"
    assert turns["turns_lost"] == 0
    assert gateway.stop() == 0, gateway.log()[-3000:]
    assert "ERROR   gateway" not in gateway.log(), gateway.log()[-3000:]
    assert kit.stop() == 0
