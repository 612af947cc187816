"""A benchmark that lacks what it compares with names it before it measures anything, and ends with an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from deploy import system_packages
from tests.bench import needs
from tests.bench.environment import Environment
from tests.bench.figures import Figure
from tests.bench.gateway import __main__ as gateway
from tests.bench.gateway import contenders
from tests.bench.relay import __main__ as relay
from tests.bench.relay import join
from tests.support import links
from tests.support.skips import needs as reason


def part(*lines: str) -> ModuleType:
    module = ModuleType("part")
    module.lacking = lambda: list(lines)  # type: ignore[attr-defined]
    return module


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(SystemExit) as ended:
        needs.stop_if_lacking("bench", [part("ray: no such package"), ModuleType("needs nothing"), part("iptables")])
    assert ended.value.code == "bench: nothing was measured, as this is missing:\n- iptables\n- ray: no such package"
    needs.stop_if_lacking("bench", [part(), ModuleType("needs nothing")])


def test_the_relay_benchmark_without_iptables_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "missing", lambda: reason("not installed: iptables", "`make system-packages`"))
    monkeypatch.setattr(join, "run", _must_not_run)
    with pytest.raises(SystemExit, match=r"iptables.*make system-packages"):
        relay.main(["join"])


def test_the_gateway_benchmark_without_a_router_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    without = Environment(Path("python"), {"vllm-router": "cannot be installed: no matching distribution"})
    monkeypatch.setattr(contenders, "environment", lambda: without)
    with pytest.raises(SystemExit, match="vllm-router: cannot be installed: no matching distribution"):
        gateway.main(["request"])


def test_a_library_of_the_host_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = system_packages.SystemPackage("libibverbs1", "Mooncake", lambda: False)
    monkeypatch.setattr(system_packages, "BENCHMARKS", (absent,))
    assert needs.libraries() == ["libibverbs1, for Mooncake: `make system-packages`"]


def test_what_broke_off_on_the_way_is_an_error_too() -> None:
    figures = [Figure("one", "what", 1.0), Figure("two", "what", None, note="ray does not answer")]
    with pytest.raises(SystemExit, match="two: ray does not answer"):
        needs.stop_if_unmeasured("bench", figures)
    needs.stop_if_unmeasured("bench", figures[:1])


def _must_not_run() -> Iterator[Figure]:
    pytest.fail("it was measured though something is missing")
