"""Each alert of deploy/prometheus fires from real daemons, scraped by a real Prometheus, and not before it is provoked;
what docs/alerts.md says to do resolves it.

Its rules are those of the file, with a minute for a second (`prometheus.quickened`). A table at the end has every alert
that was provoked, with its seconds; `make test-alerts ARGS="-k PoolFull"` provokes one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import yaml

from tests.alerts.conftest import TABLE
from tests.alerts.prometheus import FOLDER, alerts, quickened
from tests.alerts.provocations import PROVOCATIONS
from tests.alerts.remedies import REMEDIES
from tests.alerts.scene import HEAD, Scene, scene

pytestmark = [pytest.mark.alerts, pytest.mark.slow, pytest.mark.timeout(900)]

PROVOKED = [alert for provocation in PROVOCATIONS for alert in provocation.alerts]
REMEDIED = [alert for remedy in REMEDIES for alert in remedy.alerts]


@pytest.fixture(scope="module")
def fleet_scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    began = time.monotonic()
    table = request.config.stash.setdefault(TABLE, [])
    with scene(tmp_path_factory.mktemp("alerts")) as found:
        table.append(f"all is well after {time.monotonic() - began:.0f} s")
        yield found
        table += [HEAD, *(course.row() for course in found.courses.values())]
        fired = sum(course.fired is not None for course in found.courses.values())
        resolved = sum(course.resolved is not None for course in found.courses.values())
        table.append(f"{fired} alerts fired, {resolved} resolved, {time.monotonic() - began:.0f} s in all")


def selected(request: pytest.FixtureRequest, test: str = "") -> set[str]:
    """The alerts for which a test runs, or that test."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    named = [item for item in items if item.fspath == request.node.fspath and item.originalname.startswith(test)]
    return {item.callspec.params["alert"] for item in named if hasattr(item, "callspec")}


@pytest.fixture(scope="module")
def provoked(fleet_scene: Scene, request: pytest.FixtureRequest) -> Scene:
    fleet_scene.provoke(selected(request))
    return fleet_scene


@pytest.fixture(scope="module")
def remedied(provoked: Scene, request: pytest.FixtureRequest) -> Scene:
    wanted = selected(request, test_what_the_runbook_says_resolves_it.__name__)
    provoked.remedy([remedy for remedy in REMEDIES if not wanted.isdisjoint(remedy.alerts)])
    return provoked


def test_every_alert_is_provoked_once() -> None:
    assert sorted(PROVOKED) == sorted(alerts())


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


def test_a_fleet_that_is_well_is_quiet(fleet_scene: Scene) -> None:
    fleet_scene.stay_well()
    assert fleet_scene.false_alarms(time.time()) == set()


@pytest.mark.parametrize("alert", PROVOKED)
def test_it_fires_once_it_is_provoked(provoked: Scene, alert: str) -> None:
    provoked.await_firing(alert)


@pytest.mark.parametrize("alert", REMEDIED)
def test_what_the_runbook_says_resolves_it(remedied: Scene, alert: str) -> None:
    remedied.await_resolved(alert)
