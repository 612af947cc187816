"""The map of modules: a line for each, from its docstring; a module without one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import module_map


def checkout(root: Path, **modules: str) -> Path:
    for package in module_map.PACKAGES:
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    for name, text in modules.items():
        (root / "gateway" / f"{name}.py").write_text(text)
    return root


def test_each_module_is_a_line_and_generated_ones_are_not(tmp_path: Path) -> None:
    table = module_map.module_map(
        checkout(tmp_path, turns='"""One turn, placed\nor moved | ended.\n\nMore of it."""\n', x_pb2="", __main__="")
    )
    assert "| `turns` | One turn, placed or moved \\| ended. |" in table.splitlines()
    assert "More of it" not in table
    assert "x_pb2" not in table
    assert "__main__" not in table


def test_a_module_that_does_not_say_what_it_is_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_map, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"gateway/mute\.py has no docstring"):
        module_map.module_map(checkout(tmp_path, mute="X = 1\n"))


def test_the_page_is_fresh() -> None:
    assert module_map.main(["--check"]) == 0, "run `python -m deploy.module_map` and commit"
