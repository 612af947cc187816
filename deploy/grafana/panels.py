"""What the dashboards show: each panel's title, unit, expressions with their legends, and an explanation.

`RATE` is the interval that Grafana chooses for a rate. `GATEWAY` and `RELAY` select the instances that a reader picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RATE = "[$__rate_interval]"
GATEWAY = '{job="laminar-gateway", instance=~"$instance"}'
RELAY = '{job="laminar-relay", instance=~"$instance"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit`: Grafana's id of it. `queries`: expression and legend. `stat`: one number instead of a curve."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    about: str
    stat: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`uid` is its name in URLs. `instances`: the metric whose instances the reader picks from."""

    uid: str
    title: str
    instances: str
    panels: Sequence[Panel]


def gateway(metric: str, *, rate: bool = False, by: str = "instance") -> str:
    """The sum of one of the gateway's metrics, `laminar_gateway_` left out."""
    return _sum(f"laminar_gateway_{metric}{GATEWAY}", rate, by)


def relay(metric: str, *, rate: bool = False, by: str = "instance") -> str:
    return _sum(f"laminar_relay_{metric}{RELAY}", rate, by)


def staleness(at: str, range_: str, *conditions: str) -> str:
    """The rate of trajectories by staleness at their finish, or at use."""
    selected = ", ".join([GATEWAY.strip("{}"), f'at="{at}"', *conditions])
    return f"rate(laminar_gateway_trajectories_by_staleness_total{{{selected}}}{range_})"


def _sum(series: str, rate: bool, by: str) -> str:
    return f"sum by ({by}) (rate({series}{RATE}))" if rate else f"sum by ({by}) ({series})"


