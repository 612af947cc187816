"""`make test-integrations`: what works together with programs of others, each in an environment of its own, one by one.

    make test-integrations ARGS="trl verl"     some of them; without names all

An integration that fails does not stop the others. The table at the end has for each its environment, its outcome, how
many tests ran, how long it took to set the environment up and to run them, and whether continuous integration runs it.
Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from deploy.setup_env import ROOT

CI = ROOT / ".ci" / "run"
HEAD = ("integration", "environment", "outcome", "tests", "skipped", "set-up", "run", "in CI")


@dataclass(frozen=True, slots=True)
class Integration:
    """`tests`: pytest's arguments. `environment`: its name in `deploy/side_envs.py`; "" for `.venv`.

    `target`: the target of the Makefile that runs these tests, too, alone or among others.
    """

    name: str
    what: str
    tests: tuple[str, ...]
    environment: str
    target: str

    @property
    def in_ci(self) -> bool:
        return f"[{self.target}]=" in CI.read_text()


def _of_its_own(name: str, what: str) -> Integration:
    """One with a folder of tests, a marker, an environment and a target that have its name."""
    return Integration(name, what, (f"tests/{name}", "-m", name), name, f"test-{name}")


def _beside(name: str, what: str, *tests: str) -> Integration:
    """One that `make test` runs among others."""
    return Integration(name, what, tests, "", "test")


INTEGRATIONS = (
    _beside(
        "openai",
        "OpenAI's client: chat and responses",
        "tests/e2e/test_openai_client.py",
        "tests/e2e/test_responses_client.py",
    ),
    _beside("anthropic", "Anthropic's client", "tests/e2e/test_anthropic_client.py"),
    _beside("prime-rl", "the calls of prime-rl's orchestrator", "tests/e2e/test_prime_rl.py"),
    _beside(
        "nixl",
        "relays over NIXL",
        "tests/contract/test_transport.py",
        "tests/e2e/test_relay_transport.py",
        "-k",
        "nixl",
    ),
    _of_its_own("verifiers", "environments of verifiers, by vf-eval"),
    _of_its_own("openenv", "environments of OpenEnv"),
    _of_its_own("trl", "TRL's trainers"),
    _of_its_own("verl", "verl's weight updates and rollouts"),
    _of_its_own("vllm", "vLLM's servers and its trainer side"),
)


@dataclass(frozen=True, slots=True)
class Result:
    """`num_tests` None: pytest did not come so far."""

    integration: Integration
    passed: bool
    num_tests: int | None
    num_skipped: int
    setup_s: float
    run_s: float

    @property
    def row(self) -> tuple[str, ...]:
        integration = self.integration
        count = "none" if self.num_tests is None else str(self.num_tests)
        return (
            integration.name,
            integration.environment or ".venv",
            "passed" if self.passed else "FAILED",
            count,
            str(self.num_skipped),
            clock(self.setup_s),
            clock(self.run_s),
            "yes" if integration.in_ci else "no",
        )


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def table(results: Sequence[Result]) -> str:
    rows = [HEAD, *(result.row for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def run(integration: Integration) -> Result:
    begun = time.monotonic()
    failed_setup = False
    if integration.environment:
        command = [sys.executable, "-m", "deploy.side_envs", integration.environment]
        failed_setup = subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    set_up = time.monotonic()
    if failed_setup:
        return Result(integration, False, None, 0, set_up - begun, 0.0)
    with tempfile.TemporaryDirectory(prefix="laminar-integration-") as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", *integration.tests, f"--junitxml={report}"]
        passed = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
        num_tests, num_skipped = counted(report)
    return Result(integration, passed, num_tests, num_skipped, set_up - begun, time.monotonic() - set_up)


def counted(report: Path) -> tuple[int | None, int]:
    """The tests that ran, and those that were skipped, of pytest's report."""
    if not report.exists():
        return None, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [(int(suite.attrib["tests"]), int(suite.attrib["skipped"])) for suite in suites]
    return sum(tests - skipped for tests, skipped in counts), sum(skipped for _, skipped in counts)


def parsed(arguments: Sequence[str] | None) -> list[Integration]:
    by_name = {integration.name: integration for integration in INTEGRATIONS}
    parser = argparse.ArgumentParser(
        prog="python -m tests.integrations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="integrations:\n" + "\n".join(f"  {one.name.ljust(12)}{one.what}" for one in INTEGRATIONS),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones; default: all")
    names = parser.parse_args(arguments).names or list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"no integration {unknown[0]!r}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in names]


def main() -> int:
    results = []
    for integration in parsed(None):
        print(f"\n=== {integration.name}: {integration.what}", flush=True)
        results.append(run(integration))
    print(f"\n{table(results)}")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
