"""`gateway doctor`: what a gateway with these options needs, looked at before it is started. Changes nothing.

The checks use the code that serves: the same adapters, the same reading of a tokenizer. So what passes here is what a
start finds. A gateway that runs already may be examined, too: only its port and its data are in use then.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import sqlite3
import time
from pathlib import Path

from gateway.config import EngineSpec, GatewayConfig
from gateway.core.addresses import StoreAddress
from gateway.core.fleet.labels import UNNAMED, is_version, version_of
from gateway.engines.base import AdapterContext, EngineAdapter, engine_tls
from gateway.engines.kinds import connect
from gateway.fleet.registrations import registered
from gateway.fleet.watcher import PROBE_TEXT, same_ids
from gateway.log.stores import kind_of
from gateway.operate.admin_place import admin_place
from gateway.store.database import DATABASE_NAME, in_use
from gateway.store.layout import LAYOUT
from gateway.tokens import Codec
from paramserver.client import RelayClient, watch_engines
from paramserver.membership import EtcdRegistry
from protos.access.credentials import credentials_in
from protos.access.etcd import EtcdAccess
from protos.access.key_file import KeyFile
from protos.access.listening import is_loopback
from protos.access.unix_socket import is_stale
from protos.errors import LaminarError, UnknownModel
from protos.findings import Finding, wrong
from protos.foreign_text import quoted

FILES_MIN = 8192
"""Open files: a client's stream and its engine's each take one, so this is for some 4,000 turns at once."""
FREE_MIN = 1 << 30
"""Bytes free for --data."""
REPLY_TIMEOUT_S = 5.0
LOOK_S = 1.0
LISTENS, ADMIN = "address to listen on", "admin listener"
ETCD_SLOW_S = 1.0
"""A gateway follows etcd without waiting for it; slower than this, engines join and leave late."""


async def examine_patiently(config: GatewayConfig, wait_s: float) -> list[Finding]:
    """The findings once nothing is wrong, or after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        found = await examine(config)
        if not wrong(found) or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(LOOK_S)


