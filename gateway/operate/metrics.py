"""The table of the gateway's metrics, and what they are read from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

from msgspec import Meta
from opentelemetry.metrics import Meter

from gateway.core.fleet.state import EngineState
from gateway.experience import ExperienceBuffer
from gateway.experience.stores import DeliveryStatistics
from gateway.fleet.fleet import Fleet
from gateway.fleet.text_proxy import TextProxy, TextProxyStatistics
from gateway.runtime.counters import Counters
from gateway.sessions.trainer import Trainer
from gateway.sessions.turn_service import TurnService
from gateway.store import Database
from gateway.tasks import PromptPool
from protos.access.credentials import Credentials
from protos.telemetry.metrics import Callback, Metric, Value, add_instruments, one

STALENESS_MAX = 8
"""Of the label `behind`: what is staler has this value, too, so that its values are few."""
RELAYED_TEXT = "--relay-text"
CREDENTIALS = "--credentials"
SHARED_EXPERIENCE = "--experience-store with an address"


@dataclass(frozen=True, slots=True)
class Sources:
    """What the metrics are read from. `text_proxy`: None without `--relay-text`."""

    fleet: Fleet
    sessions: TurnService
    buffer: ExperienceBuffer
    database: Database
    tasks: PromptPool
    trainer: Trainer
    text_proxy: TextProxy | None


Read = Callable[[Sources], Iterable[Value]]


def _per_engine(read: Callable[[EngineState], float]) -> Read:
    return lambda sources: [(read(engine), (engine.name,)) for engine in sources.fleet.state.sorted_engines()]


def _behind(histogram: Mapping[int, int], *labels: str) -> Iterable[Value]:
    """The counts of a histogram by staleness, each with `labels` before its own."""
    for behind in range(STALENESS_MAX):
        yield histogram.get(behind, 0), (*labels, str(behind))
    yield sum(n for behind, n in histogram.items() if behind >= STALENESS_MAX), (*labels, str(STALENESS_MAX))


def _text(read: Callable[[TextProxyStatistics], float]) -> Read:
    return lambda sources: [] if sources.text_proxy is None else [(read(sources.text_proxy.statistics()), ())]


def _delivery(read: Callable[[DeliveryStatistics], float]) -> Read:
    def values(sources: Sources) -> Iterable[Value]:
        found = sources.buffer.delivery()
        return [] if found is None else [(read(found), ())]

    return values


def _evicted(sources: Sources) -> Iterable[Value]:
    found = sources.buffer.statistics()
    return [
        (found.evicted_stale, ("stale",)),
        (found.evicted_for_room, ("room",)),
        (found.evicted_equal, ("equal_rewards",)),
        (found.evicted_by_readers, ("trainer",)),
    ]


def _credentials(read: Callable[[Credentials], float]) -> Read:
    def values(sources: Sources) -> Iterable[Value]:
        credentials = sources.fleet.relays.credentials
        return [] if credentials is None else [(read(credentials), ())]

    return values


def _counters() -> Iterable[Metric[Sources]]:
    """Those of `Counters`, with its descriptions as their help."""
    units = {"trajectories": "sessions", "version": "pieces"}  # the first counts a session with several leaves once
    for name, hint in get_type_hints(Counters, include_extras=True).items():
        if get_origin(hint) is Annotated and get_args(hint)[0] is int:
            (text,) = (note.description for note in get_args(hint) if isinstance(note, Meta) and note.description)
            first = name.partition("_")[0]  # of what it counts: turns_cut, moves
            yield Metric("counter", f"laminar_gateway_{name}", units.get(first, first), text, _counter(name))


def _counter(name: str) -> Read:
    return one(lambda sources: getattr(sources.sessions.counters, name))


METRICS: Sequence[Metric[Sources]] = (
    *_counters(),
    Metric(
        "counter",
        "laminar_gateway_cuts",
        "cuts",
        "Cuts of turns' streams, by what the stream did.",
        lambda sources: [(n, (reason,)) for reason, n in sorted(sources.sessions.counters.cuts_by_reason.items())],
        labels=("reason",),
    ),
    Metric(
        "gauge",
        "laminar_gateway_queued_turns",
        "turns",
        "Turns that wait for an engine now.",
        one(lambda sources: sources.fleet.statistics().queued),
    ),
    Metric(
        "gauge",
        "laminar_gateway_buffered_trajectories",
        "sessions",
        "Finished sessions whose trajectories wait for a trainer now; those under a lease are not counted.",
        one(lambda sources: sources.buffer.statistics().trajectories),
    ),
    Metric(
        "gauge",
        "laminar_gateway_leased_trajectories",
        "sessions",
        "Finished sessions whose trajectories a trainer has under a lease now.",
        one(lambda sources: sources.buffer.statistics().leased),
    ),
    Metric(
        "counter",
        "laminar_gateway_trajectories_sampled",
        "sessions",
        "Finished sessions whose trajectories trainers got; what comes back unused counts again when it is sampled.",
        one(lambda sources: sources.buffer.statistics().sampled),
    ),
    Metric(
        "counter",
        "laminar_gateway_trajectories_acknowledged",
        "sessions",
        "Finished sessions whose trajectories trainers have used.",
        one(lambda sources: sources.buffer.statistics().acked),
    ),
    Metric(
        "counter",
        "laminar_gateway_trajectories_evicted",
        "sessions",
        "Finished sessions whose trajectories were removed unused: too stale, for room, of a group with equal rewards, "
        "or by a trainer.",
        _evicted,
        labels=("reason",),
    ),
    Metric(
        "counter",
        "laminar_gateway_trajectories_by_staleness",
        "sessions",
        "Finished sessions by how many versions the oldest token was behind the newest version at the finish, and "
        f"behind the trainer's when sampled (use); {STALENESS_MAX}: so many or more.",
        lambda sources: [
            *_behind(sources.trainer.staleness.finish, "finish"),
            *_behind(sources.trainer.staleness.use, "use"),
        ],
        labels=("at", "behind"),
    ),
    Metric(
        "counter",
        "laminar_gateway_tokens_by_staleness",
        "tokens",
        "Tokens of completed turns by how many versions behind the newest they were sampled; "
        f"{STALENESS_MAX}: so many or more.",
        lambda sources: _behind(sources.trainer.staleness.generation),
        labels=("behind",),
    ),
    Metric(
        "gauge",
        "laminar_gateway_store_failed",
        "1 or 0",
        "1 while the gateway's database cannot be written; no turn begins then.",
        one(lambda sources: bool(sources.database.failure)),
    ),
    Metric(
        "gauge",
        "laminar_gateway_newest_version",
        "version",
        "The newest weight version that the gateway knows of.",
        one(lambda sources: sources.fleet.state.newest),
    ),
    Metric(
        "gauge",
        "laminar_gateway_engine_version",
        "version",
        "The weight version that the engine computes with; 0 is what it was started with.",
        _per_engine(lambda engine: engine.version),
        labels=("engine",),
    ),
    Metric(
        "gauge",
        "laminar_gateway_engine_running",
        "turns",
        "Turns that run on the engine now, by the gateway's count.",
        _per_engine(lambda engine: len(engine.turns)),
        labels=("engine",),
    ),
    Metric(
        "gauge",
        "laminar_gateway_engine_kv_usage",
        "share, 0 to 1",
        "Share of the engine's KV cache in use, as the engine reports it.",
        _per_engine(lambda engine: engine.kv_usage),
        labels=("engine",),
    ),
    Metric(
        "gauge",
        "laminar_gateway_engine_serving",
        "1 or 0",
        "1 while the engine takes turns; 0 while it joins, loads a version, is suspected, fenced or dead.",
        _per_engine(lambda engine: engine.takes_turns),
        labels=("engine",),
    ),
    Metric(
        "counter",
        "laminar_gateway_refreshes",
        "loads",
        "Loads of a weight version into an engine that succeeded.",
        one(lambda sources: sources.fleet.statistics().refreshes),
    ),
    Metric(
        "counter",
        "laminar_gateway_refresh_failures",
        "loads",
        "Loads of a weight version into an engine that failed.",
        one(lambda sources: sources.fleet.statistics().refresh_failures),
    ),
    Metric(
        "counter",
        "laminar_gateway_refreshes_unchanged",
        "loads",
        "Loads of another version after which the engine computed exactly what it did before.",
        one(lambda sources: sources.fleet.statistics().refreshes_unchanged),
    ),
    Metric(
        "gauge",
        "laminar_gateway_tasks",
        "tasks",
        "Tasks in all prompt pools now.",
        one(lambda sources: sources.tasks.statistics().tasks),
    ),
    Metric(
        "gauge",
        "laminar_gateway_task_leases",
        "leases",
        "Samples of tasks that runners have under a lease now.",
        one(lambda sources: sources.tasks.statistics().leases),
    ),
    Metric(
        "counter",
        "laminar_gateway_tasks_leased",
        "samples",
        "Samples of tasks that runners got.",
        one(lambda sources: sources.tasks.statistics().leased),
    ),
    Metric(
        "counter",
        "laminar_gateway_tasks_finished",
        "samples",
        "Samples of tasks that runners finished with a reward.",
        one(lambda sources: sources.tasks.statistics().finished),
    ),
    Metric(
        "counter",
        "laminar_gateway_tasks_failed",
        "samples",
        "Samples of tasks that failed at their runners; each is leased again until its attempts are used up.",
        one(lambda sources: sources.tasks.statistics().failed),
    ),
    Metric(
        "counter",
        "laminar_gateway_tasks_released",
        "samples",
        "Samples of tasks that runners gave back.",
        one(lambda sources: sources.tasks.statistics().released),
    ),
    Metric(
        "counter",
        "laminar_gateway_tasks_expired",
        "leases",
        "Leases of tasks that ended by time: their runners died, or were too slow.",
        one(lambda sources: sources.tasks.statistics().expired),
    ),
    Metric(
        "counter",
        "laminar_gateway_tasks_given_up",
        "samples",
        "Samples of tasks that were given up, because they failed too often.",
        one(lambda sources: sources.tasks.statistics().given_up),
    ),
    Metric(
        "gauge",
        "laminar_gateway_text_running",
        "requests",
        "Requests that engines answer as text now.",
        _text(lambda found: found.running),
        needs=RELAYED_TEXT,
    ),
    Metric(
        "counter",
        "laminar_gateway_text_relayed",
        "requests",
        "Requests of which an engine's response as text began.",
        _text(lambda found: found.relayed),
        needs=RELAYED_TEXT,
    ),
    Metric(
        "counter",
        "laminar_gateway_text_retried",
        "tries",
        "Requests of text that went to another engine, since one failed before its first byte.",
        _text(lambda found: found.retried),
        needs=RELAYED_TEXT,
    ),
    Metric(
        "counter",
        "laminar_gateway_text_failed",
        "requests",
        "Requests of text that no engine answered, or whose response broke off.",
        _text(lambda found: found.failed),
        needs=RELAYED_TEXT,
    ),
    Metric(
        "gauge",
        "laminar_gateway_shared_experience_failed",
        "1 or 0",
        "1 while the shared store takes nothing.",
        _delivery(lambda found: bool(found.failure)),
        needs=SHARED_EXPERIENCE,
    ),
    Metric(
        "gauge",
        "laminar_gateway_shared_experience_waiting",
        "rows",
        "Rows, such as finished sessions, that are committed at this gateway and are not in the shared store yet.",
        _delivery(lambda found: found.waiting),
        needs=SHARED_EXPERIENCE,
    ),
    Metric(
        "gauge",
        "laminar_gateway_shared_experience_waiting_bytes",
        "bytes",
        "Size of the rows that wait for the shared store.",
        _delivery(lambda found: found.waiting_bytes),
        needs=SHARED_EXPERIENCE,
    ),
    Metric(
        "counter",
        "laminar_gateway_shared_experience_delivered",
        "sessions",
        "Finished sessions that reached the shared store.",
        _delivery(lambda found: found.delivered),
        needs=SHARED_EXPERIENCE,
    ),
    Metric(
        "counter",
        "laminar_gateway_shared_experience_failed_calls",
        "calls",
        "Calls of the shared store that did not get through.",
        _delivery(lambda found: found.failed_calls),
        needs=SHARED_EXPERIENCE,
    ),
    Metric(
        "gauge",
        "laminar_gateway_certificate_expiry_seconds",
        "seconds",
        "Time until the certificate expires with which the gateway calls relays.",
        _credentials(lambda found: found.material.expires_unix_s - time.time()),
        needs=CREDENTIALS,
    ),
    Metric(
        "gauge",
        "laminar_gateway_credentials_failed",
        "1 or 0",
        "1 while the files of --credentials cannot be used as they are, and those before them still are.",
        _credentials(lambda found: bool(found.failure)),
        needs=CREDENTIALS,
    ),
)


def add_metrics(
    meter: Meter, sources: Sources, within: Callable[[Callback], Callback] = lambda callback: callback
) -> None:
    """Adds an instrument for each metric that a gateway with these sources has; `within`: see `add_instruments`."""
    lacking = {
        RELAYED_TEXT: sources.text_proxy is None,
        SHARED_EXPERIENCE: sources.buffer.delivery() is None,
        CREDENTIALS: sources.fleet.relays.credentials is None,
    }
    add_instruments(meter, [metric for metric in METRICS if not lacking.get(metric.needs, False)], sources, within)
