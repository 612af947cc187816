"""Which addresses engines and relays may have that are added while the gateway runs. Pure.

Whoever adds an engine has the gateway send requests to an address of their choice, so that address has to be one where
engines are, and no other service of the gateway's network, such as a cloud's metadata (169.254.169.254).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from protos.access.listening import is_loopback
from protos.errors import InvalidRequest

Address = IPv4Address | IPv6Address
NETWORKS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Networks:
    """CIDR networks."""

    networks: tuple[IPv4Network | IPv6Network, ...]

    @classmethod
    def parse(cls, text: str) -> Networks:
        """Networks separated by commas. Raises InvalidRequest."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > NETWORKS_MAX:
            raise InvalidRequest(f"{len(parts)} networks", hint=f"{NETWORKS_MAX} at most")
        try:
            return cls(tuple(ip_network(part) for part in parts))
        except ValueError as error:
            raise InvalidRequest(f"no list of networks: {error}", hint="such as 10.0.0.0/8,192.168.1.0/24") from error

    def __contains__(self, address: Address) -> bool:
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        plain = address if mapped is None else mapped
        return any(plain.version == network.version and plain in network for network in self.networks)

    def __str__(self) -> str:
        return ",".join(map(str, self.networks))


NEAR = Networks.parse("127.0.0.0/8,::1/128,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7")
"""Loopback and private networks. Link-local ones are not among them: clouds serve credentials there."""


@dataclass(frozen=True, slots=True)
class EnginePlaces:
    """Where engines may be: on a host that an option or a registration names, or at an address in `networks`. `strict`:
    somebody chose them, so a name without an address is refused: it may have any address later."""

    hosts: frozenset[str]
    networks: Networks
    strict: bool

    @classmethod
    def of(cls, named: Collection[str], networks: Networks | None, *, listens_on: str, insecure: bool) -> EnginePlaces:
        """`networks` None: loopback and private ones, where the gateway is one for this host or for everybody; else
        none, so that an administrator's key is not a key to the whole network."""
        hosts = frozenset(host.lower() for host in named)
        if networks is None and (insecure or is_loopback(listens_on)):
            return cls(hosts, NEAR, strict=False)
        return cls(hosts, networks or Networks(()), strict=True)

    def refusal(self, host: str, addresses: Sequence[str]) -> str:
        """Why no engine may be at `host`, which resolves to `addresses`; "" if one may. All of them have to be allowed:
        which one is taken later is not known."""
        if host.lower() in self.hosts:
            return ""
        for address in addresses:
            if ip_address(address.partition("%")[0]) not in self.networks:
                return f"{host} is at {address}, which is in no network for engines"
        return f"{host} has no address, so its network is not known" if self.strict and not addresses else ""