async def examine(config: GatewayConfig) -> list[Finding]:
    """Every finding, right or wrong, in the order in which a start meets what is wrong."""
    codec, found = await asyncio.to_thread(_tokenizer, config)
    found += [_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
    found += await asyncio.to_thread(_data, config)
    if isinstance(config.experience_store, StoreAddress):
        found.append(await _shared(config.experience_store, config))
    found.append(_port(LISTENS, config.host, config.port))
    found.append(await asyncio.to_thread(_access, config))
    found += await asyncio.to_thread(_admin, config)
    engines = list(config.engines)
    if config.etcd is not None:
        etcd, joined = await _etcd(config.etcd, config.etcd_access)
        found += etcd
        engines += joined
    relays = dict.fromkeys(relay for relay in (config.relay, *(engine.relay for engine in engines)) if relay)
    checks = [_relay(relay, config) for relay in relays] + [_engine(e, config, codec) for e in engines]
    for each in await asyncio.gather(*checks):
        found += each
    if not engines:
        what = "none is named, and none is registered in etcd" if config.etcd else "none is named"
        remedy = "name one with --engine NAME=KIND=URL, or send it to POST /admin/engines later: until then calls wait"
        found.append(Finding("engines", False, what, remedy, advice=True))
    return found


def _tokenizer(config: GatewayConfig) -> tuple[Codec | None, list[Finding]]:
    try:
        codec = Codec.load(config.tokenizer, config.special_tokens_in_text)
    except LaminarError as e:
        return None, [Finding("tokenizer", False, e.message, e.hint)]
    template = "with a chat template" if codec.chats else "without a chat template: /v1/completions alone"
    remedy = "save the model's chat_template.jinja or tokenizer_config.json there, for /v1/chat/completions"
    what = f"{codec.vocab_size} ids, {template}"
    found = [Finding("tokenizer", bool(codec.chats), what, remedy, advice=True)]
    return codec, found + [Finding("chat template", True, note) for chat in codec.chats for note in chat.notes]


def _files(limit: int) -> Finding:
    remedy = f"ulimit -n {FILES_MIN}, or LimitNOFILE={FILES_MIN} in the unit"
    return Finding("open files", limit >= FILES_MIN, f"{limit} at most", remedy, advice=True)


# -- the data directory


def _data(config: GatewayConfig) -> list[Finding]:
    if config.data is None:
        what = "none: sessions and trajectories are in memory, and lost at exit"
        return [Finding("data directory", False, what, "give --data DIR", advice=True)]
    existing = next(path for path in (config.data.absolute(), *config.data.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        remedy = f"give it to the user who runs the gateway (uid {os.getuid()}), or another --data"
        return [Finding("data directory", False, f"{existing} is no directory that can be written", remedy)]
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    room = Finding(
        "data directory",
        free >= FREE_MIN,
        f"{config.data}: {free / (1 << 30):.1f} GiB free",
        "make room, or give another --data: a full disk holds back whatever would be acknowledged",
    )
    database = config.data / DATABASE_NAME
    return [room, _database(database, config.model)] if database.exists() else [room]


def _database(path: Path, model: str) -> Finding:
    """The file of an earlier gateway: whether this one can go on with it."""
    what = "earlier sessions"
    if in_use(path):
        return Finding(what, False, f"{path} is in use by another gateway", "stop it, or give another --data")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            [layout] = connection.execute("PRAGMA user_version").fetchone()
            row = connection.execute("SELECT model FROM kept_for").fetchone() if _bound(connection) else None
        finally:
            connection.close()
    except sqlite3.Error as e:
        return Finding(what, False, f"{path} cannot be read: {e}", "restore it, or give another --data")
    if layout > LAYOUT:
        remedy = "start that gateway again, or give another --data"
        return Finding(what, False, f"{path} was written by a newer gateway (layout {layout})", remedy)
    if row is not None and row[0] != model:
        remedy = f"serve --model {row[0]}, or give another --data"
        return Finding(what, False, f"{path} keeps the turns of model {row[0]!r}, not of {model!r}", remedy)
    return Finding(what, True, f"{path}, layout {layout}")


def _bound(connection: sqlite3.Connection) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'kept_for'"
    return connection.execute(query).fetchone() is not None


async def _shared(address: StoreAddress, config: GatewayConfig) -> Finding:
    what = "shared experience"
    try:
        unchecked = await kind_of(address).examine(address, accept_unchecked=config.redis_unchecked)
    except LaminarError as e:
        return Finding(what, False, e.message, e.hint)
    if unchecked:
        shown = f"{address} answers, and {', '.join(unchecked)} cannot be checked there"
        return Finding(what, False, shown, "have its operator confirm them", advice=True)
    return Finding(what, True, f"{address} keeps what it acknowledges")


def _access(config: GatewayConfig) -> Finding:
    what = "access control"
    if config.api_keys is not None:
        try:
            keys = KeyFile(config.api_keys)
        except LaminarError as e:
            return Finding(what, False, e.message, e.hint)
        shown = ", ".join(f"{count} {role}" for role, count in keys.by_role().items())
        return Finding(what, True, f"{config.api_keys} has keys: {shown}")
    if is_loopback(config.host):
        return Finding(what, True, "none: only this host reaches it")
    if config.insecure:
        shown = f"none, by --insecure: whoever reaches {config.host} may do everything"
        return Finding(what, False, shown, "give --api-keys FILE unless the network is closed", advice=True)
    shown = f"none, and {config.host} is not loopback: it does not start so"
    return Finding(what, False, shown, "give --api-keys FILE, or --insecure in a closed network")


def _port(what: str, host: str, port: int, option: str = "--port", own: str = "--host") -> Finding:
    """Whether the address can be listened on. `option` gives another port, `own` another host."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        used = e.errno == errno.EADDRINUSE
        remedy = f"stop what listens there, or give another {option}" if used else f"give {own} an address of this host"
        return Finding(what, False, f"{host}:{port}: {e.strerror or e}", remedy)
    return Finding(what, True, f"{host}:{port} is free")


def _admin(config: GatewayConfig) -> list[Finding]:
    """Where the fleet is operated from; nothing where one port answers all routes, or any free port is taken."""
    try:
        place = admin_place(config)
        if place is None or (place.path is None and place.port == 0):
            return []
        if place.path is not None:
            return [_socket(place.path)]
    except LaminarError as e:
        return [Finding(ADMIN, False, e.message, e.hint)]
    if place.port == config.port:
        shown = f"{place.host}:{place.port} has the port of the clients' listener"
        return [Finding(ADMIN, False, shown, "give another port in --admin-listen, or unix:PATH")]
    return [_port(ADMIN, place.host, place.port, "port in --admin-listen", "--admin-listen")]


def _socket(path: Path) -> Finding:
    """Raises LaminarError where something is there that is in the way."""
    is_stale(path)
    directory = path.absolute().parent
    if not directory.is_dir():
        return Finding(ADMIN, False, f"{directory} is no directory", "make it, for the gateway's user alone")
    if not os.access(directory, os.W_OK | os.X_OK):
        remedy = f"give it to the user who runs the gateway (uid {os.getuid()}), or another --admin-listen"
        return Finding(ADMIN, False, f"{directory} is no directory that can be written", remedy)
    return Finding(ADMIN, True, f"{path} can be a unix socket")


# -- etcd, relays and engines


async def _etcd(endpoint: str, access: EtcdAccess) -> tuple[list[Finding], list[EngineSpec]]:
    """Whether it answers, and the engines that relays have registered there."""
    began = time.monotonic()
    try:
        registry = await EtcdRegistry.connect(endpoint, access=access)
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                engines = await anext(watch_engines(registry))
        finally:
            await registry.close()
    except LaminarError as e:
        return [Finding("etcd", False, e.message, e.hint)], []
    except TimeoutError:
        what = f"{endpoint} gave no list of engines within {REPLY_TIMEOUT_S:g} s"
        return [Finding("etcd", False, what, "has it a quorum? `etcdctl endpoint health`")], []
    took_s = time.monotonic() - began
    remedy = "put etcd on faster disks and a nearer network"
    what = f"{endpoint} lists {len(engines)} engines after {took_s * 1000:.0f} ms"
    found, specs = [Finding("etcd", took_s < ETCD_SLOW_S, what, remedy, advice=True)], list[EngineSpec]()
    for engine in engines.values():
        try:
            specs.append(registered(engine))
        except LaminarError as e:
            found.append(Finding(f"engine {engine.name}, registered in etcd", False, e.message, e.hint))
    return found, specs


async def _relay(address: str, config: GatewayConfig) -> list[Finding]:
    what, model = f"relay {address}", config.model
    try:
        credentials = credentials_in(config.credentials)
    except LaminarError as e:
        return [Finding(what, False, e.message, e.hint)]
    async with RelayClient(address, timeout_s=REPLY_TIMEOUT_S, credentials=credentials) as client:
        try:
            newest = await client.newest(model)
        except UnknownModel as e:
            remedy = f"publish a first version of {model!r}; is it the name under which the trainer publishes?"
            return [Finding(what, False, e.message, remedy, advice=True)]
        except LaminarError as e:
            remedy = e.hint or "is it started there, with --host of an address that this host reaches?"
            return [Finding(what, False, e.message, remedy)]
    return [Finding(what, True, f"holds version {newest.version} of {model}" if newest else f"knows {model}")]


async def _engine(spec: EngineSpec, config: GatewayConfig, codec: Codec | None) -> list[Finding]:
    timeouts = {"stall_timeout_s": REPLY_TIMEOUT_S, "control_timeout_s": REPLY_TIMEOUT_S}
    try:
        tls = engine_tls(credentials_in(config.credentials))
    except LaminarError as e:
        return [Finding(f"engine {spec.name}", False, e.message, e.hint)]
    adapter = connect(spec.kind, spec.url, AdapterContext(model=config.model, tokenizer=codec, tls=tls, **timeouts))
    try:
        return await _answers(spec, adapter, config, codec)
    except LaminarError as e:
        remedy = e.hint or f"is {spec.url} the address of a running engine of kind {spec.kind}?"
        return [Finding(f"engine {spec.name}", False, e.message, remedy)]
    finally:
        await adapter.close()


async def _answers(
    spec: EngineSpec, adapter: EngineAdapter, config: GatewayConfig, codec: Codec | None
) -> list[Finding]:
    """What a running engine says of itself. Raises LaminarError as it would keep the engine from serving."""
    what = f"engine {spec.name}"
    await adapter.report()
    limits = await adapter.limits()
    alike = await same_ids(adapter, None if codec is None else codec.encode(PROBE_TEXT), config.tokenizer)
    context = limits.context_tokens or (codec.context_tokens if codec else 0) or 0
    label = limits.weight_version
    named = "" if is_version(label) or label in UNNAMED else f" (it calls its weights {quoted(label)}, which is none)"
    holds = f"version {version_of(label)}{named}{'' if spec.loads else ', and loads no other'}"
    holds = f"{holds}, context of {context} tokens"
    found = [Finding(what, True, f"{spec.kind} at {spec.url}: {holds}, KV of {limits.kv_capacity_tokens} tokens")]
    if limits.fenced:
        remedy = "it is paused, perhaps in a load: the gateway loads it anew before it serves"
        if not spec.loads:
            remedy = "it is paused: resume it, since the gateway loads nothing into it"
        found.append(Finding(what, False, "fenced", remedy, advice=True))
    if not alike:
        remedy = "compare the two tokenizer.json: prompts that were made elsewhere may mean something else here"
        found.append(Finding(what, False, "makes other ids of some text than the gateway", remedy, advice=True))
    if spec.loads and not (spec.relay or config.relay):
        remedy = f"write --engine {spec.name}={spec.kind}={spec.url}@HOST:PORT with the relay on its host, or --relay"
        found.append(Finding(what, False, "has no relay: its weights are never refreshed", remedy, advice=True))
    return found
