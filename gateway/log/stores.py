"""The stores that gateways share, by the scheme of their address: a row here is all that `--experience-store`, its help
and `gateway doctor` know of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gateway.core.addresses import StoreAddress
from gateway.log.base import SharedStore
from gateway.log.postgres import PostgresStore
from gateway.log.redis import RedisStore
from protos.errors import InvalidRequest


class StoreKind(Protocol):
    """The class of a `SharedStore`."""

    @property
    def ADDRESS(self) -> type[StoreAddress]: ...  # noqa: N802 (a class's constant)

    async def connect(
        self, address: Any, *, namespace: str, model: str, vocabulary: str, accept_unchecked: bool
    ) -> SharedStore:
        """Raises InvalidRequest for one that does not keep what it acknowledges, Conflict for a namespace of another
        model, vocabulary or layout, Unavailable when it does not answer."""
        ...

    async def examine(self, address: Any, *, accept_unchecked: bool) -> list[str]:
        """As `connect`, without a namespace: changes nothing. Returns the settings that cannot be checked."""
        ...


SHARED: Mapping[str, StoreKind] = {
    "redis": RedisStore,
    "rediss": RedisStore,
    "postgresql": PostgresStore,
    "postgresqls": PostgresStore,
}


def parse(text: str) -> StoreAddress:
    """Raises InvalidRequest with what would be right."""
    scheme = text.partition("://")[0]
    if scheme not in SHARED:
        forms = " or ".join(dict.fromkeys(kind.ADDRESS.FORM for kind in SHARED.values()))
        raise InvalidRequest("this is no address of a store that gateways share", hint=f"write {forms}")
    return SHARED[scheme].ADDRESS.parse(text)


def kind_of(address: StoreAddress) -> StoreKind:
    return next(kind for kind in SHARED.values() if kind.ADDRESS is type(address))
