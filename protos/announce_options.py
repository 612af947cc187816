"""Options of `publish` that go to the relay: one name from the SDK's keyword argument to the master.

What the master acts on (`MasterOptions`) is a field of `AnnounceRequest` with the same name. A publisher that does not
know such an option sends the zero of its type, so zero has to mean what was done before the option existed. What is
only kept with the version is one of its labels, which have a table of their own.
"""

from __future__ import annotations

from typing import TypedDict, cast

from protos.laminar.v1 import relay_pb2 as pb
from protos.version_labels import VersionLabels


class MasterOptions(TypedDict, total=False):
    file_bytes_max: int  # of one file of the snapshot, bytes; default 4 GiB
    wait_room_s: float  # for the other ranks, and for room in the pool, until the version is refused; default 30


class AnnounceOptions(MasterOptions, VersionLabels, total=False):
    """What every form of publish passes on to the announcement."""


DEFAULTS = MasterOptions(file_bytes_max=4 << 30, wait_room_s=30.0)


def master_options(request: pb.AnnounceRequest) -> MasterOptions:
    return cast(MasterOptions, {name: getattr(request, name) for name in MasterOptions.__annotations__})
