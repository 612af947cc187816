"""Every module says in its docstring what it is."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("protos", "paramserver", "gateway", "trainer_client", "agents_env", "deploy", "tests")


def is_ours(path: Path) -> bool:
    return path.name != "__init__.py" and not path.stem.endswith(("_pb2", "_pb2_grpc"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Before Python 3.11.9 a parse fails in which the collector finds something whose traceback is printed: the
    printing parses, too, and both count their depth in one place."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_no_module_is_without_one() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if is_ours(path)]
    assert modules
    mute = [str(path.relative_to(ROOT)) for path in modules if not ast.get_docstring(ast.parse(path.read_text()))]
    assert mute == []
