"""The gateway's configuration: one frozen value per process, resolved once by the command line.

Each field is an option of `gateway serve`, made by `protos.options` from its annotation and default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, get_args

import click
from msgspec import Meta

from gateway.core.addresses import StoreAddress
from gateway.core.fleet.config import FleetConfig
from gateway.core.networks import Networks
from gateway.core.placing.text_requests import TextApi
from gateway.core.types import InText, LogprobsKind
from protos.access.credentials import CREDENTIALS_VARIABLE
from protos.access.etcd import EtcdAccess
from protos.access.listening import INSECURE
from protos.access.unix_socket import socket_path
from protos.engines import ENGINE_KINDS, URL_NAME, base_url_hint, check_kind, check_relay, is_address, is_host_port
from protos.errors import InvalidRequest
from protos.options import DIRECTORY, PORT, Flag, HostPort, Name, Size
from protos.telemetry.options import TelemetryConfig

INTERVAL = Meta(ge=0.01)
"""Seconds between polls of engines, and between plans; shorter ones would leave time for nothing else."""

TEXT_LIMITS = "".join(
    f" Engines of kind {name} take {'only ' + routes[0] if routes else 'none'}."
    for name, kind in ENGINE_KINDS.items()
    if len(routes := list(kind.text_routes.values())) < len(get_args(TextApi))
)
"""A sentence for each kind of engine that does not take every call as text."""


class NetworkList(click.ParamType[Networks]):
    """CIDR networks, separated by commas."""

    name = "cidr,..."

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> Networks:
        try:
            return value if isinstance(value, Networks) else Networks.parse(str(value))
        except InvalidRequest as error:
            self.fail(str(error), param, context)


class ListenAddress(click.ParamType[str]):
    """HOST:PORT, with 0 for any free port, or the path of a unix socket."""

    name = "host:port|unix:path"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        host, _, port = str(value).rpartition(":")
        if socket_path(str(value)) in (None, Path()) and not (host and port == "0") and not is_host_port(str(value)):
            self.fail(f"{value!r} is neither HOST:PORT, like 127.0.0.1:8081, nor unix:PATH", param, context)
        return str(value)


class PublicUrl(click.ParamType[str]):
    """The address of a server of HTTP, without a `/` at its end."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        url = str(value)
        if not is_address(url) or "@" in url:
            self.fail(f"{url!r} is no address, like https://rollouts.example.org", param, context)
        if hint := base_url_hint(url):
            self.fail(f"{url!r}: give it {hint}", param, context)
        return url.rstrip("/")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where an engine is, and the relay on its host (None: its weights are not refreshed)."""

    name: str
    kind: str
    url: str
    relay: str | None

    @property
    def loads(self) -> bool:
        """Whether engines of its kind take published versions at all."""
        return ENGINE_KINDS[self.kind].loads


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The options of `gateway serve`, in the order of its help. Times in seconds, sizes in bytes."""

    model: Annotated[str, Name(), "Name of the served model, the same at engines and relays."]
    tokenizer: Annotated[
        Path,
        click.Path(exists=True, file_okay=False, path_type=Path),
        "Directory with tokenizer.json and the chat template.",
    ]
    special_tokens_in_text: Annotated[
        InText,
        "What becomes of a special token that stands as text in a chat's message or tools, such as <|im_end|> in a web "
        "page. control: the token, as in vLLM and SGLang, so that its author can end the turn and begin another; "
        "refuse: the request is refused; text: the ordinary tokens of its characters.",
    ] = "control"
    engines: Annotated[
        tuple[EngineSpec, ...],
        Flag("--engine", metavar="NAME=KIND=URL[@RELAY]"),
        f"An engine; repeat the option for each one. KIND: {', '.join(ENGINE_KINDS)}.",
    ] = ()
    etcd: Annotated[str | None, HostPort(), "Where relays register engines (`paramserver serve --engine`)."] = None
    etcd_access: EtcdAccess = field(default_factory=EtcdAccess)
    relay: Annotated[str | None, HostPort(), "Relay from which engines without a relay of their own load versions."] = (
        None
    )
    data: Annotated[
        Path | None,
        DIRECTORY,
        "Where to keep sessions and trajectories for the next start. Without it they are in memory, and lost at exit.",
    ] = None
    experience_store: Annotated[
        str | StoreAddress,  # a name in `gateway.experience.stores`, which the command line knows
        "Where finished trajectories wait for the trainer. An address: in a store for all gateways that name it; its "
        "password may stand in LAMINAR_REDIS_PASSWORD or LAMINAR_POSTGRES_PASSWORD. Of several hosts, separated by "
        "commas, the one that takes writes.",
    ] = "database"
    redis_namespace: Annotated[
        str, Name(), "What this run has in a shared store: gateways with the same one share experience."
    ] = "default"
    redis_unchecked: Annotated[
        bool,
        "Accept a Redis that forbids CONFIG GET: whether it loses what it acknowledged cannot be checked there.",
    ] = False
    experience_max: Annotated[
        int,
        Meta(ge=1),
        "Finished trajectories (sessions) that wait at once; beyond, too stale and old ones are evicted.",
    ] = 65_536
    experience_bytes_max: Annotated[
        int,
        Size(),
        "Packed size of finished trajectories that wait, together; beyond, too stale and old ones are evicted.",
    ] = 32 << 30
    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, PORT, "Port to listen on; 0: any free one."] = 8080
    api_keys: Annotated[
        Path | None,
        click.Path(dir_okay=False, path_type=Path),
        Flag(envvar="LAMINAR_API_KEYS", show_envvar=True),
        "Access control: a file with a line ROLE NAME KEY for each key (`gateway keys new` makes one). It is read "
        "again when it changes.",
    ] = None
    credentials: Annotated[
        Path | None,
        DIRECTORY,
        Flag(envvar=CREDENTIALS_VARIABLE, show_envvar=True),
        "The gateway's credentials at relays that ask for them (`paramserver credentials` makes them).",
    ] = None
    insecure: Annotated[bool, INSECURE] = False
    agents_may_reward: Annotated[
        bool, "With --api-keys: a session's own key may finish, reward and abandon it, as its finish key may."
    ] = False
    admin_listen: Annotated[
        str | None,
        ListenAddress(),
        Flag(show_default="with API keys: a free port of 127.0.0.1; else the port of all other routes"),
        "Where routes that change the fleet are answered, and nowhere else then: adding and removing engines, and "
        "repacking. A unix socket takes no keys: the mode of its file, and the user of the client, decide.",
    ] = None
    admin_group: Annotated[
        str | None, Name(), "A group whose users may use the unix socket of --admin-listen, too; else only its owner."
    ] = None
    public_url: Annotated[
        str | None,
        PublicUrl(),
        Flag(show_default="the address to which each client sent its request"),
        "Where clients reach the gateway, when a proxy stands before it: the `base_url` of sessions begins with it.",
    ] = None
    engine_networks: Annotated[
        Networks | None,
        NetworkList(),
        Flag(show_default="loopback and private networks where --host is loopback, or with --insecure; else none"),
        "Networks where POST /admin/engines takes engines and relays, besides the hosts that --engine, --relay and "
        "registrations in etcd name.",
    ] = None
    fleet: FleetConfig = field(default_factory=FleetConfig)
    planner: Annotated[
        str,  # a name in `gateway.core.packing.planners`, which the command line knows
        "priced: an engine's turns move where others have room for all of them, and where that gains more than it "
        "costs; unpriced: wherever others have room, as in the Laminar paper.",
    ] = "priced"
    repack_interval_s: Annotated[float, INTERVAL, "Time between two plans for packing turns."] = 5.0
    prefill_tokens_per_s: Annotated[float, Meta(gt=0), "Prefill speed of an engine: the planner's price of a move."] = (
        1000.0
    )
    poll_interval_s: Annotated[float, INTERVAL, "Time between two requests for an engine's health and metrics."] = 1.0
    dead_after_polls: Annotated[
        int, Meta(ge=1), "Polls of an engine that fail in a row before its turns go on elsewhere."
    ] = 3
    stall_timeout_s: Annotated[
        float, Meta(gt=0), "Silence of an engine after which it has lost a turn, which then continues elsewhere."
    ] = 60.0
    placement_timeout_s: Annotated[
        float, Meta(ge=0), "How long a turn that an engine lost waits for another engine before it fails."
    ] = 120.0
    disconnect_grace_s: Annotated[float, Meta(ge=0), "How long a turn continues after its client disconnected."] = 5.0
    recovery_grace_s: Annotated[float, Meta(ge=0), "How long a turn that a restart resumed waits for its client."] = (
        60.0
    )
    idempotency_window_s: Annotated[
        float, Meta(ge=0), "How long the answer of a turn is kept for a client that sends the request again."
    ] = 600.0
    queue_timeout_s: Annotated[float, Meta(ge=0), "How long a turn waits for an engine before it gets 429."] = 60.0
    tokens_per_event: Annotated[
        int | None,
        Meta(ge=1),
        Flag(show_default="1 to 48, by the turns' number, speed and clients"),
        "Tokens that an engine sends in one event.",
    ] = None
    queue_max: Annotated[int, Meta(ge=1), "Turns that may wait for an engine at once; further ones get 429."] = 1024
    session_idle_s: Annotated[float, Meta(ge=0), "Time without a request after which a session is abandoned."] = 1800.0
    idle_after_s: Annotated[
        float,
        Meta(ge=0),
        "Time without a running turn after which a session keeps no other from beginning, unless a runner has the "
        "lease of its sample.",
    ] = 60.0
    reward_window_s: Annotated[
        float, Meta(ge=0), "How long after a session's finish its reward may be given or changed."
    ] = 600.0
    sessions_max: Annotated[int, Meta(ge=1), "Live sessions at once; further ones get 429."] = 100_000
    body_bytes_max: Annotated[int, Size(), "Largest body of a request; a larger one gets 413."] = 32 << 20
    bodies_bytes_max: Annotated[
        int,
        Size(),
        "Bodies that come in at once, together, by their declared sizes; a further one gets 429. A body without one "
        "counts as --body-bytes-max.",
    ] = 1 << 30
    connections_max: Annotated[
        int, Meta(ge=1), "Connections of clients at once; further ones get 429, unless one that has no key makes way."
    ] = 16_384
    connections_per_address: Annotated[
        int,
        Meta(ge=1),
        "Connections of one client's address at once, or of one /64 network of IPv6; those of this host, where a proxy "
        "may run, are not counted.",
    ] = 4096
    sessions_per_key: Annotated[
        int | None,
        Meta(ge=1),
        Flag(show_default="any number, up to --sessions-max"),
        "Live sessions that API keys of one name may have made; further ones get 429.",
    ] = None
    turns_per_key: Annotated[
        int | None,
        Meta(ge=1),
        Flag(show_default="any number"),
        "Turns, running and queued, in sessions that API keys of one name have made; further ones get 429.",
    ] = None
    logprobs_kind: Annotated[
        LogprobsKind,
        "Which logprobs the engines report: vLLM's are raw unless it runs with --logprobs-mode processed_logprobs.",
    ] = "processed"
    penalties_move: Annotated[
        bool,
        "Turns with penalties may move to another engine, which counts tokens anew: their distribution changes.",
    ] = False
    session_from_user: Annotated[
        bool,
        "OpenAI's body field `user` names the session of a call that nothing else names. Switch it off for clients "
        "that always send one: all calls of a user would be one session.",
    ] = True
    relay_text: Annotated[
        bool,
        "Forward calls that name no session and request no token ids to an engine's own text API, unchanged: "
        "many times cheaper. These calls have no record, token ids or versions of spans; a call that breaks off is not "
        f"resumed; retries are not joined; the engine alone checks the fields.{TEXT_LIMITS}",
    ] = False
    probe: Annotated[
        bool,
        "Request one token of each engine before and after a load, to verify that it computes with the new weights.",
    ] = True
    seed: Annotated[int, "Seed of the planner's random choice between equal plans."] = 0
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


def parse_engine(text: str) -> EngineSpec:
    """`NAME=KIND=URL[@RELAY]`, as `--engine` takes it. Raises InvalidRequest naming what is wrong."""
    name, _, rest = text.partition("=")
    kind, _, address = rest.partition("=")
    url, _, relay = address.partition("@")
    if not (re.fullmatch(URL_NAME, name) and kind and is_address(url) and (not relay or is_host_port(relay))):
        raise InvalidRequest(
            f"--engine {text!r} is not NAME=KIND=URL[@RELAY]",
            hint="such as e0=vllm=http://127.0.0.1:8000@127.0.0.1:7070",
        )
    if hint := base_url_hint(url):
        raise InvalidRequest(f"--engine {text!r}: not the engine's own address", hint=hint)
    check_kind(kind, f"--engine {text!r}")
    check_relay(kind, relay, f"--engine {text!r}")
    return EngineSpec(name, kind, url, relay or None)
