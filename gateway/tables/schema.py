"""The columns of a table of trajectories: one row for each trajectory, which is one leaf of a session.

Invariants:
- the columns that are not `derived` hold all of a `Trajectory`: a row that is read back is the same, to the bit (of
  logprobs, their float32);
- the rows of a session stand together, in the order of its leaves;
- a column's name, type and meaning do not change under one `SCHEMA_VERSION`. Columns may be added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.packed import COLUMNS as TOKEN_COLUMNS
from protos.packed import Offer, Row
from protos.trajectories import SampledWith, Segment, Trajectory, VersionChange

SCHEMA_VERSION = 1
VERSION_KEY = b"laminar.schema_version"
MODEL_KEY = b"laminar.model"
VOCABULARY_KEY = b"laminar.vocabulary"
TAG_COLUMNS = ("environment", "task_id", "run_id")
"""The tags that `agents-env run` gives its sessions: each has a column of its own."""


@dataclass(frozen=True, slots=True)
class KeptFor:
    """What the token ids of a store belong to. `vocabulary`: the digest of a tokenizer's."""

    model: str
    vocabulary: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A finished session as its store has it. `row`: packed (`protos.packed`). `ended_with`: the members that its group
    was closed with, where they are fewer than its size."""

    offer: Offer
    row: bytes | memoryview
    ended_with: int | None = None


@dataclass(frozen=True, slots=True)
class Leaf:
    """One row to be: `head` is the trajectory without its tokens, `tokens` has them by column, of equal length."""

    stored: Stored
    model: str
    head: Trajectory
    tokens: Mapping[str, npt.NDArray[Any]]

    @property
    def sampled_versions(self) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self.tokens["versions"][self.tokens["loss_mask"] == 1]
        return found


@dataclass(frozen=True, slots=True)
class Column:
    """`of`: the value of a leaf; None for a column by token, which is taken as an array. `derived`: an import does not
    read it."""

    name: str
    type: pa.DataType
    meaning: str
    of: Callable[[Leaf], Any] | None = None
    nullable: bool = False
    derived: bool = False

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, self.nullable, {"description": self.meaning})


def _pairs(value: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct([("name", pa.string()), ("value", value)]))


_SAMPLED_WITH = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("presence_penalty", pa.float64()),
        ("frequency_penalty", pa.float64()),
        ("constrained", pa.bool_()),
        ("logprobs", pa.string()),
        ("min_p", pa.float64()),
        ("repetition_penalty", pa.float64()),
        ("logit_bias", _pairs(pa.float64())),
        ("min_tokens", pa.int64()),
    ]
)
_SEGMENT = pa.struct(
    [
        ("turn", pa.int64()),
        ("engine", pa.string()),
        ("incarnation", pa.string()),
        ("version", pa.int64()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("cause", pa.string()),
        ("started_unix_s", pa.float64()),
        ("ended_unix_s", pa.float64()),
        ("seed", pa.int64()),
        ("sampled_with", _SAMPLED_WITH),
        ("evidence", pa.string()),
        ("dtype", pa.string()),
    ]
)
_VERSION_CHANGE = pa.struct(
    [
        ("turn", pa.int64()),
        ("turn_id", pa.string()),
        ("from_version", pa.int64()),
        ("to_version", pa.int64()),
        ("reason", pa.string()),
    ]
)


def _plain(value: Any) -> Any:
    """A struct as Arrow takes it: dicts with names of their own as pairs."""
    found = msgspec.to_builtins(value)
    if isinstance(value, msgspec.Struct) and (sampled := found.get("sampled_with")) is not None:
        sampled["logit_bias"] = _as_pairs(sampled["logit_bias"])
    return found


def _as_pairs(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _other_tags(leaf: Leaf) -> list[dict[str, Any]]:
    return _as_pairs({name: value for name, value in leaf.head.tags.items() if name not in TAG_COLUMNS})


def _tag(name: str) -> Callable[[Leaf], Any]:
    return lambda leaf: leaf.head.tags.get(name)


def _head(name: str) -> Callable[[Leaf], Any]:
    return lambda leaf: getattr(leaf.head, name)


def _structs(name: str) -> Callable[[Leaf], Any]:
    return lambda leaf: [_plain(value) for value in getattr(leaf.head, name)]


def _number(leaf: Leaf) -> int:
    return leaf.stored.offer.seq


def _limit(of: Callable[[npt.NDArray[Any]], Any]) -> Callable[[Leaf], Any]:
    return lambda leaf: int(of(found)) if len(found := leaf.sampled_versions) else None


STRING, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()

COLUMNS: Sequence[Column] = (
    Column("session_id", STRING, "The session: one rollout.", _head("session_id")),
    Column("leaf", INT, "Which path of the session, from 0.", _head("leaf")),
    Column("leaves", INT, "Paths of the session: 1 unless its history was edited or branched.", _head("leaves")),
    Column("group_id", STRING, "The sessions sampled from one prompt share it.", _head("group_id")),
    Column("sample_index", INT, "The session's place in its group, from 0.", _head("sample_index")),
    Column(
        "group_ended_with",
        INT,
        "Members that the group ended with, where they are fewer than its size; else null.",
        lambda leaf: leaf.stored.ended_with,
        nullable=True,
    ),
    Column("environment", STRING, "The tag `environment`: the runner's environment.", _tag("environment"), True),
    Column("task_id", STRING, "The tag `task_id`: the environment's task.", _tag("task_id"), True),
    Column("run_id", STRING, "The tag `run_id`: the runner's run.", _tag("run_id"), True),
    Column("model", STRING, "The served model.", lambda leaf: leaf.model, derived=True),
    Column("split", STRING, "`train`; evaluations are not stored.", _head("split")),
    Column("status", STRING, "`completed`, or `truncated` (it ended at a limit).", _head("status")),
    Column("reward", FLOAT, "The session's reward, or the leaf's own.", _head("reward")),
    Column("own_reward", BOOL, "Whether `reward` is the leaf's own.", _head("own_reward")),
    Column(
        "turn_rewards",
        pa.list_(FLOAT),
        "By turn of the path, null for a turn without one; empty: none was given.",
        _head("turn_rewards"),
    ),
    Column("token_ids", pa.list_(INT), "All tokens of the path: prompts, answers, tools."),
    Column(
        "logprobs",
        pa.list_(pa.float32()),
        "By token: the natural logarithm of its probability under the behaviour policy; 0 where `loss_mask` is 0.",
    ),
    Column(
        "loss_mask",
        pa.list_(pa.int8()),
        "By token: 1 if the policy sampled it, and no earlier leaf trains on it; else 0.",
    ),
    Column("versions", pa.list_(INT), "By token: the weight version that sampled it; -1 where `loss_mask` is 0."),
    Column("num_tokens", INT, "Tokens.", lambda leaf: len(leaf.tokens["token_ids"]), derived=True),
    Column("num_sampled", INT, "Tokens with a loss mask of 1.", lambda leaf: len(leaf.sampled_versions), derived=True),
    Column("oldest_version", INT, "Of the sampled tokens; null without one.", _limit(np.min), True, True),
    Column("newest_version", INT, "Of the sampled tokens; null without one.", _limit(np.max), True, True),
    Column("mixed", BOOL, "Whether more than one version sampled its tokens.", _head("mixed")),
    Column("version_policy", STRING, "`segment`, `strict` or `fail`: for a lost version.", _head("version_policy")),
    Column(
        "version_changes",
        pa.list_(_VERSION_CHANGE),
        "Where the session's version was lost, and it continued under another one.",
        _structs("version_changes"),
    ),
    Column("turns", INT, "Model calls of the path.", _head("turns")),
    Column("turn_ids", pa.list_(STRING), "Their ids: of the responses, without their prefix.", _head("turn_ids")),
    Column(
        "segments",
        pa.list_(_SEGMENT),
        "Runs of tokens (`start` to `end`, exclusive) that one engine sampled under one version: engine, cause, times, "
        "seed, sampling parameters, evidence of the version.",
        _structs("segments"),
    ),
    Column("started_unix_s", FLOAT, "The session's begin, in seconds since 1970 (UTC).", _head("started_unix_s")),
    Column("finished_unix_s", FLOAT, "Its end, the same.", _head("finished_unix_s")),
    Column("tags", _pairs(STRING), "The session's other tags.", _other_tags),
    Column("metrics", _pairs(FLOAT), "The metrics of its finish.", lambda leaf: _as_pairs(leaf.head.metrics)),
    Column("number", INT, "The store's number of the session, in the order of finishes.", _number, derived=True),
    Column("uses", INT, "How many readers have acknowledged it.", lambda leaf: leaf.stored.offer.uses, derived=True),
    Column("leased", BOOL, "Whether a reader has it now.", lambda leaf: leaf.stored.offer.leased, derived=True),
)


def shown(type_: pa.DataType) -> str:
    """As the docs show a type: a struct without its fields."""
    if pa.types.is_list(type_):
        return f"list of {shown(type_.value_type)}"
    return "struct" if pa.types.is_struct(type_) else str(type_)


def metadata(kept_for: KeptFor) -> dict[bytes, bytes]:
    """Of a file: its schema's version, and what its token ids belong to."""
    return {
        VERSION_KEY: str(SCHEMA_VERSION).encode(),
        MODEL_KEY: kept_for.model.encode(),
        VOCABULARY_KEY: kept_for.vocabulary.encode(),
    }


