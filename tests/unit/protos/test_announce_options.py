"""Options of `publish` go from the SDK to the master under one name."""

from __future__ import annotations

from protos.announce_options import DEFAULTS, MasterOptions, master_options
from protos.laminar.v1 import relay_pb2 as pb


def test_each_option_is_a_field_of_the_announcement() -> None:
    """What a publisher of another release does not send is the zero of its type."""
    fields = {field.name for field in pb.AnnounceRequest.DESCRIPTOR.fields}
    assert MasterOptions.__annotations__.keys() <= fields
    assert master_options(pb.AnnounceRequest(**DEFAULTS)) == DEFAULTS
    assert not any(master_options(pb.AnnounceRequest()).values())
