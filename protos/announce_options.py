"""Options of `publish` that the relay needs: one name from the SDK's keyword argument to the master.

Each option is a field of `AnnounceRequest` with the same name. A publisher that does not know an option sends the zero
of its type, so zero has to mean what was done before the option existed.
"""

from __future__ import annotations

from typing import TypedDict, cast

from protos.laminar.v1 import relay_pb2 as pb


class AnnounceOptions(TypedDict, total=False):
    file_bytes_max: int  # of one file of the snapshot, bytes; default 4 GiB
    wait_room_s: float  # for the other ranks, and for room in the pool, until the version is refused; default 30


DEFAULTS = AnnounceOptions(file_bytes_max=4 << 30, wait_room_s=30.0)


def announce_options(request: pb.AnnounceRequest) -> AnnounceOptions:
    return cast(AnnounceOptions, {name: getattr(request, name) for name in AnnounceOptions.__annotations__})
