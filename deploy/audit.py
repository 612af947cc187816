"""Known vulnerabilities of the packages in requirements.lock: `python -m deploy.audit`, which `make audit` calls.

pip-audit is installed beside `.venv`. It needs an advisory service: that of the package index, else OSV. Exit status 0:
none is known, besides the exceptions of `audit_exceptions.toml`; 1: some are; 2: nothing could be found out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
VENV = ROOT / ".venv-audit"
EXCEPTIONS = Path(__file__).with_name("audit_exceptions.toml")
SERVICES = ("pypi", "osv")
TOOL = "pip-audit>=2.7"
TIMEOUT_S = 300.0
FOUND = "known vulnerabilit"
"""In pip-audit's own summary, where it found out: some, or "No known vulnerabilities found"."""


def exceptions(text: str) -> Sequence[str]:
    """The ids of advisories that are accepted. Raises ValueError for one without a reason."""
    rows = tomllib.loads(text).get("exception", [])
    for row in rows:
        if not (row.get("id") and str(row.get("why", "")).strip()):
            raise ValueError(f"{EXCEPTIONS.name}: {row} needs an id, and why it is accepted")
    return [row["id"] for row in rows]


def judged(status: int, output: str) -> int | None:
    """What a run of pip-audit means; None: its service could not be reached, or did not answer."""
    return status if status in (0, 1) and FOUND in output else None


def _tool() -> Path:
    found = VENV / "bin/pip-audit"
    if not found.exists():
        venv.create(VENV, with_pip=True)
        subprocess.run([VENV / "bin/pip", "-q", "install", TOOL], check=True)
    return found


def _run(tool: Path, service: str, accepted: Sequence[str]) -> tuple[int, str]:
    command: list[str | Path] = [
        tool,
        "-r",
        LOCK,
        "--no-deps",
        "--disable-pip",
        "--progress-spinner=off",
        f"--vulnerability-service={service}",
    ]
    command += [f"--ignore-vuln={one}" for one in accepted]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={**os.environ, "NO_COLOR": "1"}
        )
    except subprocess.TimeoutExpired:
        return 2, f"no answer within {TIMEOUT_S:g} s"
    return ran.returncode, ran.stdout + ran.stderr


def main() -> int:
    accepted = exceptions(EXCEPTIONS.read_text())
    try:
        tool = _tool()
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"audit: pip-audit cannot be installed: {error}", file=sys.stderr)
        return 2
    for service in SERVICES:
        status, output = _run(tool, service, accepted)
        if (found := judged(status, output)) is not None:
            print(f"{output.strip()}\naudit: by {service}, {len(accepted)} exceptions")
            return found
        last = (output.strip().splitlines() or ["no output"])[-1]
        print(f"audit: the advisories of {service} could not be read: {last[:300]}", file=sys.stderr)
    print(
        "audit: nothing is known of these packages, good or bad; run it where the internet is reached", file=sys.stderr
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
