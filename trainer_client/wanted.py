"""What a reader of experience asks for, and what the gateway tells of its buffer."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, TypedDict

import msgspec

from protos.errors import InvalidRequest
from protos.packed import Offer

WAIT_S = 30.0
LEASE_S = 600.0
"""Default lease of a batch."""

Strategy = Literal["fifo", "newest", "priority", "complete_groups", "staleness_bounded"]
"""`fifo`: as they finished. `newest`: the latest first. `priority`: the highest `metrics["priority"]` of the finish
first. `complete_groups`: whole groups, the earliest first. `staleness_bounded`: as `fifo`, with `staleness_max` for
each token: a trajectory is left out when all its tokens are staler, else `Batch.pack` masks the staler ones."""


Choice = Callable[[Sequence[Offer]], Sequence[str]]
"""A strategy of the trainer's own, run in its process: of the rows that wait, without their tokens, the ids of the
sessions to sample; none: not yet. It comes instead of `trajectories` and `groups`."""


class Wanted(TypedDict, total=False):
    """What to sample: `trajectories`, or `groups` of `group_size` each, or the sessions `session_ids`, and how."""

    trajectories: int
    groups: int
    group_size: int
    session_ids: Sequence[str]  # sessions that the caller finished itself: all of them, or what there is after `wait_s`
    wait_s: float  # how long the gateway waits until there is enough; default 30
    staleness_max: int  # leave out what is staler than this at use; default: the gateway's bound
    drop_equal_rewards: bool  # drop, for good, groups whose rewards are all equal
    strategy: Strategy | Choice  # which ones, in which order; default "fifo"
    uses_max: int  # also those that were used before, if less often than this; default 1: each is used once
    lease_s: float  # the lease: how long the batch may stay unacknowledged; default 600


def version_number(value: object) -> int:
    """`value` as a trainer's version: an integer, whose type may be numpy's. InvalidRequest for anything else."""
    found = operator.index(value) if isinstance(value, SupportsIndex) else -1
    if found < 0:
        raise InvalidRequest(
            f"trainer_version={value!r:.80}", hint="pass `ticket.version` of a publish, or 0 before the first"
        )
    return found


def sample_request(
    reader: str, trainer_version: int, wanted: Wanted, rank: int = 0, num_ranks: int = 1
) -> dict[str, Any]:
    """The body of a sample request, complete with defaults. Of `num_ranks` readers each asks for its share."""
    _check_names(wanted)
    if sum(name in wanted for name in ("trajectories", "groups", "session_ids")) != 1:
        raise InvalidRequest("sample needs one of `trajectories`, `groups` and `session_ids`", hint="pass one of them")
    if wanted.get("strategy") == "staleness_bounded" and "staleness_max" not in wanted:
        raise InvalidRequest("strategy `staleness_bounded` needs a bound", hint="pass `staleness_max`")
    return {
        "reader": reader,
        "trainer_version": trainer_version,
        "wait_s": WAIT_S,
        "lease_s": LEASE_S,
        **wanted,
        **(_share(wanted, rank, num_ranks) if num_ranks > 1 else {}),
    }


def peek_request(wanted: Wanted) -> dict[str, Any]:
    """The body of a peek. InvalidRequest for what only a sample takes."""
    for name in wanted.keys() & {"wait_s", "lease_s", "drop_equal_rewards"}:
        raise InvalidRequest(f"peek takes no `{name}`", hint="it looks at what is there now, and changes nothing")
    if callable(wanted.get("strategy")):
        raise InvalidRequest("peek takes no strategy of one's own", hint="pick by `rows()`, and pass `session_ids`")
    body = sample_request("", 0, wanted)
    return {name: body[name] for name in body.keys() - {"reader", "trainer_version", "wait_s", "lease_s"}}


def check_choice(wanted: Wanted, rank: int, num_ranks: int) -> None:
    """InvalidRequest if `wanted`, whose strategy is a function, asks for something beside it, or for a rank's share."""
    _check_names(wanted)
    if wanted.keys() & {"trajectories", "groups", "session_ids"}:
        raise InvalidRequest(
            "a strategy of one's own picks the sessions: it comes instead of `trajectories`, `groups`, `session_ids`",
            hint="pass one of them, or the function",
        )
    if num_ranks > 1:
        raise _picks_for_one(rank, num_ranks)


