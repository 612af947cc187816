"""`make audit`: what it finds out, what it accepts, and that it never takes silence for good news."""

from __future__ import annotations

import pytest

from deploy.audit import EXCEPTIONS, exceptions, judged


@pytest.mark.parametrize(
    ("status", "output", "means"),
    [
        (0, "No known vulnerabilities found", 0),
        (1, "Found 2 known vulnerabilities in 1 package\nName Version ID", 1),
        (0, "", None),
        (1, "ConnectionError: Max retries exceeded", None),
        (2, "no answer within 300 s", None),
    ],
)
def test_only_an_answer_counts(status: int, output: str, means: int | None) -> None:
    assert judged(status, output) == means


def test_each_exception_has_its_reason() -> None:
    exceptions(EXCEPTIONS.read_text())
    assert exceptions('[[exception]]\nid = "PYSEC-1"\nwhy = "not called"\n') == ["PYSEC-1"]
    for text in (
        '[[exception]]\nid = "PYSEC-1"\n',
        '[[exception]]\nid = "PYSEC-1"\nwhy = " "\n',
        '[[exception]]\nwhy = "x"\n',
    ):
        with pytest.raises(ValueError, match="why it is accepted"):
            exceptions(text)
