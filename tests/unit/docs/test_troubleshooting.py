"""docs/troubleshooting.md: the messages that it quotes are messages of the code, and the alerts that it names exist."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from deploy.setup_env import ROOT
from tests.support.wheels import PACKAGES

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
VARIABLE = "\x00"
"""In place of what a message has from a variable."""


@functools.cache
def messages() -> str:
    """Every text of the packages, one a line: of an f-string its fixed parts."""
    texts: list[str] = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(_part(value) for value in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(re.sub(r"%[-+.\d]*[sdgfr]", VARIABLE, node.value))
    return "\n".join(text.replace("\n", " ") for text in texts)


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else VARIABLE


def quoted() -> list[str]:
    """The messages of the first column: code with a blank in it, but no calls, fields and options."""
    cells = re.findall(r"^\| (.+?) \| ", PAGE, re.MULTILINE)
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [code for code in codes if " " in code and not re.match(r"(?:GET|POST|DELETE) |\w+: ", code)]


def test_it_quotes_messages() -> None:
    assert len(quoted()) > 40


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    fixed = [re.escape(part) for part in message.split("...")]
    assert re.search(r"[^\n]*?".join(fixed), messages()), message


def test_alerts_and_pages_that_it_names_are_there() -> None:
    runbook = (ROOT / "docs/alerts.md").read_text()
    named = set(re.findall(r"\bLaminar[A-Z]\w+", PAGE))
    assert named
    assert all(f"### {name}\n" in runbook for name in named)
