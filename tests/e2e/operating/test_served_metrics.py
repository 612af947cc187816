"""Each metric that the alert rules and their runbook name is one that real daemons serve, under that name."""

from __future__ import annotations

import re
import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from deploy.setup_env import ROOT
from tests.support import processes
from tests.support.engine_port import context_of
from tests.support.fleet import until
from tests.support.processes import Daemon
from tests.support.relays import Relays
from tests.support.scripted_engine import Cut, ScriptedEngine, in_thread
from tests.support.words import tokenizer
from trainer_client import Publisher

pytestmark = pytest.mark.slow

ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
OURS = r"\b(?:laminar|process)_[a-z_]+\b"
LABELS = {"model", "engine", "reason"}
PROMETHEUS_ADDS = {"job", "instance"}


def served(url: str, tls: ssl.SSLContext | None = None) -> dict[str, set[str]]:
    """Metric to the labels of its series. `tls`: with the certificate of whoever asks."""
    text = httpx.get(f"{url}/metrics", timeout=60.0, verify=tls or True).raise_for_status().text
    series = re.findall(r"^([a-z_]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in series}


def of_a_relay(relays: Relays, directory: Path, fleet: Path) -> dict[str, set[str]]:
    """Of one that spills, has credentials, and holds a version: what tells of versions has no series before."""
    relay = relays.start("a", "--metrics-port=0", f"--spill={directory / 'spill'}", f"--credentials={fleet / 'relay'}")
    with Publisher(relay.ready["grpc"], credentials=fleet / "trainer") as publisher:
        publisher.publish({"w": np.ones(4, np.float32)}, step=1, wait="sealed")
    url, reader = f"https://{relay.ready['metrics']}", context_of(fleet / "reader", fleet)
    until(lambda: "laminar_relay_newest_version" in served(url, reader), "the version in the metrics")
    return served(url, reader)


def of_a_gateway(directory: Path, redis: str, fleet: Path) -> dict[str, set[str]]:
    """Of one with all that has metrics of its own, after a turn whose stream was cut."""
    command = ["gateway", "serve", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}", "--port=0"]
    stores = [
        f"--credentials={fleet / 'gateway'}",
        f"--data={directory / 'data'}",
        f"--experience-store={redis}",
        "--relay-text",
    ]
    with in_thread(ScriptedEngine("e0", cuts=deque([Cut("eof", 2)]))) as engine:
        gateway = processes.start("gateway", [*command, *stores, "--no-probe", f"--engine=e0=vllm={engine}"], directory)
        try:
            url = gateway.ready["url"]
            until(lambda: httpx.get(f"{url}/healthz").status_code == 200, "a serving engine")
            body = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4}
            httpx.post(f"{url}/s/one/v1/completions", json=body, timeout=60.0).raise_for_status()
            return served(url)
        finally:
            gateway.kill()


@pytest.fixture(scope="module")
def names() -> dict[str, str]:
    """Metric to the rule, or the page, that names it."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    found = dict.fromkeys(re.findall(OURS, (ROOT / "docs/alerts.md").read_text()), "docs/alerts.md")
    found |= {name: rule["alert"] for rule in rules for name in re.findall(OURS, rule["expr"])}
    return found


def test_daemons_serve_each_metric_that_a_rule_names(
    names: dict[str, str], tmp_path: Path, relays: Relays, redis_servers: Callable[..., Daemon], fleet: Path
) -> None:
    relay = of_a_relay(relays, tmp_path, fleet)
    gateway = of_a_gateway(tmp_path, redis_servers().ready["url"], fleet)
    for prefix, found in (("laminar_relay_", relay), ("laminar_gateway_", gateway), ("process_", relay | gateway)):
        wanted = {name for name in names if name.startswith(prefix)}
        assert wanted
        assert {name: names[name] for name in wanted - set(found)} == {}
    assert {"process_open_fds", "process_max_fds"} <= set(relay) & set(gateway)
    labels = {"laminar_gateway_engine_serving": "engine", "laminar_gateway_engine_version": "engine"}
    labels |= {"laminar_relay_newest_version": "model", "laminar_relay_newest_version_age_seconds": "model"}
    assert {name: label in (relay | gateway)[name] for name, label in labels.items()} == dict.fromkeys(labels, True)


def test_rules_name_labels_that_the_series_have() -> None:
    text = ALERTS.read_text()
    named = set(re.findall(r"\$labels\.(\w+)", text))
    named |= {label for group in re.findall(r"(?:by|on) \(([\w, ]+)\)", text) for label in re.split(r",\s*", group)}
    assert named <= LABELS | PROMETHEUS_ADDS
