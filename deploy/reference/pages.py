"""The list of reference pages, and what writes them and finds the stale ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.reference import columns, configuration, http_api, metrics, roles, rpc
from deploy.setup_env import ROOT

FOLDER = ROOT / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration.page,
    "http.md": http_api.page,
    "grpc.md": rpc.page,
    "metrics.md": metrics.page,
    "roles.md": roles.page,
    "tables.md": columns.page,
}
USAGE = "usage: python -m deploy.reference [--check]\n"


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())


def stale(folder: Path = FOLDER) -> list[str]:
    """The names of the pages that differ from what the code makes now, or are not there."""
    return [name for name, page in PAGES.items() if _text(folder / name) != page()]


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    if arguments not in ([], ["--check"]):
        sys.stderr.write(USAGE)
        return 2
    if not arguments:
        write(folder)
        return 0
    names = stale(folder)
    if names:
        pages = ", ".join(f"docs/reference/{name}" for name in names)
        sys.stderr.write(f"stale: {pages}; run `make reference` and commit\n")
    return 1 if names else 0
