"""The batch script of `deploy/slurm`, over daemons that only note how they were called: what runs where, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gateway.app import DRAIN_TIMEOUT_S
from protos.access.key_file import KeyFile
from tests.support.ports import KeptPorts
from tests.support.slurm_jobs import FOLDER, Job
from tests.unit.deploy.command_lines import check, env_file

SCRIPTS = [*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")]
NODES = ("n0", "n1", "n2")
runs_a_job = pytest.mark.slow

NOTES = (
    f"#!{sys.executable} -IS"
    + """
import json, os, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
name = os.path.basename(sys.argv[0])
node = os.environ.get("SLURMD_NODENAME", "")
if sys.argv[1:3] == ["keys", "init"]:
    with open(sys.argv[3], "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.writelines(f"{x} {x} key-of-the-{x}-of-this-job" + chr(10) for x in ("admin", "trainer", "agent"))
    sys.exit()
if sys.argv[1:3] == ["keys", "get"]:
    print(f"key-of-the-{sys.argv[4]}-of-this-job")
    sys.exit()
if sys.argv[1:3] == ["credentials", "init"]:
    os.mkdir(sys.argv[3])
    with open(sys.argv[3] + "/hosts", "w") as file:
        file.write(" ".join(sys.argv[4:]))
    sys.exit()
def note(what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([what, name, node, sys.argv[1:], os.environ.get("LAMINAR_API_KEY", "")]) + chr(10))
note("begun")
daemon = name in ("etcd", "vllm") or sys.argv[1] in ("serve", "engine")
dies = f"{name}@{node}" == os.environ.get("DIES") and not os.path.exists(os.environ["NOTES"] + ".died")
if dies:
    open(os.environ["NOTES"] + ".died", "w").close()
    sys.exit(1)
if daemon:
    listener = socket.create_server(("127.0.0.1", int(os.environ["ETCD_PORT"]))) if name == "etcd" else None
    signal.sigwait([signal.SIGTERM])
    note("ended")
"""
)
"""Daemons run until SIGTERM; keys and credentials are made without a note. One that `DIES` names fails at its first
start."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("etcd", "paramserver", "gateway", "vllm"):
        (commands / name).write_text(NOTES)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    with KeptPorts() as ports:
        yield Job.make(tmp_path, {"ETCD_PORT": str(ports.of("etcd"))}, commands)


def on_loopback(job: Job) -> Job:
    """The script waits for a port of the first node; its name is no host's here."""
    script = job.directory / "laminar.sbatch"
    script.write_text(script.read_text().replace('answers "$HEAD"', "answers 127.0.0.1"))
    return job


def notes(job: Job, what: str = "begun") -> list[tuple[str, str, list[str]]]:
    """Name, node and arguments of daemons and commands, in the order in which they began or ended."""
    path = job.directory / "notes"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(name, node, arguments) for kind, name, node, arguments, _ in rows if kind == what]


def keys_of(job: Job) -> dict[str, str]:
    """What each daemon and command had as LAMINAR_API_KEY: `etcd`, `paramserver`, `gateway serve`, ..."""
    rows = [json.loads(line) for line in (job.directory / "notes").read_text().splitlines()]
    return {f"{name} {words[0]}" if name == "gateway" else name: key for _, name, _, words, key in rows}


def begun(job: Job, pattern: str, number: int) -> str:
    """What a trainer runs to wait until so many daemons and commands began."""
    return f"until [ $(grep -c '\"begun\", {pattern}' {job.directory}/notes) -ge {number} ]; do sleep 0.05; done"


