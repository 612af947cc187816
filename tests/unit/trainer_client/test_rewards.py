"""Whatever stands for a number is one, and what is none is refused with the name of who gave it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainer_client.rewards import NoNumber, name_of, number

pytestmark = pytest.mark.slow  # imports torch


@pytest.mark.parametrize(
    ("value", "is_"),
    [
        *((True, 1.0), (False, 0.0), (3, 3.0), (np.True_, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0)),
        *((torch.tensor(0.25), 0.25), (torch.tensor([True]), 1.0)),
    ],
)
def test_what_stands_for_a_number_is_one(value: Any, is_: float) -> None:
    found = number(value, "a reward", "agent a")
    assert (type(found), found) == (float, is_)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, np.float32("nan"), torch.tensor(-math.inf), torch.tensor([1.0, 2.0])),
        *(np.array([1.0, 2.0]), "1.0", None, [1.0], 1j, 10**400, "x" * 1000),
    ],
)
def test_what_is_no_finite_number_is_refused_with_its_givers_name(value: Any) -> None:
    with pytest.raises(NoNumber, match=r"agent a gave .* as a reward") as refused:
        number(value, "a reward", "agent a")
    assert len(str(refused.value)) < 250


def test_a_function_is_named_by_its_module_and_name() -> None:
    assert name_of(number) == "trainer_client.rewards.number"
    assert name_of(np.random.default_rng()) == "numpy.random._generator.Generator"
