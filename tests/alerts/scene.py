"""One fleet under one Prometheus, on which the selected alerts are provoked together, and remedied together.

Every test waits for its own alert. So a fault in one provocation fails its alerts and no others, and `-k` selects the
alerts that are provoked at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.alerts.fleet import MODEL, Fleet, started
from tests.alerts.prometheus import Prometheus, Spot
from tests.alerts.provocations import PROVOCATIONS, Provocation
from tests.alerts.remedies import Remedy
from tests.support.fleet import until
from tests.support.ports import KeptPorts

SCRAPES = 20
"""Of each daemon, before a fleet is called well."""
SCRAPED_WITHIN_S = 400.0
QUIET_WITHIN_S = 60.0
FIRES_WITHIN_S = 400.0
RESOLVES_WITHIN_S = 240.0
STEADY = "5s"
"""So long no evaluation may find an alert's expression true, and every scrape has to succeed: a series that is absent
for a moment would end an alert, too."""
STEADY_SCRAPES = 4
DOWN = ("LaminarGatewayDown", "LaminarRelayDown")
"""Of a daemon that answers a scrape too late they fire rightly: on a machine that stands still, it is no fault."""
AGED = ("LaminarNoNewVersion", MODEL)
AGED_AFTER_S = 60.0
"""Of its first version, the only one until the provocations: on a busy machine they begin later."""
POLL_S = 0.2


@dataclass
class Course:
    """What became of one alert; times are unix times, s."""

    alert: str
    where: str
    spot: Spot
    how: str
    provoked: float | None = None
    fired: float | None = None
    remedy: str = ""
    remedied: float | None = None
    resolved: float | None = None

    def row(self) -> str:
        fired = "" if self.fired is None or self.provoked is None else f"{self.fired - self.provoked:.0f}"
        resolved = "" if self.resolved is None or self.remedied is None else f"{self.resolved - self.remedied:.0f}"
        return f"{self.alert:30}{self.where:16}{self.how:60}{fired:>4}  {self.remedy:44}{resolved:>4}"


HEAD = f"{'alert':30}{'at':16}{'provoked by':60}{'s':>4}  {'resolved by':44}{'s':>4}"


@dataclass
class Scene:
    fleet: Fleet
    prometheus: Prometheus
    well_s: float = 0.0  # since when all is well, as a unix time
    courses: dict[str, Course] = field(default_factory=dict)
    _aged_s: float = 0.0  # when the first version is old, as a unix time
    _errors: dict[str, Exception] = field(default_factory=dict)

    # -- a fleet that is well

    def become_well(self) -> None:
        """A fleet that starts is not well at once: what counts is what fires after it is."""
        up = len(self.fleet.gateways) + len(self.fleet.relays)
        until(lambda: len(self.prometheus.query("up == 1")) == up, "scrapes of all")
        self._aged_s = time.time() + AGED_AFTER_S
        self.fleet.publish(1)
        until(lambda: self.fleet.is_well(self.prometheus), "a fleet that is well")
        self._become_quiet()
        self.well_s = time.time()

    def stay_well(self) -> None:
        """Until every daemon was scraped so often."""

        def scraped() -> bool:
            seconds = max(1, int(time.time() - self.well_s))
            return len(self.prometheus.query(f"sum_over_time(up[{seconds}s]) >= {SCRAPES}")) == len(
                self.prometheus.query("up")
            )

        until(scraped, f"{SCRAPES} scrapes of each", SCRAPED_WITHIN_S)
        self._become_quiet()

    def _become_quiet(self) -> None:
        """Until nothing fires, or would if it went on like this."""
        deadline = time.monotonic() + QUIET_WITHIN_S
        while found := self._wrong(self.prometheus.alerts("pending|firing", "2s")):
            assert time.monotonic() < deadline, f"all is well, and yet there are alerts: {sorted(found)}"
            time.sleep(POLL_S)

    def false_alarms(self, until_s: float) -> set[Spot]:
        """What fired since all was well, and before that time."""
        fired = self.prometheus.alerts()
        return self._wrong(
            {spot: [one for one in times if self.well_s < one < until_s] for spot, times in fired.items()}
        )

    def _wrong(self, found: Mapping[Spot, Sequence[float]]) -> set[Spot]:
        """Those without a reason: no scrape was late, and the first version was not old yet."""
        late = {labels["instance"] for labels, _ in self.prometheus.query("min_over_time(up[1h]) == 0")}
        rightly = {(alert, one) for alert in DOWN for one in late}
        return {
            spot
            for spot, times in found.items()
            if spot not in rightly and any(spot != AGED or one < self._aged_s for one in times)
        }

    # -- provocations

    def provoke(self, alerts: Set[str]) -> None:
        """Returns when each provocation that one of the alerts needs was made, or failed."""
        wanted = [one for one in PROVOCATIONS if not alerts.isdisjoint(one.alerts)]
        with ThreadPoolExecutor(1) as thread:
            beside = [thread.submit(self._provoke, one) for one in wanted if one.beside]
            for provocation in wanted:
                if not provocation.beside:
                    self._provoke(provocation)
            for work in beside:
                work.result()

    def _provoke(self, provocation: Provocation) -> None:
        for alert, where in provocation.alerts.items():
            kind, _, name = where.partition(" ")
            at = name if kind == "model" else self.fleet.instance(where)
            self.courses[alert] = Course(alert, where, (alert, at), provocation.how, time.time())
        self._attempt(provocation.alerts, lambda: provocation.act(self.fleet))

    def _attempt(self, alerts: Collection[str], act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 (each of these alerts' tests raises it)
            self._errors.update(dict.fromkeys(alerts, error))

    def await_firing(self, alert: str) -> None:
        """Until it fires where it was provoked; fails if it had fired there before."""
        course = self._course(alert)
        assert course.provoked is not None
        if alert not in DOWN:
            early = self.false_alarms(course.provoked)
            assert course.spot not in early, f"{alert} fired at {course.where} before it was provoked"
        deadline = time.monotonic() + FIRES_WITHIN_S
        while course.fired is None:
            self.fleet.check()
            fired = self.prometheus.alerts()
            course.fired = next((one for one in fired.get(course.spot, []) if one > course.provoked), None)
            assert time.monotonic() < deadline, f"{alert} did not fire at {course.spot}; fired: {sorted(fired)}"
            time.sleep(POLL_S)

    def _course(self, alert: str) -> Course:
        if alert in self._errors:
            raise AssertionError(f"{alert}: {self._errors[alert]!r}") from self._errors[alert]
        return self.courses[alert]

    # -- remedies

    def remedy(self, remedies: Sequence[Remedy]) -> None:
        """Each is made once its alerts fire."""
        for remedy in remedies:
            self._attempt(remedy.alerts, lambda remedy=remedy: self._remedy(remedy))  # type: ignore[misc]

    def _remedy(self, remedy: Remedy) -> None:
        for alert in remedy.alerts:
            self.await_firing(alert)
        courses = [self.courses[alert] for alert in remedy.alerts]
        spots = {course.spot for course in courses}
        until(lambda: spots <= set(self.prometheus.alerts("firing", "2s")), f"alerts that still fire: {spots}")
        for course in courses:
            course.remedy, course.remedied = remedy.how, time.time()
        remedy.act(self.fleet)

    def await_resolved(self, alert: str) -> None:
        course = self._course(alert)
        deadline = time.monotonic() + RESOLVES_WITHIN_S
        while not self._is_resolved(course.spot):
            self.fleet.check()
            assert time.monotonic() < deadline, f"{alert} still fires at {course.spot} after: {course.remedy}"
            time.sleep(POLL_S)
        assert course.remedied is not None
        course.resolved = max(course.remedied, self.prometheus.alerts()[course.spot][-1])

    def _is_resolved(self, spot: Spot) -> bool:
        steady = self.prometheus.query(
            f"min_over_time(up[{STEADY}]) == 1 and count_over_time(up[{STEADY}]) >= {STEADY_SCRAPES}"
        )
        instances = {labels["instance"] for labels, _ in steady}
        is_model = spot[1] not in {labels["instance"] for labels, _ in self.prometheus.query("up")}
        return (is_model or spot[1] in instances) and spot not in self.prometheus.alerts("pending|firing", STEADY)


@contextmanager
def scene(directory: Path) -> Iterator[Scene]:
    """With a fleet that is well; every process ends with it."""
    with (
        KeptPorts() as ports,
        started(directory) as fleet,
        Prometheus(directory, ports.of("prometheus"), fleet.targets(), fleet.reader) as prometheus,
    ):
        found = Scene(fleet, prometheus)
        found.become_well()
        yield found
