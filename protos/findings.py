"""Findings of the `doctor` commands: one check each, what was found, and how to mend what is not right."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from protos.foreign_text import one_line
from protos.terminal import say


@dataclass(frozen=True, slots=True)
class Finding:
    """One check; `remedy`: how to mend what is not right. `advice`: it works as it is, only slower or less safely."""

    what: str
    right: bool
    found: str
    remedy: str = ""
    advice: bool = False


def wrong(findings: Sequence[Finding]) -> list[Finding]:
    """Those that have to be mended."""
    return [finding for finding in findings if not finding.right and not finding.advice]


def report_findings(findings: Sequence[Finding]) -> None:
    """Prints them, and ends the process with status 1 if anything is wrong."""
    for finding in findings:
        word, colour = (
            ("ok", "green") if finding.right else ("advice", "yellow") if finding.advice else ("wrong", "red")
        )
        click.echo(f"{click.style(f'{word:<7}', fg=colour)} {one_line(f'{finding.what}: {finding.found}')}")
        if not finding.right and finding.remedy:
            say(f"        {finding.remedy}")
    if wrong(findings):
        sys.exit(1)
