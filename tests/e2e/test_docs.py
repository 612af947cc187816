"""What README and the pages of docs/ show runs as it stands there: daemons, commands of operators, and programs.

Only addresses, sizes and directories are the test's own. The quick start has a test by itself, `test_quick_start`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from gateway.core.access import OPERATIONS
from protos.access.credentials import CREDENTIALS_VARIABLE
from protos.access.roles import ROLES
from tests.support import processes
from tests.support.fleet import until
from tests.support.pages import blocks, lines
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.relays import PATIENT
from tests.support.tiny_model import tiny_model
from trainer_client import Publisher

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FLEET = "docs/fleet.md"
GROUPS, GROUP_SIZE = 4, 8
GATEWAY = ("--version-hold-s", "1")
"""Programs of the pages leave sessions open, and by default a version is held for those for two minutes."""
RUN_HERE = {
    ("README.md", "python"): 2,
    ("docs/agents.md", "python"): 3,
    ("docs/agents.md", "json"): 1,
    (FLEET, "sh"): 2,
    (FLEET, "python"): 1,
    ("docs/guide.md", "sh"): 1,
    ("docs/prompt-pool.md", "python"): 1,
    ("docs/runner.md", "sh"): 1,
    ("docs/security.md", "sh"): 2,
}
"""Blocks of code by page and language that tests of this module run, all of them."""
RUN_ELSEWHERE = {
    ("README.md", "sh"): 1,  # `.ci/run` types it
    ("docs/experience.md", "python"): 4,  # test_experience_reader.py
    ("docs/operations.md", "sh"): 2,  # operating/test_backup.py
    ("docs/environments.md", "json"): 2,  # `tests/unit/agents_env/test_commands.py`, and the next one
    ("docs/environments.md", "python"): 1,
    ("docs/publishing.md", "python"): 8,  # test_docs_publishing.py, and the next one
    ("docs/publishing.md", "sh"): 1,
    ("docs/quick-start.md", "sh"): 2,
    ("docs/quick-start.md", "python"): 2,
    ("docs/secured-fleet.md", "sh"): 7,  # operating/test_secured_fleet.py
    ("docs/secured-fleet.md", "python"): 4,
    ("docs/security.md", "nginx"): 1,  # operating/test_proxy.py
    ("docs/shared-experience.md", "sh"): 1,  # test_shared_experience.py
    ("docs/tables.md", "sh"): 1,  # test_tables.py
    ("docs/telemetry.md", "json"): 1,  # `tests/unit/telemetry/test_page.py`, and the next two
    ("docs/telemetry.md", "sh"): 1,
    ("docs/telemetry.md", "yaml"): 1,
    ("docs/trl.md", "python"): 2,  # `tests/trl/test_docs.py`
    ("docs/vllm-trainers.md", "python"): 1,  # `tests/vllm/trainer.py`
    ("docs/verl.md", "python"): 1,  # `tests/verl/program.py`
}


def test_no_page_shows_code_that_no_test_runs() -> None:
    pages = ["README.md", *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
    found = {
        (page, language): len(blocks(page, language))
        for page in pages
        for language in re.findall(r"^```(\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert found == RUN_HERE | RUN_ELSEWHERE


@dataclass
class Documented:
    """The processes that docs/fleet.md starts, on one machine."""

    directory: Path
    pools: Path
    etcd: str
    ports: KeptPorts

    def here(self, text: str) -> str:
        """`text` with this machine's addresses, directories and sizes."""
        for shown, instead in {
            r"etcd:2379": self.etcd,
            r"127\.0\.0\.1:8000@8443": lambda _: (
                f"127.0.0.1:{self.port('engines-0:8000')}@{self.port('engines-0:8443')}"
            ),
            r"--name (\S+) (.*)--pool-bytes 64GiB": rf"--name \1 \2--pool-bytes 64MiB --pool-dir {self.pools}/\1",
            r"doctor --pool-bytes 64GiB": f"doctor --pool-bytes 64MiB --pool-dir {self.pools}/doctor",
            r"--host ([a-z]+-\d) --port (\d+)": self._listen,
            r"--port (\d+)": lambda found: f"--port {self.port(f'gateway:{found[1]}')}",
            r"localhost:7070": "trainer-0:7070",
            r"localhost:8080": "gateway:8080",
            r"\b([a-z]+-\d|gateway):(\d+)": lambda found: f"127.0.0.1:{self.port(found[0])}",
            r"(?<=[ \"])\./": f"{self.directory}/",
            r"^(gateway (status|sessions|top|repack))": rf"\1 --url http://127.0.0.1:{self.port('gateway:8080')}",
        }.items():
            text = re.sub(shown, instead, text)  # type: ignore[arg-type]  # a text, or a function that makes one
        return text

    def port(self, address: str) -> int:
        return self.ports.of(address)

    def _listen(self, found: re.Match[str]) -> str:
        return f"--host 127.0.0.1 --port={self.port(f'{found[1]}:{found[2]}')}"

    def start(self, name: str, command: str) -> Daemon:
        words = shlex.split(self.here(command), comments=True)
        ours = PATIENT if words[0] == "paramserver" else GATEWAY if words[:2] == ["gateway", "serve"] else ()
        return processes.start(name, [*words, *ours], self.directory)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(self.here(command), comments=True)
        return subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=300, cwd=self.directory
        )

    def curl(self, command: str) -> httpx.Response:
        """What `curl` would get; it need not be installed."""
        parser = argparse.ArgumentParser()
        for option in ("-X", "-d"):
            parser.add_argument(option)
        parser.add_argument("url")
        asked = parser.parse_args(shlex.split(self.here(command), comments=True)[1:])
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        return httpx.request(asked.X or "GET", f"http://{asked.url}", content=asked.d, headers=form, timeout=60.0)

    def program(self, text: str, **names: Any) -> dict[str, Any]:
        """What a program leaves behind, with `names` known to it."""
        exec(compile(self.here(text), "docs", "exec"), names)
        return names

    def engines(self) -> dict[str, Any]:
        status = httpx.get(f"http://127.0.0.1:{self.port('gateway:8080')}/status", timeout=60.0).json()
        return {engine["name"]: engine for engine in status["engines"]}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, shared_etcd: str) -> Iterator[Documented]:
    """Two relays, an engine that one of them registers, and the gateway, by the commands of docs/fleet.md."""
    directory = tmp_path_factory.mktemp("docs")
    (directory / "model").symlink_to(tiny_model())
    pools = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    with KeptPorts() as ports, ExitStack() as stack:
        stack.callback(shutil.rmtree, pools)
        found = Documented(directory, pools, shared_etcd, ports)
        credentials, trainers, engines = lines(blocks(FLEET, "sh")[0])
        made = found.run(credentials)
        assert made.returncode == 0, made.stderr
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv(CREDENTIALS_VARIABLE, str(directory / "fleet/admin"))  # as the page says of its commands
        registering, gateway, *_ = lines(blocks(FLEET, "sh")[1])
        engine = re.search(r"`(gateway engine .*?)`", (ROOT / FLEET).read_text())
        assert engine is not None
        flags = engines.partition("engines-0 ")[2]
        for name, command in {
            "engine": engine[1].replace("--port 8000", f"--port={ports.of('engines-0:8000')}"),
            "trainer-0": trainers,
            "engines-0": registering.replace("...", flags),
            "gateway": gateway,
        }.items():
            daemon = found.start(name, command)
            stack.callback(lambda daemon=daemon: _ended(daemon))  # type: ignore[misc]
        until(lambda: any(engine["state"] == "serving" for engine in found.engines().values()), "the engine")
        yield found


