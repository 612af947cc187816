"""The arguments that every form of `publish` takes besides its tensors, checked and with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypedDict, cast

from paramserver.client import Files
from protos.announce_options import AnnounceOptions
from trainer_client.old_run import OnOldRun
from trainer_client.streaming.names import Names
from trainer_client.tickets import WAIT_TIMEOUT_S, Wait, check_wait


class PublisherOptions(TypedDict, total=False):
    """The keyword arguments of a publisher."""

    run: str | None  # the same on all ranks of a sharded trainer; default: an id made of the time
    wait: Wait  # of each publish, unless it has its own; default "copied"
    force_tcp: bool  # stream the bytes, even to a relay on this host
    timeout_s: float  # of one request to the relay; default 10
    rank: int  # of this process among the publishers of one version; default 0
    num_ranks: int  # default 1
    on_old_run: OnOldRun  # where versions exist and no state was loaded; default "continue", with a warning
    credentials: Path | str | None  # the directory of a trainer's; default: the one that LAMINAR_CREDENTIALS names


class PublishOptions(AnnounceOptions, total=False):
    """The keyword arguments of one publish. Those of `AnnounceOptions` are for the relay."""

    wait: Wait | None  # default: the publisher's
    timeout_s: float  # of that wait; default 120
    allow_change: bool  # publish a version whose names, shapes or kinds of dtype differ from the newest one's
    once: bool  # if this run, or the one that it resumed, has published this step already, return that version
    check_nan: bool  # refuse tensors that begin with NaN; default True
    names: Names | None  # from the trainer's names to those that engines load by
    base: Path | str | None  # a checkpoint directory, whose tensors that are lacking are carried over
    files: Files | None  # plain files that ride along


@dataclass(frozen=True, slots=True)
class PublishArguments:
    """`PublishOptions` with their defaults; `announce` has those for the relay."""

    wait: Wait
    announce: AnnounceOptions
    timeout_s: float = WAIT_TIMEOUT_S
    allow_change: bool = False
    once: bool = False
    check_nan: bool = True
    names: Names | None = None
    base: Path | str | None = None
    files: Files | None = None

    @classmethod
    def of(cls, options: PublishOptions, wait: Wait) -> Self:
        """`wait`: the publisher's. Raises TypeError for an unknown argument, InvalidRequest for an unknown wait."""
        given: dict[str, Any] = {"wait": wait, **{name: value for name, value in options.items() if value is not None}}
        if unknown := sorted(given.keys() - PublishOptions.__annotations__.keys()):
            known = ", ".join(sorted(PublishOptions.__annotations__))
            raise TypeError(f"publish has no argument {unknown[0]!r}; besides tensors and step it takes {known}")
        own = {field.name for field in fields(cls)}
        announce = {name: given.pop(name) for name in given.keys() - own}
        check_wait(given["wait"])
        return cls(announce=cast(AnnounceOptions, announce), **given)
