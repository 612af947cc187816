"""The GPU benchmark where there is no GPU: it says so; and its rounds, tried on the processor."""

from __future__ import annotations

import pytest
import torch

from tests.bench import gpu

pytestmark = pytest.mark.slow  # torch takes a second to import


def test_without_a_gpu_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main([])
    assert "no CUDA GPU here" in capsys.readouterr().out


def test_its_rounds_compare_what_was_loaded() -> None:
    figures = {figure.key: figure for figure in gpu.run(torch.device("cpu"), 16 << 20)}
    assert set(figures) == {"gpu_copy_gb_s", "gpu_publish_vs_copy", "gpu_load_vs_copy"}
    assert all(len(figure.rounds) == gpu.ROUNDS for figure in figures.values())
