"""`python -m tests.attacks`: makes the attempts, prints the table, and writes docs/reference/attacks.md."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.attacks.table import PAGE, page, table


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        text = page(asyncio.run(table(Path(directory))))
    print(text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
