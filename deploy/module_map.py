"""The map of modules in ARCHITECTURE.md, made of their docstrings: `python -m deploy.module_map [--check]`.

It stands between two markers, a line per module: the first paragraph of its docstring. `--check` fails when it is
stale or a module does not say what it is.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- modules: begin -->\n", "<!-- modules: end -->\n"
PACKAGES = ("protos", "paramserver", "gateway", "trainer_client", "agents_env", "deploy")


def module_map(root: Path) -> str:
    """A table per package, a line per module that has any code."""
    return "\n".join(_package(root, name) for name in PACKAGES)


def _package(root: Path, package: str) -> str:
    lines = [f"**`{package}/`**", "", "| module | what it is |", "|---|---|"]
    for path in sorted((root / package).rglob("*.py"), key=lambda path: (path.parent, path.name)):
        if _counts(path):
            name = str(path.relative_to(root / package).with_suffix(""))
            lines.append(f"| `{name}` | {_summary(path)} |")
    return "\n".join(lines) + "\n"


def _counts(path: Path) -> bool:
    return path.name not in ("__init__.py", "__main__.py") and not path.stem.endswith(("_pb2", "_pb2_grpc"))


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring: its first paragraph says what the module is")
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    fresh = head + BEGIN + module_map(ROOT) + END + tail
    if arguments == ["--check"]:
        if fresh != page:
            sys.stderr.write("the map in ARCHITECTURE.md is stale; run `python -m deploy.module_map` and commit\n")
        return int(fresh != page)
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