def _ended(daemon: Daemon) -> None:
    assert daemon.stop() == 0, daemon.log()[-4000:]


def test_engines_are_added_and_removed_while_the_gateway_runs(fleet: Documented) -> None:
    scripted = re.search(r"`(gateway faultkit .*?)`", (ROOT / FLEET).read_text())
    assert scripted is not None
    first = fleet.port("engines-2:8000")
    command = scripted[1].replace("--engines 2 --port 9000", f"--engines 1 --port={first}")
    with ExitStack() as stack:
        stack.callback(fleet.start("faultkit", command).stop)
        add, remove = (line for line in lines(blocks(FLEET, "sh")[1]) if line.startswith("curl"))
        assert fleet.curl(add).status_code == 201
        assert "e1" in fleet.engines()
        assert fleet.curl(remove).status_code == 200
        assert "e1" not in fleet.engines()


@pytest.mark.parametrize("page", ["README.md", "docs/agents.md"])
def test_an_agents_turns_are_a_session(fleet: Documented, page: str) -> None:
    (program,) = (block for block in blocks(page, "python") if "/sessions" in block or "Sessions" in block)
    left = fleet.program(program)
    assert left["answer"].choices[0].message.content is not None
    session = left["session"]
    name = session["session_id"] if isinstance(session, dict) else session.session_id
    session = httpx.get(f"http://127.0.0.1:{fleet.port('gateway:8080')}/sessions/{name}")
    assert session.json()["state"] == "finished", session.text