def schema_of(kept_for: KeptFor) -> pa.Schema:
    return pa.schema([column.field for column in COLUMNS], metadata(kept_for))


def leaves_of(stored: Stored, model: str) -> list[Leaf]:
    """The leaves of a session. Damaged if its row is."""
    row = Row(stored.row)
    columns = {name: row.column(name) for name in TOKEN_COLUMNS}
    begins = dict.fromkeys(TOKEN_COLUMNS, 0)
    leaves: list[Leaf] = []
    for number, head in enumerate(row.heads):
        tokens: dict[str, npt.NDArray[Any]] = {}
        for name, values in columns.items():
            end = begins[name] + row.lengths[name][number]
            tokens[name] = values[begins[name] : end]
            begins[name] = end
        leaves.append(Leaf(stored, model, head, tokens))
    return leaves


def record_batch(leaves: Sequence[Leaf], schema: pa.Schema) -> pa.RecordBatch:
    """A row for each leaf. The tokens are copied as arrays, never one by one."""
    return pa.record_batch([_array(column, leaves) for column in COLUMNS], schema=schema)


def _array(column: Column, leaves: Sequence[Leaf]) -> pa.Array:
    if column.of is not None:
        return pa.array([column.of(leaf) for leaf in leaves], column.type)
    parts = [leaf.tokens[column.name] for leaf in leaves]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    item = column.type.value_type
    with np.errstate(over="ignore"):
        values = np.concatenate(parts, dtype=item.to_pandas_dtype(), casting="unsafe")
    return pa.ListArray.from_arrays(offsets, pa.array(values, item))


