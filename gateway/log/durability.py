"""What a Redis has to be set to, so that what it acknowledged survives its own death. Pure.

Redis acknowledges a write before it is on disk unless `appendfsync` is `always`, keeps nothing without `appendonly`,
and deletes what it was given for room unless `maxmemory-policy` is `noeviction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Setting:
    """`field`, `values`: where INFO shows it, and how; none for what only CONFIG GET shows."""

    name: str
    wanted: str
    why: str
    field: str = ""
    values: Mapping[str, str] | None = None


SETTINGS = (
    Setting(
        "appendonly",
        "yes",
        "without it a restart loses trajectories that were reported as kept",
        "aof_enabled",
        {"0": "no", "1": "yes"},
    ),
    Setting("appendfsync", "always", "otherwise a power cut loses what was acknowledged last"),
    Setting("maxmemory-policy", "noeviction", "otherwise Redis deletes keys for room", "maxmemory_policy"),
)


def found_in_info(info: Mapping[str, object]) -> dict[str, str]:
    """The settings that INFO shows, by name."""
    found: dict[str, str] = {}
    for setting in SETTINGS:
        if setting.field and setting.field in info:
            value = str(info[setting.field])
            found[setting.name] = (setting.values or {}).get(value, value)
    return found


def check_settings(where: str, found: Mapping[str, str], *, accept_unchecked: bool, forbidden: str = "") -> list[str]:
    """The names of those that cannot be checked, and are accepted.

    Raises InvalidRequest for a setting that has another value, whatever is accepted, and for those that `found` lacks
    unless `accept_unchecked`. `forbidden`: what Redis answered to CONFIG GET.
    """
    for setting in SETTINGS:
        value = found.get(setting.name, setting.wanted)
        if value != setting.wanted:
            raise InvalidRequest(
                f"{where}: `{setting.name}` is `{value}` and has to be `{setting.wanted}`: {setting.why}",
                hint=f"write `{setting.name} {setting.wanted}` into its redis.conf and restart it, "
                f"or `redis-cli config set {setting.name} {setting.wanted}` and `redis-cli config rewrite`",
            )
    unchecked = [setting for setting in SETTINGS if setting.name not in found]
    if unchecked and not accept_unchecked:
        names = ", ".join(f"`{setting.name}`" for setting in unchecked)
        wanted = "; ".join(f"{setting.name} {setting.wanted}" for setting in unchecked)
        raise InvalidRequest(
            f"{where}: cannot check {names}: CONFIG GET is refused ({forbidden})",
            hint=f"have its operator confirm `{wanted}`, and start with --redis-unchecked",
        )
    return [setting.name for setting in unchecked]


def check_role(where: str, info: Mapping[str, object]) -> None:
    """Raises InvalidRequest for a replica, and for a node of a cluster."""
    if str(info.get("role", "master")) != "master":
        raise InvalidRequest(f"{where} is a replica, which takes no writes", hint="give the address of its primary")
    if str(info.get("cluster_enabled", "0")) != "0":
        raise InvalidRequest(
            f"{where} runs in cluster mode, where the keys of one script are on several nodes",
            hint="give a Redis of its own, with `cluster-enabled no`",
        )
