"""Bounds on the words of the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import words


def test_the_pages_are_within_their_bounds() -> None:
    assert words.too_long(words.pages()) == []


def test_marks_of_tables_and_lists_are_no_words() -> None:
    assert words.words("# A page\n- one `two`\n| 3 | é |\n|---|---|\n```\nfour_five()\n```\n") == 7


def test_pages_that_programs_write_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("README.md", "docs/a.md", "docs/reference/b.md", ".venv/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert set(words.pages(tmp_path)) == {"README.md", "docs/a.md"}


def test_what_is_too_long_is_named_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "WORDS_MAX", 3)
    monkeypatch.setattr(words, "OF_A_PAGE_MAX", {"README.md": 1})
    monkeypatch.setattr(words, "LINES_MAX", {"A.md": 1})
    told = words.too_long({"README.md": "one two", "A.md": "three\nfour\n"})
    assert told == [
        "README.md has 2 words, and may have 1",
        "A.md has 2 lines, and may have 1",
        "all pages together have 4 words, and may have 3: `python -m deploy.words --table`",
    ]


def test_an_unknown_argument_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert words.main(["--wrong"]) == 2
    assert capsys.readouterr().err == words.USAGE
