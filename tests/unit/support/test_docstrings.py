"""Every module says in its docstring what it is."""

from __future__ import annotations

import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("protos", "paramserver", "gateway", "trainer_client", "agents_env", "deploy", "tests")
BEFORE = (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL)
"""What may stand above a docstring."""


def is_ours(path: Path) -> bool:
    return path.name != "__init__.py" and not path.stem.endswith(("_pb2", "_pb2_grpc"))


def begins_with_a_docstring(path: Path) -> bool:
    """By the first word alone: to parse every module takes more than a second."""
    with path.open("rb") as lines:
        first = next(token for token in tokenize.tokenize(lines.readline) if token.type not in BEFORE)
    return first.type == tokenize.STRING and len(first.string.strip("\"' \n")) > 0


def test_no_module_is_without_one() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if is_ours(path)]
    assert modules
    assert [str(path.relative_to(ROOT)) for path in modules if not begins_with_a_docstring(path)] == []


def test_a_module_that_begins_with_code_is_found(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text('# a comment\n\nX = 1\n"""a docstring of X"""\n')
    (tmp_path / "empty.py").write_text("")
    assert not begins_with_a_docstring(tmp_path / "mute.py")
    assert not begins_with_a_docstring(tmp_path / "empty.py")
