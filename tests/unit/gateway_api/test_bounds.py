"""Whatever a body may keep here has a bound, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from gateway.api import admin, experience, groups, sessions, tasks
from gateway.api.bodies import decode
from gateway.api.errors import BadField

DECODERS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (admin, experience, groups, sessions, tasks)
    for name, value in vars(module).items()
    if isinstance(value, msgspec.json.Decoder)
}
BOUNDED_ELSEWHERE = {
    "data": "a task's, by DATA_BYTES_MAX",
    "session_id": "by `names_a_session`",
    "parent_session_id": "only a live session's is kept",
    "lease_id": "only a lease's is kept",
    "kind": "one of the kinds",
    "session_ids[]": "they are looked up, and not kept",
}


def unbounded(kind: Any, path: str) -> Iterator[str]:
    match kind:
        case inspect.Metadata(inner):
            yield from unbounded(inner, path)
        case inspect.UnionType(kinds):
            for one in kinds:
                yield from unbounded(one, path)
        case inspect.StrType(max_length=None, pattern=None):
            yield path
        case inspect.ListType(item, max_length=most):
            yield from [path] if most is None else []
            yield from unbounded(item, f"{path}[]")
        case inspect.DictType(key, value, max_length=most):
            yield from [path] if most is None else []
            yield from unbounded(key, f"{path}{{}}")
            yield from unbounded(value, f"{path}.*")
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{path}.{field.encode_name}".removeprefix("."))
        case inspect.AnyType():
            yield path


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_every_text_list_and_map_of_a_body_has_a_bound(name: str) -> None:
    found = set(unbounded(inspect.type_info(DECODERS[name].type), ""))
    names = {path: path.removesuffix(".*").removesuffix("{}").rpartition(".")[2] for path in found}
    assert {path for path, name in names.items() if name not in BOUNDED_ELSEWHERE} == set()


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("sessions._finish", {"reward": 1.0, "metrics": {f"m{n}": 1.0 for n in range(257)}}, "metrics"),
        ("sessions._finish", {"reward": 1.0, "metrics": {"m" * 257: 1.0}}, "metrics"),
        ("sessions._finish", {"reward": 1.0, "turns": {f"t{n}": 1.0 for n in range(8193)}}, "turns"),
        ("sessions._reward", {"leaves": {"t" * 257: 1.0}}, "leaves"),
        ("sessions._abandon", {"reason": "x" * 1001}, "reason"),
        ("groups._abandon", {"reason": "x" * 1001}, "reason"),
    ],
)
def test_what_is_beyond_its_bound_is_refused_by_name(name: str, body: Any, param: str) -> None:
    with pytest.raises(BadField, match=r"expected `(str|object)` of length <= \d+") as refused:
        decode(DECODERS[name], msgspec.json.encode(body))
    assert refused.value.param.startswith(param)