def trajectory_of(row: Mapping[str, Any], tokens: Mapping[str, Sequence[Any]]) -> Trajectory:
    """The inverse: `row` has the values of all columns but those by token. ValidationError names the value that is
    none of a trajectory."""
    body = {name: row[name] for name in Trajectory.__struct_fields__ if name not in tokens}
    tags = {name: row[name] for name in TAG_COLUMNS if row[name] is not None}
    body["tags"] = tags | _as_dict("tags", row["tags"])
    body["metrics"] = _as_dict("metrics", row["metrics"])
    body["segments"] = [_segment(value) for value in row["segments"]]
    found = msgspec.convert({**body, **{name: [] for name in TOKEN_COLUMNS}}, Trajectory)
    return msgspec.structs.replace(found, **tokens)


def _segment(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if value is None or (sampled := value["sampled_with"]) is None:
        return value
    return {**value, "sampled_with": {**sampled, "logit_bias": _as_dict("segments", sampled["logit_bias"])}}


def _as_dict(column: str, pairs: Sequence[Mapping[str, Any] | None] | None) -> dict[str, Any]:
    if pairs is None or None in pairs:
        raise msgspec.ValidationError(f"a null among its pairs of name and value - at `$.{column}`")
    return {pair["name"]: pair["value"] for pair in pairs if pair is not None}


assert {field.name for field in _SEGMENT} == set(Segment.__struct_fields__)
assert {field.name for field in _SAMPLED_WITH} == set(SampledWith.__struct_fields__)
assert {field.name for field in _VERSION_CHANGE} == set(VersionChange.__struct_fields__)
