"""What a processor computes fastest in, measured: on this one, and on one without instructions for bf16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict

import msgspec
import pytest
import torch
from click.testing import CliRunner

from gateway.cli import cli
from gateway.core.dtypes import Choice, Figure
from gateway.engines.embedded.compute.speed import Shapes, measure, shapes_of
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow  # torch takes a second to import

TINY = Shapes(((96, 64), (64, 64), (256, 64), (64, 128)), (512, 64), 2)
WITHOUT_BF16 = "AVX512_CORE_VNNI"
"""oneDNN's name for a processor of before bf16 instructions; on one that has fewer it changes nothing."""


def figures(choice: Choice) -> dict[tuple[str, int], Figure]:
    return {(figure.dtype, figure.threads): figure for figure in choice.figures}


def test_both_dtypes_are_measured_and_two_threads_where_there_are_two_cores() -> None:
    threads = torch.get_num_threads()
    alone, beside = measure(TINY, cores=1), measure(TINY, cores=2)
    assert set(figures(alone)) == {("float32", 1), ("bfloat16", 1)}
    assert set(figures(beside)) - set(figures(alone)) in ({("float32", 2)}, {("bfloat16", 2)})
    for figure in beside.figures:
        assert min(figure.decode, figure.prefill, figure.train) > 0
    assert torch.get_num_threads() == threads, "as it was found"


def test_shapes_are_those_of_the_model() -> None:
    shapes = shapes_of(tiny_model("llama", "float32"))
    assert shapes.num_layers >= 1
    qkv, o, gate_up, down = shapes.layer
    assert qkv[1] == o[0] == gate_up[1] == down[0] == shapes.head[1]
    assert gate_up[0] == 2 * down[1]


def test_the_command_teaches_and_is_listed() -> None:
    assert "engine-dtype" in CliRunner().invoke(cli, ["--help"]).output
    text = CliRunner().invoke(cli, ["engine-dtype", "--help"]).output
    for word in ("--model", "--train", "--dtype auto", "bfloat16"):
        assert word in text


def test_without_bf16_instructions_bf16_is_slower_and_float32_is_chosen() -> None:
    """The same holds where the processor has none: nothing is skipped."""
    command = [sys.executable, "-m", "gateway", "engine-dtype", "--train", "--json"]
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": WITHOUT_BF16}
    # The best of some runs: a busy machine makes a figure worse, never better.
    prefill: defaultdict[str, float] = defaultdict(float)
    train: defaultdict[str, float] = defaultdict(float)
    for _ in range(5):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        choice = msgspec.convert(json.loads(done.stdout), Choice)
        assert choice.dtype == "float32", done.stdout
        for (dtype, threads), figure in figures(choice).items():
            if threads == 1:
                prefill[dtype] = max(prefill[dtype], figure.prefill)
                train[dtype] = max(train[dtype], figure.train)
        seconds = {dtype: 1 / prefill[dtype] + 1 / train[dtype] for dtype in prefill}
        if seconds["bfloat16"] > seconds["float32"]:
            break
    assert prefill["bfloat16"] < prefill["float32"]
    assert seconds["bfloat16"] > seconds["float32"]


def test_people_get_a_table_and_the_options_to_use() -> None:
    command = [sys.executable, "-m", "gateway", "engine-dtype", "--model", str(tiny_model("llama", "float32"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Use --dtype " in done.stdout
    assert done.stdout.count("chosen") == 1


def test_a_directory_that_is_no_model_is_one_clear_line() -> None:
    command = [sys.executable, "-m", "gateway", "engine-dtype", "--model", "/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("gateway engine-dtype: / is not a model directory")
    assert "Traceback" not in done.stderr
