"""The batch script of `deploy/slurm` with real daemons, on one node: a trainer publishes, and what it did is kept."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import KeptPorts
from tests.support.slurm_jobs import Job
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
PORTS = ("ETCD_PORT", "RELAY_PORT", "METRICS_PORT", "ENGINE_PORT", "ENGINE_TLS_PORT", "GATEWAY_PORT")
TRAINER = """
import os, time, httpx, numpy as np
from trainer_client import ExperienceReader, Publisher
url, key = os.environ["LAMINAR_GATEWAY"], {"Authorization": "Bearer " + os.environ["LAMINAR_API_KEY"]}
gateway = httpx.Client(base_url=url, headers=key, timeout=60.0)
agent = {"Authorization": "Bearer " + os.environ["LAMINAR_AGENT_KEY"]}
session = gateway.post("/sessions", json={"session_id": "one"}, headers=agent).raise_for_status().json()
assert httpx.get(url + "/status").status_code == 401
chat = {"model": "policy", "messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 4}
headers = {"Authorization": "Bearer " + session["api_key"]}
gateway.post("/v1/chat/completions", json=chat, headers=headers).raise_for_status()
gateway.post("/sessions/one/finish", json={"reward": 1.0}).raise_for_status()
with Publisher(os.environ["LAMINAR_RELAY"], "other") as publisher:
    assert publisher.publish({"w": np.ones(4, np.float32)}, step=1, wait="sealed").version == 1
raise SystemExit(3)
"""


@pytest.fixture
def pool() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    yield directory / "pool"
    shutil.rmtree(directory)


def test_a_job_of_one_node_trains_and_leaves_the_gateways_data(tmp_path: Path, pool: Path) -> None:
    with KeptPorts() as ports:
        settings = {name: str(ports.of(name)) for name in PORTS}
        settings |= {"MODEL_DIR": str(tiny_model()), "POOL_BYTES": "64MiB", "ENGINE_KIND": "embedded"}
        settings |= {"ENGINE_OPTIONS": '"--dtype float32"', "RELAY_OPTIONS": f"--pool-dir={pool}"}
        job = Job.make(tmp_path, settings, BIN)
        status = job.start(["127.0.0.1"], sys.executable, "-c", TRAINER).wait(300)
    assert status == 3, job.log()[-6000:]
    assert "finished sessions that wait for a trainer: 1" in (tmp_path / "job.log").read_text()
    assert (job.results / "gateway" / "gateway.sqlite").exists()
    logs = {name: (job.results / f"{name}-127.0.0.1.log").read_text() for name in ("relay", "gateway", "engine")}
    assert not any("started again" in text for text in logs.values()), logs
    assert "closed" in logs["gateway"]
    assert f"is called at https://127.0.0.1:{settings['ENGINE_TLS_PORT']}" in logs["relay"]
    assert not [path for path in pool.rglob("*") if path.is_file() and path.stat().st_size], "its memory went back"
