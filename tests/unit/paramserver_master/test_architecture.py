"""What is said of a version whose tensors are not those of the version before."""

from __future__ import annotations

import pytest

from paramserver.core.architecture import Differences, compare, read_heads, some
from paramserver.core.layout import TensorSpec, plan_layout
from paramserver.core.refused_loads import ENGINES_MAX, TEXT_MAX, VERSIONS_MAX, RefusedLoads
from protos.errors import Corrupt

BEFORE = [TensorSpec("embed", "F32", (4, 3)), TensorSpec("w", "F32", (2, 2)), TensorSpec("ids", "I64", (5,))]


def heads(
    tensors: list[TensorSpec], metadata: dict[str, str] | None = None, file_bytes_max: int = 1 << 30
) -> list[bytes]:
    files = plan_layout(tensors, file_bytes_max=file_bytes_max, metadata=metadata)
    return [file.head for file in files if file.tensors]


def differences(after: list[TensorSpec], **metadata: str) -> Differences:
    return compare(read_heads(heads(BEFORE)), read_heads(heads(after, {f"tied:{k}": v for k, v in metadata.items()})))


def test_the_same_tensors_in_other_files_are_no_other_architecture() -> None:
    assert differences(BEFORE) == Differences()
    assert compare(read_heads(heads(BEFORE)), read_heads(heads(BEFORE[::-1], file_bytes_max=8))) == Differences()


@pytest.mark.parametrize(
    ("after", "change"),
    [
        ([*BEFORE, TensorSpec("lm_head", "F32", (4, 3))], "'lm_head' is new"),
        (BEFORE[:2], "'ids' is missing"),
        ([*BEFORE[:2], TensorSpec("ids", "I64", (6,))], "'ids' has the shape [6], before [5]"),
        ([*BEFORE[:2], TensorSpec("ids", "I32", (5,))], "'ids' is I32, before I64"),
        ([*BEFORE[:2], TensorSpec("ids", "F32", (5,))], "'ids' is F32, before I64"),
    ],
)
def test_another_architecture_is_told_by_name(after: list[TensorSpec], change: str) -> None:
    assert differences(after) == Differences((change,))


def test_a_float_that_engines_convert_is_only_told() -> None:
    after = [TensorSpec("embed", "BF16", (4, 3)), *BEFORE[1:]]
    assert differences(after) == Differences((), ("'embed' is BF16, before F32",))


def test_what_was_tied_and_is_no_more_is_told_so() -> None:
    whole, tied = read_heads(heads(BEFORE)), read_heads(heads(BEFORE[:1] + BEFORE[2:], {"tied:w": "embed"}))
    assert compare(tied, whole) == Differences(("'w' was tied to 'embed'",), of_ties=True)
    assert compare(whole, tied) == Differences(("'w' is tied to 'embed' now",), of_ties=True)
    assert not compare(whole, read_heads(heads(BEFORE[:1], {"tied:w": "embed"}))).of_ties, "'ids' is missing, too"


def test_many_differences_and_long_names_stay_readable() -> None:
    found = differences([*BEFORE, *(TensorSpec(f"{n}" * 1000, "F32", (1,)) for n in range(1, 6))])
    assert len(found.changes) == 5
    assert some(found.changes).endswith("; and 2 more")
    assert len(some(found.changes)) < 1000


@pytest.mark.parametrize("head", [b"", b"x" * 8, (10).to_bytes(8, "little") + b"[]", (2).to_bytes(8, "little") + b"[]"])
def test_a_header_that_is_none_is_refused(head: bytes) -> None:
    with pytest.raises(Corrupt, match="header cannot be read"):
        read_heads([head])


def test_refusals_are_kept_by_engine_and_bounded() -> None:
    refused = RefusedLoads()
    refused.refused("policy", 7, "e1", "its weights hold NaN", 1.0)
    refused.refused("policy", 7, "e1", "x" * 10_000, 2.0)
    refused.refused("policy", 7, "e0", "lacks w", 3.0)
    assert [(one.engine, one.times, len(one.error)) for one in refused.of("policy", 7)] == [
        ("e0", 1, 7),
        ("e1", 2, TEXT_MAX),
    ]
    assert refused.warning("policy", 7) == "version 7 of policy was refused by 2 engines (e0, e1): lacks w"
    for version in range(100):
        for engine in range(100):
            refused.refused("policy", version, f"e{engine}", "no", 4.0)
    assert len(refused.of("policy")) == VERSIONS_MAX * ENGINES_MAX
    assert refused.of("policy", 7) == refused.of("critic") == []
    assert refused.warning("policy", 7) == ""


def test_what_the_network_says_stays_one_plain_line() -> None:
    one = RefusedLoads().refused("policy", 7, "e\n0", "bad\x1b[2J\nINFO all is well", 1.0)
    assert (one.engine, one.error) == ("e 0", "bad [2J INFO all is well")


def test_a_load_that_succeeds_takes_its_refusal_back() -> None:
    refused = RefusedLoads()
    refused.refused("policy", 7, "e1", "no room", 1.0)
    refused.loaded("policy", 7, "e0")
    assert len(refused.of("policy")) == 1
    refused.loaded("policy", 7, "e1")
    refused.loaded("policy", 8, "e1")
    assert refused.of("policy") == []
    assert not refused._models, "nothing is left of it"
