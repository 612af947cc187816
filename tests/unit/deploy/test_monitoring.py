"""`deploy/compose/monitoring.yaml` and `deploy/grafana`: what they mount is there, they reach the fleet's services."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.setup_env import ROOT
from paramserver.credentials.fleet import Fleet
from protos.access.certificates import identity_in, read_certificates
from tests.unit.deploy import test_compose
from tests.unit.deploy.command_lines import check

FOLDER = ROOT / "deploy/compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "monitoring.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
GRAFANA = ROOT / "deploy/grafana"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_it_scrapes_the_services_of_the_fleet_under_the_jobs_of_the_rules() -> None:
    jobs = {job["job_name"]: job for job in read(FOLDER / "prometheus.yaml")["scrape_configs"]}
    example = {job["job_name"] for job in read(ROOT / "deploy/prometheus/scrape.yaml")["scrape_configs"]}
    assert set(jobs) == example
    for name, job in jobs.items():
        [target] = job["static_configs"][0]["targets"]
        service, _, port = target.partition(":")
        assert f"laminar-{service}" == name
        options = check(test_compose.command_line(service)).params
        assert int(port) == (options["metrics_port"] if service == "relay" else options["port"])


def test_a_readers_key_and_certificate_are_all_that_prometheus_gets(tmp_path: Path) -> None:
    jobs = read(FOLDER / "prometheus.yaml")["scrape_configs"]
    shown = {job["job_name"]: job["tls_config"] for job in jobs if "tls_config" in job}
    assert shown == {"laminar-relay": {f"{name}_file": f"/key/{name}.pem" for name in ("ca", "cert", "key")}}
    files = {job["job_name"]: job["authorization"]["credentials_file"] for job in jobs if "authorization" in job}
    assert files == {"laminar-gateway": "/key/reader.key"}
    assert "reader-key:/key:ro" in SERVICES["prometheus"]["volumes"]
    command = [word.replace("$$", "$") for word in SERVICES["reader-key"]["command"]]
    keys = tmp_path / "keys"
    keys.write_text("admin admin key-of-an-admin-0\nreader reader key-of-a-reader-1\nreader other key-of-a-reader-2\n")
    keys.chmod(0o600)
    Fleet.init(tmp_path / "fleet", ["relay"], days=1)
    places = {"/gateway/keys": str(keys), "/data/": f"{tmp_path}/", "/fleet/": f"{tmp_path}/fleet/"}
    here = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in command]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(here, env=environment, check=True, timeout=120)
    assert (tmp_path / "reader.key").read_text() == "key-of-a-reader-1\n"
    assert {path.name for path in tmp_path.glob("*.pem")} == {"ca.pem", "cert.pem", "key.pem"}
    assert all(path.stat().st_mode & 0o004 for path in tmp_path.glob("*.pem"))
    [certificate] = read_certificates((tmp_path / "cert.pem").read_bytes(), "cert.pem")
    assert identity_in(certificate).role == "reader"
    made = test_compose.SERVICES["keys"]["command"][-1]
    assert "/data/keys" in made
    assert "gateway:/data" in test_compose.SERVICES["keys"]["volumes"]
    assert "gateway:/gateway:ro" in SERVICES["reader-key"]["volumes"]
    assert "fleet:/fleet" in test_compose.SERVICES["credentials"]["volumes"]
    assert "fleet:/fleet:ro" in SERVICES["reader-key"]["volumes"]


def test_what_is_mounted_is_there() -> None:
    volumes = [volume for one in SERVICES.values() for volume in one["volumes"]]
    for source, _, _ in (volume.partition(":") for volume in volumes):
        if source.startswith("."):
            assert (FOLDER / source).resolve().exists(), source
        else:
            assert source in {*COMPOSE["volumes"], *test_compose.COMPOSE["volumes"]}
    [rules] = read(FOLDER / "prometheus.yaml")["rule_files"]
    assert f"../prometheus/alerts.yaml:/etc/prometheus/{rules}:ro" in SERVICES["prometheus"]["volumes"]


def test_it_is_reached_from_this_machine_alone_and_nobody_is_an_administrator() -> None:
    ports = [port for one in SERVICES.values() for port in one.get("ports", ())]
    assert ports == ["127.0.0.1:9090:9090", "127.0.0.1:3000:3000"]
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    for one in SERVICES.values():
        assert (one["cap_drop"], one["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert one["image"] == "laminar" or re.search(r":v?\d+\.\d+\.\d+$", one["image"]), "a version, not the latest"


def test_grafana_finds_the_dashboards_and_prometheus() -> None:
    [provider] = read(GRAFANA / "provisioning/dashboards/laminar.yaml")["providers"]
    path = provider["options"]["path"]
    assert f"../grafana:{path}:ro" in SERVICES["grafana"]["volumes"]
    assert "../grafana/provisioning:/etc/grafana/provisioning:ro" in SERVICES["grafana"]["volumes"]
    [source] = read(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_config_map_has_every_dashboard() -> None:
    [made] = read(GRAFANA / "kustomization.yaml")["configMapGenerator"]
    assert made["files"] == sorted(path.name for path in GRAFANA.glob("*.json"))