def _check_names(wanted: Wanted) -> None:
    for name in wanted.keys() - Wanted.__annotations__.keys():
        near = difflib.get_close_matches(name, Wanted.__annotations__, n=1)
        raise InvalidRequest(f"sample takes no `{name}`", hint=f"did you mean `{near[0]}`?" if near else "")


def _picks_for_one(rank: int, num_ranks: int) -> InvalidRequest:
    return InvalidRequest(
        f"`session_ids` and a strategy of one's own pick for one reader, and this is rank {rank} of {num_ranks}",
        hint="pick on one rank, with `rows()`; send each rank its ids; sample them by readers without `num_ranks`",
    )


def _share(wanted: Wanted, rank: int, num_ranks: int) -> dict[str, int]:
    what: Literal["trajectories", "groups"] = "groups" if "groups" in wanted else "trajectories"
    if "session_ids" in wanted:
        raise _picks_for_one(rank, num_ranks)
    if wanted[what] % num_ranks:
        raise InvalidRequest(
            f"{wanted[what]} {what} cannot be shared by {num_ranks} ranks", hint=f"pass a multiple of {num_ranks}"
        )
    return {what: wanted[what] // num_ranks, "num_ranks": num_ranks, "rank": rank}


def picked(choose: Choice, rows: Sequence[Offer]) -> list[str]:
    """The ids that `choose` returns, each once. InvalidRequest if it returns something else."""
    found: object = choose(rows)
    if isinstance(found, str) or not isinstance(found, Iterable):
        what = repr(found)
    else:
        ids = list(found)
        others = [type(name).__name__ for name in ids if not isinstance(name, str)]
        if not others:
            return [str(name) for name in dict.fromkeys(ids)]
        what = f"{type(found).__name__} of {others[0]}"
    raise InvalidRequest(
        f"the function returned {what}, not a list of session ids",
        hint="such as [row.session_id for row in rows if row.facts.num_tokens < 8192]; [] for none",
    )


class ReaderState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of a reader. `used`: leases to acknowledge."""

    reader: str
    trainer_version: int
    used: list[str] = []


def reader_state(state: Mapping[str, Any]) -> ReaderState:
    """InvalidRequest if it is none."""
    try:
        return msgspec.convert(dict(state), ReaderState)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidRequest(f"no state of a reader: {error}", hint="pass what `state_dict` returned") from error


class Rows(msgspec.Struct):
    rows: list[Offer]
    next_after: int | None


class Returned(msgspec.Struct, frozen=True):
    """How many trajectories were given back."""

    returned: int


class Evicted(msgspec.Struct, frozen=True):
    """What became of the sessions that were to be evicted. `leased`: they stayed, since a reader has them. `missing`:
    they had been used or dropped before."""

    evicted: int = 0
    leased: int = 0
    missing: int = 0


class Spread(msgspec.Struct, frozen=True):
    """How numbers are spread."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


class SampledStatistics(msgspec.Struct, frozen=True):
    """Of the last trajectories that readers sampled. `waited_s`: from the finish to the sample."""

    tokens: Spread
    sampled_tokens: Spread
    reward: Spread
    waited_s: Spread


class StalenessStatistics(msgspec.Struct, frozen=True):
    """By how many versions it was behind: tokens when generated, trajectories at their finish and when sampled."""

    generation: dict[int, int]
    finish: dict[int, int]
    use: dict[int, int]


class ExperienceStatistics(msgspec.Struct, frozen=True):
    """`buffer`: the buffer's counters, by name. `newest_version`, of the run `newest_run`: the newest that relays
    announced; 0: none."""

    buffer: dict[str, int]
    staleness: StalenessStatistics
    sampled: SampledStatistics
    newest_version: int = 0
    newest_run: str = ""

    def scalars(self) -> dict[str, float]:
        """The numbers by name, as TensorBoard and W&B take them: `laminar/sampled/reward/mean`, and so on; of staleness
        the means. A spread or a histogram of nothing is left out."""
        found = {f"laminar/buffer/{name}": float(value) for name, value in self.buffer.items()}
        for kind, behind in msgspec.structs.asdict(self.staleness).items():
            if count := sum(behind.values()):
                mean = sum(versions * number for versions, number in behind.items()) / count
                found[f"laminar/staleness/{kind}/mean"] = mean
        for what, spread in msgspec.structs.asdict(self.sampled).items():
            if spread.count:
                numbers = msgspec.structs.asdict(spread)
                found |= {f"laminar/sampled/{what}/{name}": float(value) for name, value in numbers.items()}
        found["laminar/newest_version"] = float(self.newest_version)
        return found
