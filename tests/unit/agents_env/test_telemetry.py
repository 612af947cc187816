"""What a runner reports about itself: its metrics and its JSON log lines."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from agents_env.failures import RunFailed
from agents_env.runner.records import Tally
from agents_env.telemetry import METRICS, serving_metrics
from protos.process import setup_logging


@pytest.fixture(autouse=True)
def _handlers_of_the_root() -> Iterator[None]:
    before = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = before


def test_every_metric_is_read_at_each_scrape() -> None:
    tally = Tally()
    with serving_metrics(0, tally.statistics) as address:
        for rollouts in (0, 3):
            tally.rollouts = rollouts
            text = httpx.get(f"http://{address}/metrics").raise_for_status().text
            values = dict(re.findall(r"^(laminar_\w+) (\S+)$", text, re.MULTILINE))
            assert float(values["laminar_runner_rollouts_total"]) == rollouts
    assert values.keys() == {f"{metric.name}_total" if metric.kind == "counter" else metric.name for metric in METRICS}
    assert "process_cpu_seconds_total" in text


def test_without_a_port_none_are_served() -> None:
    with serving_metrics(None, Tally().statistics) as address:
        assert address is None


def test_a_port_that_is_taken_ends_the_run_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunFailed, match=f"at port {port}"), serving_metrics(port, Tally().statistics):
            raise AssertionError("it is taken")


def test_json_lines_name_the_session(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()  # pytest's own
    setup_logging("info", "json")
    logging.getLogger("agents-env").warning("rollout %s\nfailed", "s1", extra={"session": "s1"})
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line.pop("time")
    assert line == {"level": "warning", "logger": "agents-env", "message": "rollout s1\nfailed", "session": "s1"}
