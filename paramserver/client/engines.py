"""Engines as relays registered them, for a gateway to follow.

- an engine is there as long as its relay's lease: when the lease ends, it is gone;
- while etcd is away, the last view stays;
- an etcd that was replaced by an empty one removes no engine: those known stay until a relay registers the name in the
  new one, since relays go on serving until an operator has them adopt it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from paramserver.core import view as keys
from paramserver.core.records import RegisteredEngine
from paramserver.membership.registry import RETRY_S, Changed, Event, Registry, Removed, State
from protos.decoding import decode_json
from protos.errors import Unavailable
from protos.foreign_text import quoted

log = logging.getLogger(__name__)

Engines = dict[str, RegisteredEngine]


@dataclass
class EngineView:
    """The engines known: `now` in the store that is there, `before` from one that it replaced."""

    store_id: str = ""
    now: Engines = field(default_factory=dict)
    before: Engines = field(default_factory=dict)

    def take(self, event: Event, store_id: str) -> Engines:
        """The engines after `event`, by name. `store_id` counts with a State only; "" when the store has none yet."""
        match event:
            case State(entries, _):
                if self.store_id and store_id != self.store_id:
                    self.before |= self.now
                self.store_id = store_id or self.store_id
                self.now = {engine.name: engine for e in entries for engine in _read(e.key, e.value)}
            case Changed(entry):
                self.now |= {engine.name: engine for engine in _read(entry.key, entry.value)}
            case Removed(key):
                self.now.pop(key.removeprefix(keys.ENGINES), None)
        for name in self.now:
            self.before.pop(name, None)
        return self.before | self.now


def _read(key: str, value: bytes) -> list[RegisteredEngine]:
    """The engine of an entry; none when it cannot be read, such as a newer relay's."""
    try:
        engine = decode_json(value, RegisteredEngine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s is no engine: %s", quoted(key), error)
        return []
    if keys.engine_key(engine.name) != key:
        log.warning("%s is no engine: it names another, %s", quoted(key), quoted(engine.name))
        return []
    return [engine]


async def watch_engines(registry: Registry) -> AsyncIterator[Engines]:
    """The engines registered now, by name, and again after every change, for ever."""
    view = EngineView()
    async for event in registry.watch(keys.ENGINES):
        yield dict(view.take(event, await _store_id(registry) if isinstance(event, State) else ""))


async def _store_id(registry: Registry) -> str:
    while True:
        try:
            entries = (await registry.list(keys.STORE)).entries
        except Unavailable:
            await asyncio.sleep(RETRY_S)
            continue
        return next((e.value.decode(errors="replace") for e in entries if e.key == keys.STORE), "")
