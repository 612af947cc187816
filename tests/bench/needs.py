"""What a benchmark is compared with, and what else it needs, is there before it starts, or it names it and ends.

A part of a benchmark is a module with `run()`; one that needs something has `lacking()` beside it: a line for each
thing that is missing, with what mends it, none when all is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

from deploy import system_packages
from tests.bench.environment import Environment
from tests.bench.figures import Figure
from tests.support import links


def stop_if_lacking(name: str, parts: Iterable[ModuleType]) -> None:
    """Ends the process with an error, before anything is measured, when one of the parts lacks something."""
    lines = sorted({line for part in parts if hasattr(part, "lacking") for line in part.lacking()})
    if lines:
        sys.exit("\n".join([f"{name}: nothing was measured, as this is missing:", *(f"- {line}" for line in lines)]))


def stop_if_unmeasured(name: str, figures: Sequence[Figure]) -> None:
    """Ends the process with an error when something broke off on the way."""
    lines = [f"- {figure.key}: {figure.note or 'no reason given'}" for figure in figures if figure.value is None]
    if lines:
        sys.exit("\n".join([f"{name}: not everything was measured:", *lines]))


def namespaces() -> list[str]:
    """For hosts of their own, with links that are slow or cut."""
    reason = links.missing()
    return [reason] if reason else []


def packages(environment: Environment, *names: str) -> list[str]:
    """Of the peers' own environment; it is tried again at every start."""
    reasons = [environment.why_not(name) for name in names]
    return [f"{reason} (see `pip config list`, and run this again)" for reason in reasons if reason]


def libraries() -> list[str]:
    """Of the host, for peers that load them."""
    return _absent(system_packages.BENCHMARKS)


def compiler() -> list[str]:
    """For what gives every contender the same sockets."""
    return _absent([package for package in system_packages.SET_UP if package.name in ("gcc", "libc6-dev")])


def _absent(packages: Sequence[system_packages.SystemPackage]) -> list[str]:
    absent = system_packages.lacking(packages)
    return [f"{package.name}, for {package.purpose}: `make system-packages`" for package in absent]
