"""A point of the benchmark in virtual time: the gateway's decisions without its sockets."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

from gateway.core.fleet.config import FleetConfig, Mode
from gateway.sim.rollouts import Figures, Rollouts, Settings
from tests.bench.repack.engines import TRACE_LENGTH
from tests.bench.repack.run import Life, Point
from tests.bench.repack.trace import COMMITTED, decode_ms, lengths


@functools.cache
def _trace() -> list[int]:
    return lengths(TRACE_LENGTH)


def simulate(point: Point) -> Life:
    """Figures named as `tests.bench.repack.run` names them; nothing can be late or wrong here."""
    c = COMMITTED
    drain_max_s, staleness_max = point.relief
    fleet = FleetConfig(
        mode=cast(Mode, point.mode),
        max_running=c["max_running"],
        kv_max=c["kv_max"],
        intake_batch=point.batch,
        intake_min_batch=point.batch,
        intake_age_s=1e9,
        drain_max_s=drain_max_s,
        staleness_max=staleness_max,
    )
    settings = Settings(
        fleet=fleet,
        engines=point.engines,
        concurrency=point.concurrency,
        kv_capacity_tokens=c["kv_capacity_tokens"],
        prompt_tokens=c["trace"]["prompt_tokens"],
        budget_tokens=c["trace"]["cap_tokens"],
        decode_s=lambda batch: decode_ms(batch) / 1000,
        prefill_tokens_per_s=c["prefill_tokens_per_s"],
        load_s=c["load_s"],
        publish_period_s=point.publish_period_s,
        repack_interval_s=c["repack_interval_s"],
        warm_up_s=point.warm_up_s,
        measured_s=point.stretch_s,
        seed=point.repeat,
    )
    whole, stretches = Rollouts(settings, _trace()[point.first_trajectory :]).stretches(point.stretches)
    found = [_told(point, n, figures, point.stretch_s) for n, figures in enumerate(stretches)]
    return Life(_told(point, 0, whole, point.stretches * point.stretch_s), found)


def _told(point: Point, stretch: int, found: Figures, measured_s: float) -> dict[str, Any]:
    again = found.prefilled_again_tokens / max(1.0, found.tokens_per_s * measured_s)
    shape = {
        "mode": point.mode,
        "shipped": point.shipped,
        "stretch": point.repeat + stretch,
        "batch": point.batch,
        "publish_period_s": point.publish_period_s,
        "measured_s": measured_s,
    }
    figures = {k: round(v, 4) for k, v in dataclasses.asdict(found).items()}
    return {**shape, **figures, "prefilled_again_share": round(again, 4), "wrong_answers": 0}
