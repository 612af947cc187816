"""The extras of this package: what of one is not installed here, and the command that installs it.

Where the package was installed from a checkout or a wheel, which pip has noted, the extra has to come from there, too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = "laminar-rl"
CHECKOUT = Path(__file__).parents[1]
_REQUIREMENT = re.compile(r"""([A-Za-z0-9._-]+).*extra == ['"]([a-z]+)['"]""")


def install(extra: str) -> str:
    """The command that adds the extra to this environment."""
    return f"{Path(sys.executable).name} -m pip install '{_source()}[{extra}]'"


def lacking(extra: str) -> list[str]:
    """The packages of the extra that are not installed here, in alphabetical order."""
    return sorted(name for name in _packages(extra) if not _is_there(name))


def _source() -> str:
    """What this package was installed from: a folder, a wheel, or a name of an index."""
    try:
        noted = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return str(CHECKOUT)
    url = urlsplit(str(json.loads(noted)["url"])) if noted else None
    if url is None:
        return PACKAGE
    return unquote(url.path) if url.scheme == "file" else f"{PACKAGE} @ {url.geturl()}"


def _packages(extra: str) -> Iterator[str]:
    try:
        requirements = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        if (found := _REQUIREMENT.match(requirement)) and found[2] == extra:
            yield found[1]


def _is_there(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
