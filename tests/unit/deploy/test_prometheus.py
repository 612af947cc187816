"""The alert rules: each has its runbook, and the other way round; promtool reads and runs them where it is installed.

That real daemons serve each metric is shown by `tests/e2e/operating/test_served_metrics.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.setup_env import ROOT
from gateway.config import GatewayConfig
from gateway.experience.shared import SENDING_BYTES_MAX, SENDING_MAX
from paramserver.core.access import ENGINES
from paramserver.credentials.fleet import Fleet
from tests.support.skips import needs
from tests.unit.deploy.command_lines import check, options_of_all

FOLDER = ROOT / "deploy/prometheus"
READER_KEY = "laminar-reader.key"
READER_FILES = [f"laminar-reader/{name}.pem" for name in ("ca", "cert", "key")]
RUNBOOK = ROOT / "docs/alerts.md"
PROMTOOL = shutil.which("promtool", path=f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin")
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]


def sections() -> dict[str, str]:
    """Alert to the text below its heading."""
    parts = re.split(r"^### (\w+)\n", RUNBOOK.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], (text.partition("\n## ")[0] for text in parts[2::2]), strict=True))


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert list(sections()) == sorted(sections(), key=names.index), "in the order of the rules"
    assert set(sections()) == set(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_urgent_it_is_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
    assert re.findall(r"^- \*\*(\w+)\*\*: \S", sections()[rule["alert"]], re.MULTILINE) == ["Means", "Look", "Do"]


def test_the_runbook_names_options_that_there_are() -> None:
    ours = re.sub("`(?:etcdctl|prlimit) [^`]+`", "", RUNBOOK.read_text())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))
    assert "--stall-timeout-s" in named
    assert named <= options_of_all()


def test_links_of_the_runbook_lead_to_headings() -> None:
    for page, anchor in re.findall(r"\]\((\w[\w-]*\.md)#([\w-]+)\)", RUNBOOK.read_text()):
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, page


def test_jobs_of_rules_are_scraped() -> None:
    scraped = {job["job_name"] for job in yaml.safe_load((FOLDER / "scrape.yaml").read_text())["scrape_configs"]}
    named = {job for rule in RULES for job in re.findall(r'job="([\w-]+)"', rule["expr"])}
    assert named
    assert named <= scraped


def test_thresholds_are_what_their_comments_say() -> None:
    exprs = {rule["alert"]: rule["expr"] for rule in RULES}
    assert f"> {SENDING_MAX // 2} " in exprs["LaminarSharedExperienceWaits"]
    assert exprs["LaminarSharedExperienceWaits"].endswith(f"> {SENDING_BYTES_MAX // 2}")
    default = GatewayConfig.__dataclass_fields__["experience_max"].default
    assert exprs["LaminarExperienceWaits"].endswith(f"> {default * 3 // 4}")


def test_each_alert_fires_in_a_test_of_rules() -> None:
    text = (FOLDER / "alerts_test.yaml").read_text()
    assert {rule["alert"] for rule in RULES} == set(re.findall(r'alertname="(\w+)"', text))


def test_the_gateway_is_scraped_with_a_key_and_relays_with_a_certificate() -> None:
    jobs = yaml.safe_load((FOLDER / "scrape.yaml").read_text())["scrape_configs"]
    files = {job["job_name"]: job["authorization"]["credentials_file"] for job in jobs if "authorization" in job}
    assert files == {"laminar-gateway": READER_KEY}
    [relay] = [job for job in jobs if job["job_name"] == "laminar-relay"]
    assert (relay["scheme"], set(relay["tls_config"].values())) == ("https", set(READER_FILES))


def test_the_job_of_engines_that_the_comment_shows_is_one(tmp_path: Path) -> None:
    text = (FOLDER / "scrape.yaml").read_text()
    shown = re.search(r"^#   - job_name: laminar-engine\n(?:#   .+\n)+", text, re.MULTILINE)
    assert shown is not None
    [job] = yaml.safe_load(re.sub("^#  ", "", shown[0], flags=re.MULTILINE))
    [command] = re.findall(r"`paramserver (credentials issue .+?)`", text)
    options = check(["paramserver", *command.split()]).params
    assert options["role"] in ENGINES.roles
    fleet = Fleet.init(tmp_path / "fleet", ["engines-0"], days=1)
    fleet.issue(options["role"], options["name"], [], days=1)
    files = {Path(name) for name in job["tls_config"].values()}
    assert {path.parent.name for path in files} == {options["name"]}
    assert {path.name for path in files} <= {path.name for path in (tmp_path / "fleet" / options["name"]).iterdir()}
    assert {one["job_name"] for one in yaml.safe_load(text)["scrape_configs"]} == {"laminar-gateway", "laminar-relay"}


@pytest.mark.slow
@pytest.mark.skipif(PROMTOOL is None, reason=needs("no promtool (Debian's prometheus)", "make system-packages"))
@pytest.mark.parametrize("words", [("check", "config", "scrape.yaml"), ("test", "rules", "alerts_test.yaml")])
def test_promtool_takes_the_rules_and_they_fire_when_they_should(words: tuple[str, ...], tmp_path: Path) -> None:
    """`check config` checks the files that it names, too: the rules, and that there is a key."""
    assert PROMTOOL is not None
    for path in FOLDER.glob("*.yaml"):
        shutil.copy(path, tmp_path)
    (tmp_path / READER_KEY).write_text("key-of-a-reader\n")
    Fleet.init(tmp_path / "fleet", ["engines-0"], days=1)
    (tmp_path / "fleet/reader").rename(tmp_path / "laminar-reader")
    assert all((tmp_path / name).exists() for name in READER_FILES)
    done = subprocess.run([PROMTOOL, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
