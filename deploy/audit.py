"""Known vulnerabilities of the packages in requirements.lock: `python -m deploy.audit`, which `make audit` calls.

pip-audit is installed beside `.venv`. It needs an advisory service: that of the package index, else OSV. A package of
which no service says anything counts as unknown, not as sound. Exit status 0: none is known, besides the exceptions of
`audit_exceptions.toml`; 1: some are; 2: of some packages nothing could be found out.

`--daily` is for `make check`: an audit of the same lock within a day is not repeated, and what could not be found out
is a line of text, no failure, as most machines without the internet cannot help it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
VENV = ROOT / ".venv-audit"
LAST = VENV / "last.json"
EXCEPTIONS = Path(__file__).with_name("audit_exceptions.toml")
SERVICES = ("pypi", "osv")
TOOL = "pip-audit>=2.7"
TIMEOUT_S = 300.0
DAY_S = 86_400.0
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Found:
    """What services said: the vulnerabilities, a line each, and the packages of which none said anything."""

    vulnerable: Sequence[str]
    unknown: Sequence[str]

    @property
    def status(self) -> int:
        return 1 if self.vulnerable else 2 if self.unknown else 0


def exceptions(text: str) -> Sequence[str]:
    """The ids of advisories that are accepted. Raises ValueError for one without a reason."""
    rows = tomllib.loads(text).get("exception", [])
    for row in rows:
        if not (row.get("id") and str(row.get("why", "")).strip()):
            raise ValueError(f"{EXCEPTIONS.name}: {row} needs an id, and why it is accepted")
    return [row["id"] for row in rows]


def judged(output: str) -> Found | None:
    """What pip-audit's JSON means; None: its service could not be reached, or did not answer."""
    try:
        dependencies: Sequence[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, TypeError, KeyError):
        return None
    return Found(
        [
            f"{package['name']} {package['version']}: {one['id']}, mended in {one['fix_versions'] or 'none yet'}"
            for package in dependencies
            for one in package.get("vulns", ())
        ],
        [package["name"] for package in dependencies if "skip_reason" in package],
    )


def combined(answers: Sequence[Found]) -> Found | None:
    """Of several services: all that any of them knows. None where none answered."""
    if not answers:
        return None
    unknown = set(answers[0].unknown).intersection(*(answer.unknown for answer in answers))
    return Found(sorted({line for answer in answers for line in answer.vulnerable}), sorted(unknown))


def shown(found: Found | None, num_accepted: int) -> str:
    if found is None:
        return "audit: no advisory service answered: nothing is known of these packages, good or bad"
    lines = list(found.vulnerable)
    if found.unknown:
        more = f" and {len(found.unknown) - NAMES_SHOWN} more" if len(found.unknown) > NAMES_SHOWN else ""
        lines.append(f"audit: nothing is known of {', '.join(found.unknown[:NAMES_SHOWN])}{more}")
    lines.append(f"audit: {len(found.vulnerable)} known vulnerabilities, {num_accepted} exceptions")
    return "\n".join(lines)


def _tool() -> Path:
    found = VENV / "bin/pip-audit"
    if not found.exists():
        venv.create(VENV, with_pip=True)
        subprocess.run([VENV / "bin/pip", "-q", "install", TOOL], check=True)
    return found


def _run(tool: Path, service: str, accepted: Sequence[str]) -> Found | None:
    command: list[str | Path] = [tool, "-r", LOCK, "--no-deps", "--disable-pip", "--progress-spinner=off", "-f", "json"]
    command += [f"--vulnerability-service={service}", *(f"--ignore-vuln={one}" for one in accepted)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=dict(os.environ)
        )
    except subprocess.TimeoutExpired:
        print(f"audit: no answer from {service} within {TIMEOUT_S:g} s", file=sys.stderr)
        return None
    found = judged(ran.stdout)
    if found is None:
        last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"audit: the advisories of {service} could not be read: {last[:300]}", file=sys.stderr)
    return found


def _audit(accepted: Sequence[str]) -> Found | None:
    try:
        tool = _tool()
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"audit: pip-audit cannot be installed: {error}", file=sys.stderr)
        return None
    answers: list[Found] = []
    for service in SERVICES:
        if (answer := _run(tool, service, accepted)) is not None:
            answers.append(answer)
        if (found := combined(answers)) is not None and not found.unknown:
            break
    return combined(answers)


def _audited(key: str) -> bool:
    """Whether the audit of `key` passed, or could find out nothing, less than a day ago."""
    try:
        last = json.loads(LAST.read_text())
        return bool(last["of"] == key and last["status"] != 1 and 0 <= time.time() - last["unix_s"] < DAY_S)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def main(arguments: Sequence[str]) -> int:
    daily = "--daily" in arguments
    key = hashlib.sha256(LOCK.read_bytes() + EXCEPTIONS.read_bytes()).hexdigest()
    if daily and _audited(key):
        return 0
    accepted = exceptions(EXCEPTIONS.read_text())
    found = _audit(accepted)
    status = 2 if found is None else found.status
    print(shown(found, len(accepted)))
    if VENV.exists():
        LAST.write_text(json.dumps({"of": key, "status": status, "unix_s": time.time()}))
    return 0 if daily and status == 2 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
