"""The tables of tests/README.md name tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
_NAMED = re.compile(r"`([\w/]*(?:test_|engine_contract)\w*)`((?:[ ,;]+[a-z]\w*…?(?= |,|;|$))*)")


def rows() -> list[tuple[str, str]]:
    lines = (TESTS / "README.md").read_text().splitlines()
    cells = [line.strip("|").split(" | ", 1) for line in lines if line.startswith("| ") and " | " in line]
    return [(rule.strip(), tests.strip()) for rule, tests in cells if tests.strip() != "test |"]


def named(tests: str) -> list[tuple[str, str]]:
    """Files, and beginnings of names of tests in them."""
    found = []
    for path, names in _NAMED.findall(tests):
        words = [word.strip(" ,;") for word in re.split(r"[,;]", names) if "_" in word]
        found += [(path, word.strip("…")) for word in words or [""]]
    return found


@pytest.mark.parametrize(("rule", "tests"), rows(), ids=[rule[:40] for rule, _ in rows()])
def test_every_test_of_the_tables_is_there(rule: str, tests: str) -> None:
    for path, name in named(tests):
        first, _, last = path.rpartition("/")
        files = [*TESTS.glob(f"{first}/{last}.py"), *TESTS.glob(f"{first}/*/{last}.py"), *TESTS.glob(f"*/{path}.py")]
        assert files, f"{rule}: no {path}"
        assert not name or any(f"def test_{name}" in file.read_text() for file in files), (
            f"{rule}: no test_{name} in {path}"
        )


def test_the_tables_are_read() -> None:
    assert len(rows()) > 60
    assert sum(len(named(tests)) for _, tests in rows()) > 100
