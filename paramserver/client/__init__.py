"""The public face of the parameter service: watch, acquire, publish, status. Asyncio; gRPC inside.

Invariants:
- only sealed versions that the relay holds complete are ever shown or acquired;
- a lease that lapsed is never quietly taken for one that was held: `release` raises NotFound.
"""

from paramserver.client.announced import VersionOptions
from paramserver.client.checkpoint import Checkpoint, Files, plain_files, read_checkpoint
from paramserver.client.claims import EtcdClaims
from paramserver.client.commits import published, settled
from paramserver.client.doubts import Doubt, TicketData
from paramserver.client.engines import watch_engines
from paramserver.client.publisher import publish
from paramserver.client.relay import (
    EventKind,
    HopStatus,
    Lease,
    ModelStatus,
    PinStatus,
    RelayClient,
    RelayStatus,
    SealedVersion,
    TransferStatus,
    VersionEvent,
)
from paramserver.client.sources import FileSource, TensorSource
from paramserver.client.streamed import StreamedVersion, join_stream, open_stream
from paramserver.client.ticket import Ticket
from paramserver.core.layout import DTYPES, PLAIN, FileLayout, TensorSpec
from paramserver.core.lineage import Lineage, Origin
from paramserver.core.records import ChunkMap, Rank, RegisteredEngine
from paramserver.core.refused_loads import RefusedLoad
from paramserver.core.ticket_status import Stage
from protos.version_labels import VersionLabels

__all__ = [
    "DTYPES",
    "PLAIN",
    "Checkpoint",
    "ChunkMap",
    "Doubt",
    "EtcdClaims",
    "EventKind",
    "FileLayout",
    "FileSource",
    "Files",
    "HopStatus",
    "Lease",
    "Lineage",
    "ModelStatus",
    "Origin",
    "PinStatus",
    "Rank",
    "RefusedLoad",
    "RegisteredEngine",
    "RelayClient",
    "RelayStatus",
    "SealedVersion",
    "Stage",
    "StreamedVersion",
    "TensorSource",
    "TensorSpec",
    "Ticket",
    "TicketData",
    "TransferStatus",
    "VersionEvent",
    "VersionLabels",
    "VersionOptions",
    "join_stream",
    "open_stream",
    "plain_files",
    "publish",
    "published",
    "read_checkpoint",
    "settled",
    "watch_engines",
]