def test_other_apis_take_the_turns_that_the_page_shows(fleet: Documented) -> None:
    for api, few in (
        ("anthropic", ("max_tokens=512", "max_tokens=4")),
        ("responses", ("input=", "max_output_tokens=4, input=")),
    ):
        (program,) = (block for block in blocks("docs/agents.md", "python") if api in block)
        left = fleet.program(f"from openai import OpenAI\n{program.replace(*few)}")
        answers = [left[name] for name in ("message", "first", "second") if name in left]
        assert answers
        assert all(answer.usage.output_tokens in range(1, 5) for answer in answers)
    (body,) = blocks("docs/agents.md", "json")
    url = f"http://127.0.0.1:{fleet.port('gateway:8080')}"
    generated = httpx.post(f"{url}/inference/v1/generate", json=json.loads(body), timeout=60).raise_for_status().json()
    [choice] = generated["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
    assert httpx.get(f"{url}/sessions/ID").raise_for_status().json()["turns"] == 1


@dataclass(frozen=True)
class Trained:
    """What the program of a trainer in README leaves behind, and the batches that it trained on."""

    batches: list[Any]
    left: dict[str, Any]


@pytest.fixture(scope="module")
def trained(fleet: Documented) -> Trained:
    """Version 1 of `policy` is published: what reads versions asks for this fixture."""
    (program,) = (block for block in blocks("README.md", "python") if "ExperienceReader" in block)
    (shown,) = (block for block in blocks("docs/agents.md", "python") if "/sessions" in block)
    episode = shown.replace("messages=", "max_tokens=4, messages=")
    names = [f"step-{group}" for group in range(GROUPS) for _ in range(GROUP_SIZE)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: fleet.program(episode.replace("task-17", name)), names))
    batches: list[Any] = []
    model = SimpleNamespace(state_dict=lambda: load_file(tiny_model() / "model.safetensors"))
    left = fleet.program(
        program, train=batches.append, model=model, enumerate=lambda them: itertools.islice(enumerate(them), 1)
    )
    return Trained(batches, left)


def test_a_trainer_publishes_after_a_batch(fleet: Documented, trained: Trained) -> None:
    assert [len(batch.rewards) for batch in trained.batches] == [GROUPS * GROUP_SIZE]
    assert trained.left["ticket"].version == trained.left["reader"].trainer_version == 1
    until(lambda: 1 in [engine["version"] for engine in fleet.engines().values()], "the engine loads version 1")


def test_a_trainer_fills_the_prompt_pool(fleet: Documented) -> None:
    (fleet.directory / "prompts.jsonl").write_text('{"id": "a", "prompt": "3 + 3?"}\n')
    left = fleet.program(blocks("docs/prompt-pool.md", "python")[0].replace("print(", "status = ("))
    assert (left["status"].tasks, left["status"].ready) == (2, 2)


AGENT = """
from anthropic import Anthropic
from openai import OpenAI
OpenAI().completions.create(model="policy", prompt="2 + 2 =", max_tokens=4)
Anthropic().messages.create(model="policy", messages=[{"role": "user", "content": "2 + 2?"}], max_tokens=4)
"""
"""Both clients know no more than the variables that `agents-env exec` sets."""


def test_environments_and_programs_are_rolled_out(fleet: Documented) -> None:
    (fleet.directory / "agent.py").write_text(AGENT)
    for command in lines(blocks("docs/runner.md", "sh")[0]):
        done = fleet.run(command.replace("agents-env", "agents_env", 1).replace("python ", f"{sys.executable} "))
        assert done.returncode == 0, done.stderr
        shown = done.stdout + done.stderr
        assert re.search(r"mean reward|ended: 2 rollouts, 1 whole groups", shown), shown
    assert "reward 1.000, lately 1.000; 4 turns" in shown, shown
    assert len(json.loads((fleet.directory / "eval.json").read_text())["tasks"]) == 2


def test_ranks_publish_one_version(fleet: Documented, trained: Trained) -> None:
    (program,) = blocks(FLEET, "python")
    tensors = sorted(load_file(tiny_model() / "model.safetensors").items())

    def rank(number: int) -> int:
        names = {"Publisher": Publisher, "JOB_ID": "job-1", "RANK": number, "WORLD": 2}
        with closing(fleet.program(f"publisher = {program}", **names)["publisher"]) as publisher:
            version: int = publisher.publish(tensors[number::2], step=1, wait=2).version
        return version

    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(rank, range(2)))) == 1


