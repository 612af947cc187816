"""The schema that a running gateway serves, fuzzed by schemathesis: no 5xx, no answer besides the schema. Without keys,
and with them by every caller: nobody, each role, and the two keys of a session.

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
from tests.support.keys import HOLDERS, by, key_file, key_of
from tests.support.processes import Daemon
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


SEED = os.environ.get("LAMINAR_FUZZ_SEED", "1")
ROLES_EXAMPLES = str(max(2, int(EXAMPLES) // 5))
"""Of each operation, for each caller of a gateway with keys: most of what a caller sends is refused in one place."""
ADMIN_ROUTES = "^/(admin/|status|healthz?|metrics)"
"""What the admin listener answers, of the one schema."""
CALLERS = ("nobody", "admin", "admin at the admin listener", "trainer", "agent", "reader", "session", "finish")


def started(directory: Path, request: pytest.FixtureRequest, *options: str) -> Daemon:
    """A gateway over one scripted engine that serves."""
    kit = processes.start("kit", ["gateway", "faultkit", "--engines=1", "--cuts=0", "--pause-s=0"], directory)
    request.addfinalizer(kit.kill)
    command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}"]
    command += ["--queue-timeout-s=1", "--disconnect-grace-s=0", *options]
    gateway = processes.start("gateway", [*command, f"--engine=e0=vllm={kit.ready['e0']}"], directory)
    request.addfinalizer(gateway.kill)
    until(lambda: httpx.get(f"{gateway.ready['url']}/healthz").status_code == 200, "a serving engine")
    return gateway


def fuzzed(gateway: Daemon, directory: Path, examples: str, *more: str, phases: str = "coverage,fuzzing") -> None:
    """Fails where an answer is not one of the schema, and prints what schemathesis counted."""
    command = [str(SCHEMATHESIS), "run", f"{gateway.ready['url']}/openapi.json", f"--checks={','.join(CHECKS)}"]
    how = [f"--max-examples={examples}", f"--phases={phases}", "--request-timeout=20", "--continue-on-failure"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.support.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, *how, f"--seed={SEED}", *more],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    found = re.findall(r"^ +(Operations: .*|\d+ generated.*)$|^(Seed: .*)$", ran.stdout, re.MULTILINE)
    print(f"checked of every answer: {', '.join(CHECKS)}; {examples} examples of each operation")
    print("\n".join(operations or seed for operations, seed in found))
    assert ran.returncode == 0, ran.stdout[ran.stdout.find("FAILURES") :][:6000]


def test_what_the_schema_promises_is_kept_whatever_is_asked(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    gateway = started(tmp_path, request)
    fuzzed(gateway, tmp_path, EXAMPLES, f"--exclude-path-regex={SAME_HANDLERS}|{ENDLESS}")
    turns = httpx.get(f"{gateway.ready['url']}/status").raise_for_status().json()["counters"]
    print(f"turns: {turns['turns_started']} started, {turns['turns_completed']} completed")
    assert turns["turns_started"] > 0, "some of what was asked was put to an engine"
    assert turns["turns_lost"] == 0
    assert gateway.stop() == 0, gateway.log()[-3000:]
    assert "ERROR   gateway" not in gateway.log(), gateway.log()[-3000:]


@pytest.mark.parametrize("caller", CALLERS)
def test_the_same_holds_for_every_caller_of_a_gateway_with_keys(
    tmp_path: Path, request: pytest.FixtureRequest, caller: str
) -> None:
    """And nobody learns a key that he has not sent."""
    gateway = started(tmp_path, request, f"--api-keys={key_file(tmp_path)}")
    url = gateway.ready["url"]
    made = httpx.post(f"{url}/sessions", json={"session_id": "s0"}, headers=by("alice")).raise_for_status().json()
    holder = {"agent": "alice"}.get(caller, caller.partition(" ")[0])
    key = {"session": made["api_key"], "finish": made["finish_key"], "nobody": ""}.get(holder) or (
        key_of(holder) if holder in HOLDERS else ""
    )
    more = [f"--header=Authorization: Bearer {key}"] if key else []
    if "listener" in caller:
        more += [f"--url={gateway.ready['admin_url']}", f"--include-path-regex={ADMIN_ROUTES}"]
    else:
        more.append(f"--exclude-path-regex={SAME_HANDLERS}|{ENDLESS}")
    fuzzed(gateway, tmp_path, ROLES_EXAMPLES, *more, phases="fuzzing")
    assert gateway.stop() == 0, gateway.log()[-3000:]
    log = gateway.log()
    assert "ERROR   gateway" not in log, log[-3000:]
    secrets = [*map(key_of, HOLDERS), made["api_key"], made["finish_key"]]
    assert [secret for secret in secrets if secret in log] == []
