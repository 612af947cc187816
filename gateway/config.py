"""The gateway's configuration: one frozen value per process, resolved once by the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gateway.core.fleet import FleetConfig
from gateway.core.types import LogprobsKind
from protos.engines import base_url_hint, check_kind, is_address, is_host_port
from protos.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where an engine is, and the relay on its host (None: its weights are not refreshed)."""

    name: str
    kind: str
    url: str
    relay: str | None


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    model: str
    tokenizer: Path
    data: Path | None  # None: in memory, gone with the process
    engines: tuple[EngineSpec, ...]
    etcd: str | None = None  # where relays register the engines beside them; None: nobody is looked for
    fleet: FleetConfig = field(default_factory=FleetConfig)
    host: str = "127.0.0.1"
    port: int = 0
    repack_interval_s: float = 5.0
    poll_interval_s: float = 1.0
    dead_after_polls: int = 3
    stall_timeout_s: float = 60.0
    logprobs_kind: LogprobsKind = "processed"
    penalties_move: bool = False  # a turn with penalties may go on elsewhere, where they start to count anew
    placement_timeout_s: float = 120.0  # a turn that was cut waits so long for an engine before it is lost
    disconnect_grace_s: float = 5.0  # a turn whose client left goes on so long before it is aborted
    recovery_grace_s: float = 60.0  # a turn that outlived the gateway waits so long for its client
    idempotency_window_s: float = 600.0  # a turn that is over can be asked for again so long
    queue_timeout_s: float = 60.0  # a new session waits so long for an intake before 429
    tokens_per_event: int | None = None  # that engines gather; None: by how many turns run, and how fast
    queue_max: int = 1024  # turns that wait for an engine at once
    session_idle_s: float = 1800.0
    reward_window_s: float = 600.0  # rewards may come, or change, so long after a session's finish
    sessions_max: int = 100_000
    body_bytes_max: int = 64 << 20
    prefill_tokens_per_s: float = 1000.0
    session_from_user: bool = True  # the body's `user` names a session, where nothing else does
    relay_text: bool = False  # calls without a session that ask for no tokens go to engines as they are
    seed: int = 0
    probe: bool = True  # one token is asked of an engine before and after a load: whether it computes otherwise


def parse_engine(text: str, default_relay: str | None) -> EngineSpec:
    """`NAME=KIND=URL[@RELAY]`, as `--engine` takes it. Raises InvalidRequest naming what is wrong."""
    name, _, rest = text.partition("=")
    kind, _, address = rest.partition("=")
    url, _, relay = address.partition("@")
    if not (name and kind and is_address(url) and (not relay or is_host_port(relay))):
        raise InvalidRequest(
            f"--engine {text!r} is not NAME=KIND=URL[@RELAY]",
            hint="such as e0=vllm=http://127.0.0.1:8000@127.0.0.1:7070",
        )
    if hint := base_url_hint(url):
        raise InvalidRequest(f"--engine {text!r}: not the engine's own address", hint=hint)
    check_kind(kind, f"--engine {text!r}")
    return EngineSpec(name, kind, url, relay or default_relay)
