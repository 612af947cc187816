"""A pytest plugin: a task whose error nobody retrieved fails the test in which the collector finds it.

asyncio only logs such an error, whenever the collector comes: in the program it is an error that is reported late or
never. The message names the task and has its traceback, which lead to the test that started it: not always the one
that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class _Unretrieved(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "was never retrieved" in record.getMessage():
            self.found.append(logging.Formatter().format(record))


@pytest.fixture(autouse=True)
def _unretrieved_errors() -> Iterator[None]:
    handler = _Unretrieved()
    logging.getLogger("asyncio").addHandler(handler)
    yield
    logging.getLogger("asyncio").removeHandler(handler)
    assert not handler.found, "\n".join(handler.found)
