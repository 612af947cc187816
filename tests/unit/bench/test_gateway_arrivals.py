"""What a benchmark's client makes of the bytes that it received: tokens, and whether they came whole and on time."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.bench.gateway.arrivals import Arrivals, Script, received
from tests.bench.gateway.mock_engine import chunk
from tests.bench.gateway.streams import Held, failed, judged, said, step_figures

WORDS = [b"um", b'{\\"', b" of", b" the"]
SCRIPT = Script(WORDS)
TOKENS_S = 50.0


def event(first: int, count: int) -> bytes:
    text = b"".join(WORDS[n % len(WORDS)] for n in range(first, first + count))
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null}]}\n\n' % text


def heard(*events: tuple[float, int]) -> Arrivals:
    """Of a stream whose events came at those times, with so many tokens each."""
    arrivals, first = Arrivals(SCRIPT), 0
    for at, count in events:
        arrivals.take(chunk(event(first, count)), at)
        first += count
    return arrivals


def paced(seconds: float, size: int, *, delays: dict[int, float] | None = None) -> Arrivals:
    """Events of `size` tokens at their pace, the first of one token at 0 s; `delays` of events by their number."""
    later, interval_s = delays or {}, size / TOKENS_S
    numbers = range(1, round(seconds / interval_s) + 1)
    return heard((0.0, 1), *((number * interval_s + later.get(number, 0.0), size) for number in numbers))


def test_tokens_are_counted_whatever_events_they_came_in() -> None:
    assert heard((1.0, 1), (2.0, 4), (3.0, 9)).seen == [(1.0, 1), (2.0, 5), (3.0, 14)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_an_event_counts_when_its_last_byte_came(cut: int) -> None:
    arrivals, data = Arrivals(SCRIPT), event(0, 3) + event(3, 2)
    arrivals.take(data[:cut], 1.0)
    arrivals.take(data[cut:], 2.0)
    assert arrivals.seen == [(2.0, 5)]
    assert not arrivals.wrong


def test_two_events_that_come_together_are_one_arrival() -> None:
    arrivals = Arrivals(SCRIPT)
    arrivals.take(chunk(event(0, 1)) + chunk(event(1, 4)), 1.0)
    assert arrivals.seen == [(1.0, 5)]


def test_an_event_without_text_is_no_arrival() -> None:
    arrivals = Arrivals(SCRIPT)
    arrivals.take(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', 1.0)
    arrivals.take(b": keep-alive\n\n", 2.0)
    assert arrivals.seen == []


@pytest.mark.parametrize("first", [0, 2, 4], ids=["again", "a gap", "one left out"])
def test_tokens_out_of_order_are_told(first: int) -> None:
    arrivals = heard((1.0, 1))
    arrivals.take(event(first, 2), 2.0)
    assert arrivals.wrong
    assert received(arrivals, TOKENS_S, 0.0, 3.0).wrong


def test_a_stream_at_its_pace_is_whole_and_on_time() -> None:
    found = received(paced(20, 48), TOKENS_S, 5.0, 19.0)
    assert max(found.delays_s) == pytest.approx(0.0, abs=1e-9)
    assert found.missing == 0
    assert found.longest_gap_s == pytest.approx(0.96)


def test_the_pace_is_that_of_the_event_that_came_soonest() -> None:
    """The first had to wait for more than those after it: they are not early for that."""
    late_first = heard((0.5, 1), *((n * 0.2, 10) for n in range(5, 50)))
    assert min(received(late_first, TOKENS_S, 0.0, 9.0).delays_s) == 0.0


def test_a_late_event_is_as_late_as_it_came() -> None:
    found = received(paced(20, 50, delays={10: 1.5, 11: 0.6}), TOKENS_S, 5.0, 19.0)
    assert sorted(found.delays_s)[-2:] == pytest.approx([0.6, 1.5])
    assert found.missing == 0


def test_a_stream_that_fell_behind_lacks_tokens_at_the_end() -> None:
    behind = received(paced(10, 50), TOKENS_S, 5.0, 20.0)
    assert behind.missing == pytest.approx((20 - 10 - 1) * TOKENS_S - 50, abs=1)
    assert behind.longest_gap_s >= 9.0


def test_a_stream_that_never_said_anything_lacks_all() -> None:
    assert received(Arrivals(SCRIPT), TOKENS_S, 5.0, 20.0).missing == 15 * TOKENS_S


def held(found: Sequence[Arrivals], counts: Sequence[int] = (1000, 1000, 1000)) -> Held:
    return judged(len(found), found, 5.0, 19.0, counts, 0.5)


def test_a_step_is_passed_when_all_clients_had_all_in_time() -> None:
    step = held([paced(20, 48), paced(20, 10)])
    assert step.passed
    assert step.passed_by_counter
    assert step.on_time == 1.0


def test_what_the_gateway_counted_does_not_make_up_for_a_client_that_lacks_tokens() -> None:
    step = held([paced(20, 48), paced(15, 48)])
    assert not step.passed
    assert step.missing
    assert step.passed_by_counter, "which is why it is no longer the definition"


def test_events_that_come_late_at_many_clients_fail_a_step() -> None:
    step = held([paced(20, 50, delays={7: 1.2}), *(paced(20, 50) for _ in range(3))])
    assert step.on_time == pytest.approx(1 - 1 / 56, abs=1e-4)
    assert not step.passed


def test_a_step_with_a_growing_lag_by_the_counter_fails_the_old_definition() -> None:
    step = held([paced(20, 48)], (1000, 980, 970))
    assert step.passed
    assert not step.passed_by_counter


def test_a_text_that_is_not_the_engines_fails_a_step() -> None:
    wrong = paced(20, 48)
    wrong.take(event(2, 3), 20.1)
    step = held([wrong])
    assert "not the engines' text" in step.failure
    assert not step.passed


def test_a_step_whose_streams_did_not_begin_leaves_the_steps_before_it() -> None:
    steps = [held([paced(20, 48)]), failed(2, "leaves 1 of 2 streams without an event")]
    assert [figure.value for figure in step_figures(steps)] == [1.0, 1.0]


def test_both_definitions_stand_in_the_results() -> None:
    steps = [held([paced(20, 48)]), held([paced(20, 48), paced(15, 48)])]
    figures = {figure.key: figure for figure in step_figures(steps)}
    assert {key: figure.value for key, figure in figures.items()} == {"streams_max": 1.0, "streams_max_by_counter": 2.0}
    assert figures["streams_max_by_counter"].what.startswith("old definition")


@pytest.mark.slow
def test_the_script_is_what_the_gateways_tokenizer_makes_of_the_mock_engines_ids() -> None:
    script = said()
    first = json.dumps("umun{")[1:-1].encode()
    assert script.says(first, 0)
    assert script.tokens(4) == 2
