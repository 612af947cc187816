"""Links between the project's pages lead to a file that exists, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "protos/*.md", "tests/*.md", "deploy/**/*.md")
    for page in ROOT.glob(pattern)
)
_LINK = re.compile(r"\[[^]]*\]\((?!https?://|mailto:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken(page: Path) -> list[str]:
    return [link for link in _LINK.findall(page.read_text()) if not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, fragment = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not fragment or fragment in map(anchor, _HEADING.findall(target.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n[good](#a-page) [file](gone.md) [heading](page.md#gone) [web](https://example.org)")
    assert broken(page) == ["gone.md", "page.md#gone"]
