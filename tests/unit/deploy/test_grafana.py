"""The dashboards of `deploy/grafana`: their JSON is what the table makes, and what they show is there to be shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.dashboards import CURVE_WIDTH, FOLDER, WIDTH, path_of, text_of
from deploy.grafana.panels import DASHBOARDS
from deploy.setup_env import ROOT
from tests.support.skips import needs

PROMTOOL = shutil.which("promtool", path=f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin")
READ: dict[str, dict[str, Any]] = {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
KEPT_BY_GRAFANA = {"__rate_interval": "5m", "instance": ".+"}
"""Its variables, with a value of each."""


def expressions() -> Iterator[tuple[str, str]]:
    """Each with the panel that it is of, as Prometheus gets it."""
    for name, dashboard in READ.items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                text = re.sub(r"\$(\w+)", lambda found: KEPT_BY_GRAFANA[found[1]], target["expr"])
                yield f"{name}: {panel['title']}", text


def documented() -> dict[str, set[str]]:
    """Metric to its labels, by the reference."""
    rows = re.findall(
        r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE
    )
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_the_files_are_what_the_table_makes() -> None:
    assert {path_of(dashboard).name for dashboard in DASHBOARDS} == set(READ)
    stale = [dashboard.uid for dashboard in DASHBOARDS if path_of(dashboard).read_text() != text_of(dashboard)]
    assert stale == [], "run `make dashboards`"


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    assert len({dashboard["uid"] for dashboard in READ.values()}) == len(READ)
    assert len({dashboard["title"] for dashboard in READ.values()}) == len(READ)
    for dashboard in READ.values():
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= WIDTH
            cells = {(x, y) for x in _span(place, "x", "w") for y in _span(place, "y", "h")}
            assert not cells & taken, panel["title"]
            taken |= cells
            assert panel["description"].endswith((".", "..."))
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def _span(place: dict[str, int], begin: str, size: str) -> range:
    return range(place[begin], place[begin] + place[size])


def test_rows_are_full() -> None:
    for dashboard in READ.values():
        curves = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
        assert len(curves) * CURVE_WIDTH % WIDTH == 0, dashboard["title"]


def test_every_metric_and_label_is_one_that_the_daemons_serve() -> None:
    known = documented()
    assert "laminar_gateway_queued_turns" in known
    for where, text in expressions():
        names = set(re.findall(r"\b(?:laminar|process)_\w+", text))
        assert names, where
        assert names <= set(known), where
        labels = {label for found in re.findall(r"by \(([^)]*)\)", text) for label in found.split(", ")}
        labels |= set(re.findall(r"[{,] ?(\w+)(?:=~?|!=)\"", text))
        assert labels - {"job", "instance"} <= set().union(*(known[name] for name in names)), where


def test_legends_name_labels_that_are_left() -> None:
    for dashboard in READ.values():
        for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
            left = set(re.findall(r"^\w+ by \(([^)]*)\)", target["expr"]) or [""])
            summed = re.match(r"(?:sum|max|min)\b", target["expr"])
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {label for found in left for label in found.split(", ")}
            assert named <= (kept if summed else {"instance"}), target


@pytest.mark.skipif(PROMTOOL is None, reason=needs("no promtool (Debian's prometheus)", "make system-packages"))
def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = [{"record": f"panel:{number}", "expr": text} for number, (_, text) in enumerate(expressions())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
