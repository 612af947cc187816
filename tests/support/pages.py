"""What a page of the documentation shows as code."""

from __future__ import annotations

import re

from deploy.setup_env import ROOT


def blocks(page: str, language: str = r"\w+") -> list[str]:
    """`page`: its path from the checkout."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def lines(block: str) -> list[str]:
    """The commands of a block, each in one line."""
    return block.replace("\\\n", "").splitlines()
