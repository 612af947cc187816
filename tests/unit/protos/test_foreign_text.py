"""Text that others chose, in logs and on terminals."""

from __future__ import annotations

import pytest

from protos.foreign_text import NAME_CHARS_MAX, continued, one_line, quoted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s-1f2e", "s-1f2e"),
        ("/sessions/a%20b/v1", "/sessions/a%20b/v1"),
        ("Schlüssel", "Schlüssel"),
        ("", "''"),
        ("a b", "'a b'"),
        ("a is lost: b", "'a is lost: b'"),
        ("it's", '"it\'s"'),
        ("a\nb", r"'a\nb'"),
        ("a\x1b[2Jb", r"'a\x1b[2Jb'"),
        ("a\u202eb", r"'a\u202eb'"),
        ("\ud800", r"'\ud800'"),
        ("\u200b", r"'\u200b'"),
    ],
)
def test_a_name_is_one_word_of_its_line(text: str, shown: str) -> None:
    assert quoted(text) == shown


def test_a_long_name_is_shortened_and_says_so() -> None:
    assert quoted("x" * NAME_CHARS_MAX) == "x" * NAME_CHARS_MAX
    assert quoted("x" * 1_000_000) == f"'{'x' * NAME_CHARS_MAX}'... (1000000 characters)"
    assert len(quoted("\U000e0001" * 1_000_000)) < 2_000


@pytest.mark.parametrize(
    "number", [*range(0x20), 0x7F, 0x85, 0x9B, 0xAD, 0x2028, 0x2029, 0x202E, 0x2066, 0xFEFF, 0xDC80]
)
def test_what_moves_a_cursor_or_breaks_a_line_is_escaped_everywhere(number: int) -> None:
    for shown in (
        one_line(f"a{chr(number)}b"),
        quoted(f"a{chr(number)}b"),
        continued(f"a{chr(number)}b").replace("\n", ""),
    ):
        assert chr(number) not in shown
        shown.encode()


def test_what_follows_a_line_of_the_log_never_looks_like_one() -> None:
    assert continued("a\nb\r\nc\x85d") == "  a\n  b\\r\n  c\\x85d"
    assert continued("x" * 100_000).startswith("  (100000 characters) ...")
