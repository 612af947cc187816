"""Writes the dashboards' JSON from the table in `panels`: four numbers in the first row, then curves, two in a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.grafana.panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent
WIDTH = 24
STAT_WIDTH, STAT_HEIGHT = WIDTH // 4, 4
CURVE_WIDTH, CURVE_HEIGHT = WIDTH // 2, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
"""The data source that the reader picks."""
SCHEMA_VERSION = 39
"""Of Grafana 11: later ones read it, and bring it up to date."""


def path_of(dashboard: Dashboard) -> Path:
    return FOLDER / f"{dashboard.uid}.json"


def text_of(dashboard: Dashboard) -> str:
    return json.dumps(_json(dashboard), indent=2) + "\n"


def write() -> None:
    for dashboard in DASHBOARDS:
        path_of(dashboard).write_text(text_of(dashboard))


def _json(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["laminar"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source_variable(), _instance_variable(dashboard.instances)]},
        "panels": list(_panels(dashboard.panels)),
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instance_variable(metric: str) -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({metric}, instance)",
        "refresh": 2,  # when the time range changes
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    x = y = 0
    before: Panel | None = None
    for number, panel in enumerate(panels, 1):
        width, height = (STAT_WIDTH, STAT_HEIGHT) if panel.stat else (CURVE_WIDTH, CURVE_HEIGHT)
        if before is not None and x + width > WIDTH:
            x, y = 0, y + (STAT_HEIGHT if before.stat else CURVE_HEIGHT)
        yield _panel(number, panel, {"x": x, "y": y, "w": width, "h": height})
        x, before = x + width, panel


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "type": "stat" if panel.stat else "timeseries",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
