"""The gRPC connection of a client to one relay: plain, or mutual TLS with the fleet's credentials.

Invariants:
- with credentials nothing is ever sent in the clear, and only a relay whose certificate is for the address answers;
- credentials that change count for the next call. Calls that are under way go on by the connection they began on.
"""

from __future__ import annotations

import grpc
import grpc.aio

from protos.access.credentials import Credentials, Material
from protos.engines import is_host_port
from protos.errors import InvalidRequest

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute by default, and it rules over the one before
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class Connection:
    """A channel to "host:port", made at the first use, and made again for other credentials."""

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        self.address = address
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._material: Material | None = None  # what the channel was made with
        # On which streams may still run: dropping a channel cuts them. gRPC ends what was idle for half an hour.
        self._former: list[grpc.aio.Channel] = []

    @property
    def is_secure(self) -> bool:
        return self._credentials is not None

    @property
    def is_ready(self) -> bool:
        """Whether a connection stands now: False before the first call."""
        return self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY

    def channel(self) -> grpc.aio.Channel:
        """InvalidRequest for what is no address."""
        material = self._credentials.material if self._credentials is not None else None
        if self._channel is None or material is not self._material:
            if not is_host_port(self.address):
                raise InvalidRequest(f"{self.address!r} is no relay's HOST:PORT", hint="such as 127.0.0.1:7000")
            if self._channel is not None:
                self._former.append(self._channel)
            self._former = [one for one in self._former if one.get_state() is grpc.ChannelConnectivity.READY]
            self._channel, self._material = _open(self.address, material), material
        return self._channel

    async def close(self) -> None:
        channels = [*self._former, *([self._channel] if self._channel is not None else [])]
        self._former, self._channel = [], None
        for channel in channels:
            await channel.close()


def _open(address: str, material: Material | None) -> grpc.aio.Channel:
    if material is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    secret = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
    return grpc.aio.secure_channel(address, secret, options=CHANNEL_OPTIONS)