def test_the_commands_of_operators_run(fleet: Documented, trained: Trained) -> None:
    with Publisher(fleet.here("trainer-0:7070"), "old") as publisher:
        publisher.publish(load_file(tiny_model() / "model.safetensors"), step=0, wait=2)
    table = re.findall(r"^\| `((?:paramserver|gateway|curl) .*?)` \|", (ROOT / FLEET).read_text(), re.MULTILINE)
    commands = [command for command in table if "faultkit" not in command]
    assert len(commands) >= 10
    drained = next(command for command in commands if " drain " in command)
    for command in (*(command for command in commands if command != drained), drained):
        if command.startswith("curl"):
            answer = fleet.curl(command)
            assert (answer.status_code, bool(answer.json())) == (200, True), command
            continue
        done = fleet.run(command)
        if " doctor " in command:  # its findings are this machine's
            right = "etcd" in done.stdout
        elif command.endswith("adopt --relay localhost:7070"):
            right = "nothing to adopt" in done.stderr
        else:
            right = done.returncode == 0
        assert right, (command, done.stdout, done.stderr)
    assert list((fleet.directory / "weights").glob("*.safetensors"))


def test_a_gateway_asks_for_the_keys_that_the_page_makes(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_model())
    (tmp_path / "gateway.sh").write_text(f'exec {sys.executable} -m gateway "$@"')
    *makes, serve, look = lines(blocks("docs/security.md", "sh")[0])
    with KeptPorts() as ports, ExitStack() as stack:
        page = Documented(tmp_path, tmp_path, "", ports)

        def shell(*commands: str) -> subprocess.CompletedProcess[str]:
            script = "\n".join([f'gateway() {{ sh {tmp_path}/gateway.sh "$@"; }}', *map(page.here, commands)])
            return subprocess.run(["sh", "-e", "-c", script], capture_output=True, text=True, check=False, timeout=300)

        made = shell(*makes)
        assert made.returncode == 0, made.stderr
        assert stat.S_IMODE((tmp_path / "api-keys").stat().st_mode) == 0o600
        gateway = page.start("gateway", serve)
        stack.callback(_ended, gateway)
        assert httpx.get(f"{gateway.ready['url']}/status").status_code == 401
        looked = shell(f"export {look}".replace(") gateway", ")\ngateway"))
        assert "API keys: 1 admin, 1 trainer, 2 agent" in looked.stdout, looked.stderr


def test_a_relay_asks_for_the_credentials_that_the_page_makes(
    tmp_path: Path, etcd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, serve, look, issue, show = lines(blocks("docs/security.md", "sh")[1])
    variable, _, look = look.partition(" ")
    with KeptPorts() as ports, ExitStack() as stack:
        pools = stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-test-", dir="/dev/shm"))
        page = Documented(tmp_path, Path(pools), etcd, ports)
        made = page.run(init)
        assert made.returncode == 0, made.stderr
        relay = page.start("relay", serve)
        stack.callback(_ended, relay)
        assert page.run(look).returncode == 1
        monkeypatch.setenv(*variable.split("="))
        looked = page.run(look)
        assert "credentials of relay relay, valid for 36" in looked.stdout, looked.stderr
        assert page.run(issue).returncode == 0
        assert "trainer-1" in page.run(show).stdout


def test_the_page_has_the_table_of_operations() -> None:
    text = (ROOT / "docs/reference/roles.md").read_text()
    for operation in OPERATIONS:
        every = operation.roles | (frozenset(ROLES) if operation.public else frozenset())
        of_role = ["yes" if role in every else "own" * (role in operation.own) for role in ROLES]
        of_keys = ["yes" * (operation.public or may) for may in (operation.session_key, operation.finish_key)]
        assert f"| **{operation.name}**: {operation.what} | {' | '.join([*of_role, *of_keys])} |" in text
    assert text.count("| **") == len(OPERATIONS)
    security = (ROOT / "docs/security.md").read_text()
    assert all(f"| `{role}` |" in security for role in ROLES)


def test_numbers_continue_after_an_etcd_that_was_lost(fleet: Documented, trained: Trained) -> None:
    (command,) = lines(blocks("docs/guide.md", "sh")[0])
    done = fleet.run(command)
    assert re.search(r"continues in \S+ with policy above version \d+", done.stdout), done.stderr
