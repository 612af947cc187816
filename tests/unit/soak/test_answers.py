"""Answers and snapshots are compared with the weights of one step, and with no other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.answers import Answers
from tests.soak.judge import Span
from tests.support.greedy import transformers_greedy
from tests.support.tiny_model import write_weights

pytestmark = pytest.mark.slow  # the models of transformers take seconds to import

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


def test_greedy_tokens_are_those_of_their_step_alone(answers: Answers) -> None:
    found = tuple(transformers_greedy(2, PROMPT, 12))
    assert answers.stray(Span("s", 1, PROMPT, found), 2) is None
    assert answers.stray(Span("s", 1, PROMPT, found), 3) is not None
    assert answers.stray(Span("s", 1, (*PROMPT, *found[:5]), found[5:]), 2) is None, "a span in the middle of an answer"
    changed = (*found[:7], (found[7] + 1) % 500, *found[8:])
    assert answers.stray(Span("s", 1, PROMPT, changed), 2) == 7


def test_a_snapshot_differs_by_one_bit_or_by_a_name(answers: Answers, tmp_path: Path) -> None:
    write_weights(tmp_path, "llama", "float32", 2)
    assert answers.differing(tmp_path, 2) == []
    assert len(answers.differing(tmp_path, 3)) > 1
    [file] = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert len(answers.differing(tmp_path, 2)) == 1
    file.unlink()
    assert len(answers.differing(tmp_path, 2)) > 1, "none of the tensors is there"
    file.write_bytes(content[:100])
    assert len(answers.differing(tmp_path, 2)) == 1, "one that is written again as it is read"
