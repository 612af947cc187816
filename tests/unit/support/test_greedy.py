"""What greedy decoding may say: ties may go either way, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.greedy import check_greedy, first_stray, transformers_greedy

pytestmark = pytest.mark.slow  # the models of transformers take seconds to import

PROMPT = (7, 8, 9)
COUNT = 40


def test_what_the_model_says_has_no_stray_and_another_models_words_have_one_at_once() -> None:
    said = transformers_greedy(1, PROMPT, COUNT)
    check_greedy(said, 1, PROMPT, COUNT)
    assert first_stray(said, 2, PROMPT) == 0
    assert first_stray([], 2, PROMPT) is None


def test_one_wrong_token_is_found_though_all_that_follow_are_right() -> None:
    said = transformers_greedy(1, PROMPT, COUNT)
    wrong = (said[20] + 1) % 512
    after = transformers_greedy(1, (*PROMPT, *said[:20], wrong), COUNT - 21)
    assert first_stray([*said[:20], wrong, *after], 1, PROMPT) == 20
    with pytest.raises(AssertionError, match=rf"token 20 of {COUNT} is {wrong}, transformers says \[{said[20]}\]"):
        check_greedy([*said[:20], wrong, *after], 1, PROMPT, COUNT)


def test_a_turn_that_is_too_short_fails() -> None:
    with pytest.raises(AssertionError):
        check_greedy(transformers_greedy(1, PROMPT, COUNT), 1, PROMPT, COUNT + 1)
