"""What `make bench-learning` makes of its runs, and the task that it trains on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.learning import figures, task
from tests.bench.learning.__main__ import BEGIN, END, _fill_in, _kept
from tests.bench.learning.model import expected_reward
from tests.bench.learning.settings import Mode, Settings, gateway_command

pytestmark = pytest.mark.slow  # torch takes a second to import


def a_run(mode: Mode, seed: int = 1, *, step_s: float = 2.0, rise: float = 0.1, behind: int = 0) -> dict[str, Any]:
    """Six steps of 100 tokens; the reward begins at 0.3 and rises by `rise` a step."""
    steps = range(1, 7)
    return {
        "mode": mode,
        "seed": seed,
        "settings": asdict(Settings(mode, seed)),
        "wall_s": 6 * step_s,
        "t": [step_s * n for n in steps],
        "tokens": [100] * 6,
        "staleness": [{str(behind): 99, str(behind + 1): 1}] * 6,
        "mixed": [0] * 6,
        "clip_fraction": [0.01] * 6,
        "wait_s": [0.7 * step_s] * 6,
        "train_s": [0.2 * step_s] * 6,
        "publish_s": [0.05 * step_s] * 6,
        "loading_s": 0.1 * 6 * step_s if mode == "barrier" else 0.0,
        "evaluated": [(n, 0.3 + rise * n) for n in range(7)],
        "generated_tokens": 660,
        "slots_used": 0.5,
        "token_ms": 8.1,
        "lengths": {"p50": 20, "p90": 90, "p99": 200},
        "cpu_s": {"engines": 5.0, "gateway": 1.0, "trainer": 1.0, "relays and etcd": 0.5, "agents": 0.5},
    }


# -- the task


def test_a_reward_is_the_share_before_the_first_mistake() -> None:
    right = task.right_answer(3)
    assert len(right) == 4
    assert task.reward(3, right) == 1.0
    assert task.reward(3, [right[0], right[0], *right[1:]]) == 0.25
    assert task.reward(3, right[:-1]) == 0.75, "it did not stop by itself"
    assert task.reward(3, []) == 0.0


def test_prompts_are_those_of_their_seed_and_have_a_long_tail() -> None:
    assert [task.number(1, n) for n in range(9)] == [task.number(1, n) for n in range(9)]
    drawn = sorted(task.number(1, n) for n in range(4000))
    p50, p99 = drawn[2000], drawn[3960]
    assert 7 < p99 / p50 < 13
    even = task.even_numbers(64)
    assert even == sorted(even)
    assert min(even) >= 1
    assert max(even) <= task.NUMBER_MAX


def test_an_expected_reward_is_computed_from_probabilities() -> None:
    """A model that gives every right token a probability of one half."""

    class Half(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Any:
            rows, length = input_ids.shape
            other = math.log(0.5 / (task.VOCAB - 1))
            logits = torch.full((rows, length, task.VOCAB), other)
            logits[:, :-1].scatter_(2, input_ids[:, 1:, None], math.log(0.5))
            return type("Output", (), {"logits": logits})

    expected = {n: sum(0.5**k for k in range(1, n + 2)) / (n + 1) for n in (1, 4)}
    assert expected_reward(Half(), [1]) == pytest.approx(expected[1])
    assert expected_reward(Half(), [4, 1]) == pytest.approx((expected[1] + expected[4]) / 2)


# -- figures


def test_a_curve_is_read_between_its_versions_and_not_beyond_its_end() -> None:
    by_s, by_tokens = figures.curve(a_run("repack"), "s"), figures.curve(a_run("repack"), "tokens")
    assert figures.reward_at(by_s, 3.0) == pytest.approx(0.45)
    assert figures.reward_at(by_s, 12.1) is None
    assert figures.first_at(by_s, 0.6) == pytest.approx(6.0)
    assert figures.first_at(by_tokens, 0.6) == pytest.approx(300.0)
    assert figures.first_at(by_s, 0.95) is None


def test_a_median_curve_ends_with_its_shortest() -> None:
    curves = [figures.curve(a_run("repack", step_s=s), "s") for s in (1.0, 2.0, 3.0)]
    median = figures.median_curve(curves)
    assert median[0] == (0.0, pytest.approx(0.3))
    assert median[-1][0] == 6.0
    assert median[-1][1] == pytest.approx(0.6), "the middle one's"


def test_seeds_that_lack_a_reward_leave_it_without_a_time() -> None:
    runs = [a_run("repack", 1), a_run("repack", 2, rise=0.01)]
    found = figures.summary(runs)["modes"]["repack"]
    assert found["s_to_0.5"] is None
    assert found["reward_last"] == pytest.approx({"median": 0.63, "min": 0.36, "max": 0.9})
    assert found["seeds"] == [1, 2]


def test_a_mode_is_called_faster_only_if_its_seeds_do_not_overlap() -> None:
    barrier = [a_run("barrier", seed, step_s=s) for seed, s in ((1, 2.0), (2, 2.2))]
    faster = figures.summary([*barrier, a_run("repack", 1, step_s=1.0), a_run("repack", 2, step_s=1.1)])
    [verdict] = faster["verdicts"]
    assert "to a reward of 0.7: 0.50 times the time of `barrier`;" in verdict
    assert verdict.endswith("1.00 times the tokens of `barrier` (the seeds overlap: no clear difference).")
    same = figures.summary([*barrier, a_run("repack", 1, step_s=2.1), a_run("repack", 2, step_s=2.1)])
    assert "1.00 times the time of `barrier` (the seeds overlap: no clear difference)" in same["verdicts"][0]
    alone = figures.summary([*barrier, a_run("repack", 1, step_s=1.0)])
    assert alone["verdicts"] == ["`repack`: one seed shows no difference."]
    assert figures.summary([a_run("repack")])["verdicts"] == []


def test_rewards_are_compared_where_every_run_still_goes() -> None:
    found = figures.summary([a_run("barrier"), a_run("inflight", step_s=1.0)])
    assert (found["seconds"], found["tokens"]) == (6.0, 600.0)
    assert found["modes"]["barrier"]["reward_after_seconds"]["median"] == pytest.approx(0.6)
    assert found["modes"]["inflight"]["reward_after_seconds"]["median"] == pytest.approx(0.9)


def test_staleness_and_shares_of_the_time() -> None:
    found = figures.of_run(a_run("repack", behind=2), 600, 12)
    assert found["staleness_mean"] == pytest.approx(2.01)
    assert found["staleness_p99"] == 2
    shares = figures.spent(a_run("barrier"))
    assert shares["waiting for generation"] == pytest.approx(0.6)
    assert shares["waiting for loads"] == pytest.approx(0.1)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_table_has_a_cell_for_every_mode() -> None:
    runs = [a_run("barrier"), a_run("repack"), a_run("inflight", rise=0.01)]
    lines = [line for line in figures.table(figures.summary(runs)) if line]
    assert {line.count("|") for line in lines} == {5}
    assert any("not reached" in line for line in lines)


# -- what is kept


def test_a_run_is_kept_for_its_own_settings_alone(tmp_path: Path) -> None:
    settings = Settings("repack", 2)
    assert _kept(tmp_path, settings) is None
    (tmp_path / "repack-2.json").write_text(json.dumps(a_run("repack", 2)))
    assert _kept(tmp_path, settings) is not None
    assert _kept(tmp_path, Settings("repack", 2, steps=3)) is None


def test_only_what_stands_between_the_pages_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    _fill_in(page, ["new"])
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_modes_differ_at_the_gateway_by_their_mode_and_a_barriers_bound(tmp_path: Path) -> None:
    def flags(mode: Mode) -> set[str]:
        return set(gateway_command(Settings(mode), tmp_path, {"e0": "http://localhost:1"}, "localhost:2"))

    assert flags("repack") ^ flags("inflight") == {"--mode=repack", "--mode=inflight"}
    assert flags("repack") ^ flags("barrier") == {
        "--mode=repack",
        "--mode=barrier",
        "--staleness-max=4",
        "--staleness-max=0",
    }
