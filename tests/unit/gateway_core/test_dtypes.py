"""The choice of a dtype and of threads, from figures."""

from __future__ import annotations

import pytest

from gateway.core.dtypes import SERVING, TRAINING, Dtype, Figure, Work, choose, table


def figure(dtype: Dtype, threads: int = 1, *, decode: float = 100, prefill: float = 100, train: float = 100) -> Figure:
    return Figure(dtype=dtype, threads=threads, decode=decode, prefill=prefill, train=train)


@pytest.mark.parametrize(
    ("bfloat16", "chosen", "reason"),
    [
        (300.0, "bfloat16", "bfloat16 is 3.0 times as fast as float32 here"),
        (25.0, "float32", "bfloat16 is 4.0 times slower than float32 here"),
        (105.0, "float32", "too little for what float32 has: exact moves"),
    ],
)
def test_the_faster_dtype_is_chosen_and_float32_where_there_is_little_in_it(
    bfloat16: float, chosen: Dtype, reason: str
) -> None:
    figures = [figure("float32"), figure("bfloat16", decode=bfloat16, prefill=bfloat16, train=bfloat16)]
    choice = choose(figures, SERVING)
    assert (choice.dtype, choice.threads) == (chosen, 1)
    assert reason in choice.reason


def test_the_work_decides_between_a_dtype_that_decodes_fast_and_one_that_trains_fast() -> None:
    figures = [figure("float32", train=50), figure("bfloat16", decode=200, train=10)]
    assert choose(figures, SERVING).dtype == "bfloat16"
    assert choose(figures, TRAINING).dtype == "float32"
    assert choose(figures, Work(decode=1, prefill=0)).dtype == "bfloat16"


@pytest.mark.parametrize(("with_two", "threads"), [(180.0, 2), (110.0, 1), (30.0, 1)])
def test_a_second_thread_has_to_be_worth_it(with_two: float, threads: int) -> None:
    two = figure("float32", 2, decode=with_two, prefill=with_two, train=with_two)
    choice = choose([figure("float32"), figure("bfloat16", decode=50, prefill=50, train=50), two], SERVING)
    assert (choice.dtype, choice.threads) == ("float32", threads)
    assert choice.chosen.threads == threads
    assert f"2 threads do {with_two / 100:.1f} times the work of one" in choice.reason


def test_the_table_marks_what_was_chosen() -> None:
    choice = choose([figure("float32", decode=1234), figure("bfloat16", decode=50, prefill=50, train=50)], SERVING)
    head, float32, bfloat16 = table(choice)
    assert head.split() == ["dtype", "threads", "decode", "prefill", "training", "tokens/s"]
    assert float32.split() == ["float32", "1", "1234", "100", "100", "chosen"]
    assert bfloat16.split() == ["bfloat16", "1", "50", "50", "50"]
