"""A real Prometheus over real daemons, with the rules of deploy/prometheus in which a minute has become a second."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml

from deploy.setup_env import ROOT
from tests.support.fleet import until
from tests.support.processes import Daemon
from tests.support.skips import needs

FOLDER = ROOT / "deploy/prometheus"
BINARY = shutil.which("prometheus", path=f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin")
INTERVAL = "1s"
Spot = tuple[str, str]
"""An alert, and the instance (or the model) that it names."""
THRESHOLDS = {"LaminarNoNewVersion": ("> 3600", "> 60")}
"""Thresholds that are a time."""
_DURATION = re.compile(r"\b(\d+)([mh])\b")


def _quick(text: str) -> str:
    return _DURATION.sub(lambda found: f"{int(found[1]) * (60 if found[2] == 'h' else 1)}s", text)


def quickened(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The same rules, in which each `for:`, range and threshold of time is shorter by a factor of 60, and nothing else
    differs."""

    def rule(given: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(given)
        found["expr"] = re.sub(r"\[\w+\]", lambda range_: _quick(range_[0]), given["expr"])
        if "for" in given:
            found["for"] = _quick(given["for"])
        if given["alert"] in THRESHOLDS:
            before, after = THRESHOLDS[given["alert"]]
            assert found["expr"].endswith(before)
            found["expr"] = found["expr"].removesuffix(before) + after
        return found

    return {"groups": [{**group, "rules": [rule(one) for one in group["rules"]]} for group in rules["groups"]]}


def alerts() -> list[str]:
    """The names of all alerts, in the order of the rules."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


def write_configuration(directory: Path, targets: Mapping[str, Sequence[str]], reader: Path) -> Path:
    """The example's configuration, with these targets for its jobs, and without keys: no gateway here asks for any.
    Targets that begin with https:// are scraped with the certificate in `reader`."""
    config = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
    config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    jobs = [job for job in config["scrape_configs"] if job["job_name"] in targets]
    assert {job["job_name"] for job in jobs} == set(targets)
    for job in jobs:
        for name in ("authorization", "scheme"):
            job.pop(name, None)
        if "tls_config" in job:
            job["tls_config"] = {name: str(reader / Path(file).name) for name, file in job["tls_config"].items()}
        shown = targets[job["job_name"]]
        secured = [target.removeprefix("https://") for target in shown if target.startswith("https://")]
        job["static_configs"] = [{"targets": [target for target in shown if not target.startswith("https://")]}]
        if secured:
            job["static_configs"].append({"targets": secured, "labels": {"__scheme__": "https"}})
    config["scrape_configs"] = jobs
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    (directory / "alerts.yaml").write_text(yaml.safe_dump(quickened(rules)))
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class Prometheus:
    """`with Prometheus(...) as prometheus`: serves until the end."""

    directory: Path
    port: int
    targets: Mapping[str, Sequence[str]]
    reader: Path
    daemon: Daemon = field(init=False)
    _http: httpx.Client = field(init=False)

    def __enter__(self) -> Self:
        if BINARY is None:
            pytest.skip(needs("no prometheus (Debian's)", "make system-packages"))
        config = write_configuration(self.directory, self.targets, self.reader)
        command = [BINARY, f"--config.file={config}", f"--storage.tsdb.path={self.directory / 'tsdb'}"]
        path = self.directory / "prometheus.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log
            )
        self.daemon = Daemon("prometheus", process, path)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}")
        try:
            until(self._ready, "Prometheus")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self.daemon.stop()

    def _ready(self) -> bool:
        assert self.daemon.process.poll() is None, self.daemon.log()[-3000:]
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series."""
        return [(series["metric"], float(series["value"][1])) for series in self._result(expression)]

    def alerts(self, states: str = "firing", over: str = "1h") -> dict[Spot, list[float]]:
        """The evaluations (unix times, s, oldest first) of the last `over` in which an alert was in one of `states`.

        Prometheus' own history: an alert that fires for one evaluation is not missed, however seldom somebody looks.
        """
        found: dict[Spot, list[float]] = {}
        for series in self._result(f'ALERTS{{alertstate=~"{states}"}}[{over}]'):
            labels = series["metric"]
            spot = (labels["alertname"], labels.get("instance") or labels["model"])
            found[spot] = sorted([*found.get(spot, []), *(time_s for time_s, _ in series["values"])])
        return found

    def _result(self, expression: str) -> list[Any]:
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])
