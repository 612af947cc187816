"""What an audit says of its advisory services' answers: what nobody looked up is not sound."""

from __future__ import annotations

import json

import pytest

from deploy.audit import EXCEPTIONS, Found, combined, exceptions, judged, shown

VULNERABLE = {"name": "b", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (1.0)"}
SOUND = {"name": "a", "version": "2.0", "vulns": []}


def answer(*packages: object) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


@pytest.mark.parametrize(
    ("packages", "status"),
    [([SOUND], 0), ([SOUND, SKIPPED], 2), ([SOUND, SKIPPED, VULNERABLE], 1), ([SKIPPED], 2), ([VULNERABLE], 1)],
)
def test_a_package_that_was_not_looked_up_is_unknown(packages: list[object], status: int) -> None:
    found = judged(answer(*packages))
    assert found is not None
    assert found.status == status


@pytest.mark.parametrize("output", ["", "no JSON", "[]", "{}", "null"])
def test_a_service_that_did_not_answer_says_nothing(output: str) -> None:
    assert judged(output) is None


def test_services_complete_each_other() -> None:
    one, other = Found(["b 1.0: PYSEC-1"], ["c", "d"]), Found([], ["d", "e"])
    assert combined([one, other]) == Found(["b 1.0: PYSEC-1"], ["d"])
    assert combined([]) is None


def test_what_is_shown_names_what_is_unknown() -> None:
    assert shown(Found([], [f"p{i}" for i in range(10)]), 0).splitlines() == [
        "audit: nothing is known of p0, p1, p2, p3, p4, p5, p6, p7 and 2 more",
        "audit: 0 known vulnerabilities, 0 exceptions",
    ]
    assert "no advisory service answered" in shown(None, 0)


def test_each_exception_has_its_reason() -> None:
    exceptions(EXCEPTIONS.read_text())
    with pytest.raises(ValueError, match="why it is accepted"):
        exceptions('[[exception]]\nid = "PYSEC-1"\nwhy = " "')