def ran(job: Job, nodes: Sequence[str], *command: str) -> int:
    return on_loopback(job).start(nodes, *command).wait(120)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_scripts(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_text().startswith("#!/bin/bash\n")
    assert path.stat().st_mode & 0o111


@pytest.mark.parametrize("name", ["laminar.sbatch", "on-node.sh"])
def test_the_scripts_end_at_an_error(name: str) -> None:
    assert re.search(r"^set -euo pipefail$", (FOLDER / name).read_text(), re.MULTILINE)


def test_who_may_use_a_daemon_has_a_single_place() -> None:
    access = {
        "RELAY_ACCESS": "--credentials=$FLEET/relay",
        "ENGINE_ACCESS": "",
        "GATEWAY_ACCESS": "--api-keys=$API_KEYS",
        "GATEWAY_CREDENTIALS": "--credentials=$FLEET/gateway",
    }
    found = env_file(FOLDER / "job.env")
    assert {name: found[name] for name in access} == access
    text = (FOLDER / "on-node.sh").read_text()
    assert [text.count(f"${name}") for name in access] == [1, 1, 1, 1]


@runs_a_job
def test_a_job_has_keys_of_its_own_and_each_part_the_one_that_it_needs(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAMINAR_API_KEY", raising=False)
    trainer = f"""
        {begun(job, "", 8)}
        test "$LAMINAR_API_KEY" = key-of-the-trainer-of-this-job
        test "$LAMINAR_AGENT_KEY" = key-of-the-agent-of-this-job
        test "$LAMINAR_CREDENTIALS" = {job.results}/fleet/trainer
        cp -p {job.results}/keys {job.directory}/keys-of-then
        cp {job.results}/fleet/hosts {job.directory}/hosts-of-then
    """
    assert ran(job, NODES, "sh", "-ec", trainer) == 0
    then = KeyFile(job.directory / "keys-of-then")  # refuses one that others may read
    assert then.by_role() == {"admin": 1, "trainer": 1, "agent": 1}
    assert not {"keys", "fleet"} & set(os.listdir(job.results)), "they are of no use after the job"
    assert (job.directory / "hosts-of-then").read_text() == "--host=n0 --host=n1 --host=n2"
    relays = [check([name, *words]).params["credentials"] for name, _, words in notes(job) if name == "paramserver"]
    assert relays == [job.results / "fleet/relay"] * 3
    [served] = [arguments for name, _, arguments in notes(job) if name == "gateway" and arguments[0] == "serve"]
    options = check(["gateway", *served]).params
    assert (options["api_keys"], options["credentials"]) == (job.results / "keys", job.results / "fleet/gateway")
    found = keys_of(job)
    assert found.pop("gateway status") == "key-of-the-trainer-of-this-job"
    assert set(found.values()) == {""}, "daemons need none"


def test_the_shell_is_told_of_the_end_early_enough_for_every_daemon() -> None:
    [warned] = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", (FOLDER / "laminar.sbatch").read_text(), re.MULTILINE)
    assert int(warned) >= 3 * DRAIN_TIMEOUT_S


@runs_a_job
def test_each_daemon_runs_where_it_belongs_with_options_that_it_takes(job: Job) -> None:
    trainer = 'test "$LAMINAR_RELAY" = n0:7070 -a "$LAMINAR_GATEWAY" = http://n0:8080'
    assert ran(job, NODES, "sh", "-c", f"{begun(job, '', 8)}; {trainer}") == 0
    found = notes(job)
    daemons = [(name, node) for name, node, arguments in found if node]
    assert daemons[0] == ("etcd", "n0")
    assert sorted(daemons) == sorted(
        [("etcd", "n0"), ("gateway", "n0"), ("vllm", "n1"), ("vllm", "n2"), *(("paramserver", node) for node in NODES)]
    )
    relays = {node: check([name, *arguments]).params for name, node, arguments in found if name == "paramserver"}
    assert {node: relay["publish_host"] for node, relay in relays.items()} == {"n0": True, "n1": False, "n2": False}
    assert {node: relay["engines"] for node, relay in relays.items()} == {
        "n0": (),
        "n1": ("vllm=http://127.0.0.1:8000@8443",),
        "n2": ("vllm=http://127.0.0.1:8000@8443",),
    }
    hosts = [words[words.index("--host") + 1] for name, _, words in found if name == "vllm"]
    assert hosts == ["127.0.0.1"] * 2
    for name, _, arguments in found:
        if name == "gateway":
            check([name, *arguments])
    assert not list(job.directory.glob("laminar-scratch*"))
    assert {call["job_name"]: call["nodelist"] for call in job.calls()} == {
        "etcd": "n0",
        "relay": "n0,n1,n2",
        "engine": "n1,n2",
        "gateway": "n0",
        "trainer": "n0",
    }
    assert all(call["overlap"] for call in job.calls()), "or a step would wait for the others' processors"


@runs_a_job
def test_one_node_alone_has_the_embedded_engine_as_well(job: Job) -> None:
    with (job.directory / "job.env").open("a") as settings:
        settings.write('ENGINE_KIND=embedded\nENGINE_OPTIONS="--dtype float32"\n')
    assert ran(job, ["n0"], "sh", "-c", begun(job, "", 5)) == 0
    found = [arguments for name, _, arguments in notes(job) if name == "gateway" and arguments[0] == "engine"]
    assert len(found) == 1
    assert check(["gateway", *found[0]]).params["dtype"] == "float32"
    [relay] = [check([name, *arguments]).params for name, _, arguments in notes(job) if name == "paramserver"]
    assert (relay["publish_host"], relay["engines"]) == (True, ("embedded=http://127.0.0.1:8000@8443",))


@runs_a_job
def test_a_job_without_credentials_has_its_engines_at_the_names_of_their_nodes(job: Job) -> None:
    with (job.directory / "job.env").open("a") as settings:
        settings.write("RELAY_ACCESS=--insecure\nENGINE_ACCESS=--insecure\nENGINE_KIND=embedded\n")
        settings.write("GATEWAY_CREDENTIALS=\nENGINE_HOST=\nENGINE_TLS_PORT=\n")
    assert ran(job, NODES, "sh", "-c", begun(job, "", 8)) == 0
    found = [(node, check([name, *words]).params) for name, node, words in notes(job) if node and name != "etcd"]
    assert {node: options["engines"] for node, options in found if "publish_host" in options} == {
        "n0": (),
        "n1": ("embedded=http://n1:8000",),
        "n2": ("embedded=http://n2:8000",),
    }
    engines = [(node, options["host"], options["insecure"]) for node, options in found if "dtype" in options]
    assert sorted(engines) == [("n1", "n1", True), ("n2", "n2", True)]


@runs_a_job
def test_the_trainers_status_is_the_jobs_and_what_asks_ends_before_what_answers(job: Job) -> None:
    assert ran(job, NODES, "sh", "-c", f"{begun(job, '', 8)}; exit 5") == 5
    ended = [name for name, _, _ in notes(job, "ended")]
    assert list(dict.fromkeys(ended)) == ["gateway", "vllm", "paramserver", "etcd"]
    assert len(ended) == 7
    [copied] = [arguments for name, _, arguments in notes(job) if arguments[0] == "backup"]
    served = next(arguments for name, _, arguments in notes(job) if name == "gateway" and arguments[0] == "serve")
    assert check(["gateway", *copied]).params["data"] == check(["gateway", *served]).params["data"]


@runs_a_job
def test_a_job_whose_time_is_over_ends_in_order(job: Job) -> None:
    batch = on_loopback(job).start(
        NODES, "sh", "-c", f"{begun(job, '', 8)}; touch {job.directory}/trains; exec sleep 600"
    )
    deadline = time.monotonic() + 60
    while not (job.directory / "trains").exists():
        assert time.monotonic() < deadline, job.log()
        time.sleep(0.02)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(120) == 143
    assert len(notes(job, "ended")) == 7


@runs_a_job
def test_a_daemon_that_fails_is_started_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES", "paramserver@n1")
    trainer = begun(job, '"paramserver", "n1"', 2)
    assert ran(job, NODES, "sh", "-c", trainer) == 0
    assert "paramserver ended with 1 and is started again" in (job.results / "relay-n1.log").read_text()
    assert len(notes(job, "ended")) == 7


def test_it_is_submitted_from_its_own_directory(job: Job) -> None:
    (job.directory / "on-node.sh").unlink()
    assert ran(job, NODES, "true") == 2
    assert "submit it from its own directory" in job.log()