FLEET = Dashboard(
    "laminar-fleet",
    "Laminar: gateway and engines",
    "laminar_gateway_queued_turns",
    (
        Panel(
            "Engines that serve",
            "none",
            [(f"sum(laminar_gateway_engine_serving{GATEWAY})", "serving")],
            "An engine that loads a version, is fenced or dead does not serve.",
            stat=True,
        ),
        Panel(
            "Turns that run",
            "none",
            [(f"sum(laminar_gateway_engine_running{GATEWAY})", "running")],
            "By the gateway's count.",
            stat=True,
        ),
        Panel(
            "Turns that wait",
            "none",
            [(f"sum(laminar_gateway_queued_turns{GATEWAY})", "waiting")],
            "For an engine. `gateway status` counts the reasons; LaminarTurnsWait after ten minutes.",
            stat=True,
        ),
        Panel(
            "Newest version",
            "none",
            [(f"max(laminar_gateway_newest_version{GATEWAY})", "version")],
            "That a gateway knows of.",
            stat=True,
        ),
        Panel(
            "Tokens sampled",
            "tokens/s",
            [(gateway("tokens_generated_total", rate=True), "{{instance}}")],
            "For recorded turns; calls that are forwarded as text are not counted.",
        ),
        Panel(
            "Turns",
            "turns/s",
            [
                (gateway("turns_started_total", rate=True), "begun, {{instance}}"),
                (gateway("turns_completed_total", rate=True), "completed, {{instance}}"),
            ],
            "Begun without completed: they wait, or are long.",
        ),
        Panel(
            "Turns on each engine",
            "none",
            [(gateway("engine_running", by="engine"), "{{engine}}")],
            "The long tail shows as few turns on many engines; a repack gathers them.",
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            [(f"max by (engine) (laminar_gateway_engine_kv_usage{GATEWAY})", "{{engine}}")],
            "As engines report it. Near --kv-max an engine gets no further turn.",
        ),
        Panel(
            "Version of each engine",
            "none",
            [
                (f"max by (engine) (laminar_gateway_engine_version{GATEWAY})", "{{engine}}"),
                (f"max(laminar_gateway_newest_version{GATEWAY})", "newest"),
            ],
            "0 is what an engine was started with.",
        ),
        Panel(
            "Loads",
            "loads/s",
            [
                (gateway("refreshes_total", rate=True), "loaded, {{instance}}"),
                (gateway("refresh_failures_total", rate=True), "failed, {{instance}}"),
                (gateway("refreshes_unchanged_total", rate=True), "changed nothing, {{instance}}"),
            ],
            "Of versions into engines. Failures: LaminarLoadsFail.",
        ),
        Panel(
            "Cuts of streams",
            "cuts/s",
            [(gateway("cuts_total", rate=True, by="reason"), "{{reason}}")],
            "By what the stream did. Each costs a prefill elsewhere; moves are no cuts.",
        ),
        Panel(
            "Moves and repacks",
            "moves/s",
            [
                (gateway("moves_total", rate=True), "moves, {{instance}}"),
                (gateway("repacks_total", rate=True), "plans, {{instance}}"),
            ],
            "Moves empty whole engines, so that they load a newer version.",
        ),
        Panel(
            "Ends that are not answers",
            "turns/s",
            [
                (gateway("turns_lost_total", rate=True), "lost, {{instance}}"),
                (gateway("turns_aborted_total", rate=True), "aborted, {{instance}}"),
                (gateway("turns_orphaned_total", rate=True), "lost their client, {{instance}}"),
            ],
            "Lost turns had an error; aborted ones nobody waits for.",
        ),
        Panel(
            "Calls that are forwarded as text",
            "calls/s",
            [
                (gateway("text_relayed_total", rate=True), "answered, {{instance}}"),
                (gateway("text_retried_total", rate=True), "sent to another engine, {{instance}}"),
                (gateway("text_failed_total", rate=True), "failed, {{instance}}"),
            ],
            "With --relay-text.",
        ),
        Panel(
            "Processor",
            "percentunit",
            [(f"rate(process_cpu_seconds_total{GATEWAY}{RATE})", "{{instance}}")],
            "One gateway uses one core: near 100 % its streams are late.",
        ),
        Panel(
            "Memory",
            "bytes",
            [(f"process_resident_memory_bytes{GATEWAY}", "{{instance}}")],
            "Resident.",
        ),
    ),
)
RELAYS = Dashboard(
    "laminar-relays",
    "Laminar: relays and versions",
    "laminar_relay_registry_reachable",
    (
        Panel(
            "Relays that reach etcd",
            "none",
            [(f"sum(laminar_relay_registry_reachable{RELAY})", "relays")],
            "Without etcd nothing is sealed.",
            stat=True,
        ),
        Panel(
            "Newest version",
            "none",
            [(f"max by (model) (laminar_relay_newest_version{RELAY})", "{{model}}")],
            "That any relay holds complete.",
            stat=True,
        ),
        Panel(
            "Age of the newest version",
            "s",
            [(f"min by (model) (laminar_relay_newest_version_age_seconds{RELAY})", "{{model}}")],
            "Since it was sealed. A saw: its teeth are the trainer's steps.",
            stat=True,
        ),
        Panel(
            "Seals in doubt",
            "none",
            [(f"sum(laminar_relay_commits_in_doubt{RELAY})", "versions")],
            "Sent to etcd and not answered yet; seconds at most.",
            stat=True,
        ),
        Panel(
            "Version at each relay",
            "none",
            [(f"max by (instance, model) (laminar_relay_newest_version{RELAY})", "{{instance}} {{model}}")],
            "The spread is how far the chain lags.",
        ),
        Panel(
            "Bytes sent",
            "Bps",
            [(relay("sent_bytes_total", rate=True), "{{instance}}")],
            "To other relays and to clients that pull.",
        ),
        Panel(
            "Versions that come in",
            "none",
            [(relay("transfers"), "{{instance}}")],
            "One that stands for half an hour: LaminarTransferStands.",
        ),
        Panel(
            "Pool",
            "percentunit",
            [
                (
                    f"(laminar_relay_pool_used_bytes{RELAY} + laminar_relay_pool_quarantined_bytes{RELAY}) "
                    f"/ laminar_relay_pool_bytes{RELAY}",
                    "{{instance}}",
                )
            ],
            "Used and quarantined, of --pool-bytes. A full one has no room for the next version.",
        ),
        Panel(
            "Memory in quarantine",
            "bytes",
            [(relay("pool_quarantined_bytes"), "{{instance}}")],
            "Of versions that retired while a process still maps them.",
        ),
        Panel("Pins", "none", [(relay("pins"), "{{instance}}")], "Of engines and gateways, on versions here."),
        Panel(
            "Versions that did not reach the disk",
            "none",
            [(relay("spill_failures"), "{{instance}}")],
            "With --spill, since the start.",
        ),
        Panel(
            "Processor",
            "percentunit",
            [(f"rate(process_cpu_seconds_total{RELAY}{RATE})", "{{instance}}")],
            "A hop copies and hashes: it is busy while a version passes.",
        ),
    ),
)
LEARNING = Dashboard(
    "laminar-learning",
    "Laminar: what the trainer gets",
    "laminar_gateway_queued_turns",
    (
        Panel(
            "Trajectories that wait",
            "none",
            [(f"sum(laminar_gateway_buffered_trajectories{GATEWAY})", "waiting")],
            "For a trainer. None for long: rollouts are slower than steps; ever more: the other way round.",
            stat=True,
        ),
        Panel(
            "Under a lease",
            "none",
            [(f"sum(laminar_gateway_leased_trajectories{GATEWAY})", "leased")],
            "Sampled, and not acknowledged yet.",
            stat=True,
        ),
        Panel(
            "Behind the trainer, when sampled",
            "percentunit",
            [
                (
                    "sum({}) / sum({})".format(staleness("use", "[1h]", 'behind!="0"'), staleness("use", "[1h]")),
                    "share that is behind",
                )
            ],
            "Share of the last hour's trajectories that began under an older version than the trainer's.",
            stat=True,
        ),
        Panel(
            "Tasks in the prompt pool",
            "none",
            [(f"sum(laminar_gateway_tasks{GATEWAY})", "tasks")],
            "Those with rounds to come, and drained ones that are not removed yet.",
            stat=True,
        ),
        Panel(
            "Sessions that ended",
            "sessions/s",
            [
                (gateway("trajectories_finished_total", rate=True), "with a reward, {{instance}}"),
                (gateway("sessions_abandoned_total", rate=True), "without, {{instance}}"),
            ],
            "Abandoned ones were computed for nothing: LaminarSessionsAbandoned.",
        ),
        Panel(
            "Trajectories that the trainer took",
            "sessions/s",
            [
                (gateway("trajectories_sampled_total", rate=True), "sampled, {{instance}}"),
                (gateway("trajectories_acknowledged_total", rate=True), "used, {{instance}}"),
            ],
            "Sampled and not used for long: the trainer died in its step, or does not acknowledge.",
        ),
        Panel(
            "Experience buffer",
            "none",
            [
                (gateway("buffered_trajectories"), "waiting, {{instance}}"),
                (gateway("leased_trajectories"), "leased, {{instance}}"),
            ],
            "Beyond --experience-max the oldest are evicted.",
        ),
        Panel(
            "Removed unused",
            "sessions/s",
            [(gateway("trajectories_evicted_total", rate=True, by="reason"), "{{reason}}")],
            "Too stale, for room, of groups with equal rewards, or by the trainer.",
        ),
        Panel(
            "Staleness at use",
            "sessions/s",
            [
                (
                    f"sum by (behind) ({staleness('use', RATE)})",
                    "{{behind}} behind",
                )
            ],
            "By how many versions the oldest token was behind the trainer's; 8: so many or more.",
        ),
        Panel(
            "Staleness at the finish",
            "sessions/s",
            [
                (
                    f"sum by (behind) ({staleness('finish', RATE)})",
                    "{{behind}} behind",
                )
            ],
            "Behind the newest version when the session ended: long sessions are staler.",
        ),
        Panel(
            "Staleness of tokens",
            "tokens/s",
            [(gateway("tokens_by_staleness_total", rate=True, by="behind"), "{{behind}} behind")],
            "When sampled. What is behind here is the price of engines that refresh in their own time.",
        ),
        Panel(
            "Turns of more than one version",
            "turns/s",
            [
                (gateway("turns_mixed_version_total", rate=True), "versions, {{instance}}"),
                (gateway("turns_mixed_dtype_total", rate=True), "number formats, {{instance}}"),
            ],
            "With --mode inflight the former is usual.",
        ),
        Panel(
            "Samples of the prompt pool",
            "samples/s",
            [
                (gateway("tasks_leased_total", rate=True), "leased, {{instance}}"),
                (gateway("tasks_finished_total", rate=True), "finished, {{instance}}"),
                (gateway("tasks_failed_total", rate=True), "failed, {{instance}}"),
                (gateway("tasks_expired_total", rate=True), "expired, {{instance}}"),
                (gateway("tasks_given_up_total", rate=True), "given up, {{instance}}"),
            ],
            "What runners lease, and what becomes of it.",
        ),
        Panel(
            "Samples at runners",
            "none",
            [(gateway("task_leases"), "{{instance}}")],
            "Under a lease now. Without change for long: LaminarRunnersGone.",
        ),
        Panel(
            "Shared Redis",
            "none",
            [
                (gateway("shared_experience_waiting"), "rows that wait for it, {{instance}}"),
                (gateway("shared_experience_failed"), "takes nothing, {{instance}}"),
            ],
            "With --experience-store redis://...",
        ),
        Panel(
            "Sent to the shared Redis",
            "sessions/s",
            [
                (gateway("shared_experience_delivered_total", rate=True), "delivered, {{instance}}"),
                (gateway("shared_experience_failed_calls_total", rate=True), "failed calls, {{instance}}"),
            ],
            "With --experience-store redis://...",
        ),
    ),
)

DASHBOARDS = (FLEET, RELAYS, LEARNING)
