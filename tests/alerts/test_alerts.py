"""Each alert of deploy/prometheus fires from real daemons, scraped by a real Prometheus; a fleet that is well is quiet.

Its rules are those of the file, with a minute for a second (`prometheus.quickened`).
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from tests.alerts.fleet import started, well
from tests.alerts.prometheus import FOLDER, Prometheus, Watch, alerts, quickened
from tests.alerts.provocations import PROVOCATIONS
from tests.support.fleet import until
from tests.support.ports import KeptPorts

pytestmark = [pytest.mark.alerts, pytest.mark.slow]

SCRAPES = 20
"""Of each daemon, before a fleet is called well."""
FIRES_WITHIN_S = 400.0


def test_every_alert_is_provoked_once() -> None:
    names = [name for provocation in PROVOCATIONS for name in provocation.alerts]
    assert sorted(names) == sorted(alerts())


def test_the_rules_differ_in_times_alone() -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    before = [rule for group in rules["groups"] for rule in group["rules"]]
    after = [rule for group in quickened(rules)["groups"] for rule in group["rules"]]
    changed = {old["alert"]: (old["expr"], new["expr"]) for old, new in zip(before, after, strict=True)}
    assert changed["LaminarNoTokens"][1].startswith("rate(laminar_gateway_tokens_generated_total[10s]) == 0")
    assert changed["LaminarTasksGivenUp"][1] == "increase(laminar_gateway_tasks_given_up_total[60s]) > 0"
    assert changed["LaminarNoNewVersion"][1].endswith(" > 60")
    assert [rule.get("for") for rule in after[:3]] == ["1s", "5s", "15s"]
    same = [name for name, (old, new) in changed.items() if old == new]
    assert all("[" not in changed[name][0] for name in same)


@pytest.mark.timeout(1200)
def test_each_alert_fires_from_real_daemons(tmp_path: Path) -> None:
    began = time.monotonic()
    with (
        KeptPorts() as ports,
        started(tmp_path) as fleet,
        Prometheus(tmp_path, ports.of("prometheus"), fleet.targets()) as prometheus,
        Watch(prometheus) as watch,
    ):
        well(fleet, prometheus)
        # A fleet that starts is not well at once: what counts is what fires after it is.
        watch.seen.clear()
        until(
            lambda: len(prometheus.query(f"count_over_time(up[30s]) >= {SCRAPES}")) == len(prometheus.query("up")),
            "scrapes",
        )
        late = {labels["instance"] for labels, _ in prometheus.query("min_over_time(up[5m]) == 0")}
        # A machine that stood still answered a scrape too late: that is not the daemon's.
        assert {one for one in watch.seen if one[1] not in late} == set(), "a fleet that is well is quiet"
        print(f"\nall is well after {time.monotonic() - began:.0f} s, and quiet over {SCRAPES} scrapes")

        begun: dict[str, float] = {}
        wanted: dict[str, tuple[str, str]] = {}
        for provocation in PROVOCATIONS:
            for alert, where in provocation.alerts.items():
                begun[alert] = time.monotonic()
                kind, _, name = where.partition(" ")
                at = name if kind == "model" else fleet.instance(where)
                wanted[alert] = (where, at)
                watch.forget(alert, at)  # what a late scrape made fire before does not count
            provocation.act(fleet)
        deadline = time.monotonic() + FIRES_WITHIN_S
        while missing := [alert for alert, (_, at) in wanted.items() if not watch.fires(alert, at)]:
            fleet.check()
            assert time.monotonic() < deadline, f"did not fire: {missing}; fired: {sorted(watch.seen)}"
            time.sleep(0.1)

    print(f"{'alert':30}{'at':16}{'provoked by':66}{'s':>4}")
    for provocation in PROVOCATIONS:
        for alert in provocation.alerts:
            where, at = wanted[alert]
            seconds = watch.seen[alert, at] - begun[alert]
            print(f"{alert:30}{where:16}{provocation.how:66}{seconds:4.0f}")
    print(f"{len(wanted)} alerts fired, {time.monotonic() - began:.0f} s in all")
