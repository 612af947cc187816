"""Counts the words of the pages that people write, and holds their bounds: `python -m deploy.words [--table]`.

A word is a piece of text between blanks with at least one letter or digit. Code blocks and tables count. The pages of
`docs/reference` do not: programs write them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.setup_env import ROOT

WORDS_MAX = 50_000
OF_A_PAGE_MAX: Mapping[str, int] = {"README.md": 900}
LINES_MAX = {"ARCHITECTURE.md": 250}
USAGE = "usage: python -m deploy.words [--table]\n"


def pages(root: Path = ROOT) -> dict[str, str]:
    """The text of each page by its path below `root`. Hidden folders (environments, caches) have none."""
    found = (path.relative_to(root) for path in root.rglob("*.md"))
    own = (path for path in found if not any(part.startswith(".") for part in path.parts))
    return {str(path): (root / path).read_text() for path in sorted(own) if path.parts[:2] != ("docs", "reference")}


def words(text: str) -> int:
    return sum(1 for piece in text.split() if re.search(r"[^\W_]", piece))


def too_long(texts: Mapping[str, str]) -> list[str]:
    """A sentence for each bound that is exceeded."""
    counts = {name: words(text) for name, text in texts.items()}
    found = [
        f"{name} has {counts[name]} words, and may have {bound}"
        for name, bound in OF_A_PAGE_MAX.items()
        if counts[name] > bound
    ]
    found += [
        f"{name} has {lines} lines, and may have {bound}"
        for name, bound in LINES_MAX.items()
        if (lines := len(texts[name].splitlines())) > bound
    ]
    if (total := sum(counts.values())) > WORDS_MAX:
        found.append(
            f"all pages together have {total} words, and may have {WORDS_MAX}: `python -m deploy.words --table`"
        )
    return found


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--table"]):
        sys.stderr.write(USAGE)
        return 2
    texts = pages()
    if arguments:
        for name, text in sorted(texts.items(), key=lambda item: words(item[1])):
            print(f"{words(text):6} {name}")
        print(f"{sum(map(words, texts.values())):6} of {WORDS_MAX}")
    wrong = too_long(texts)
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
