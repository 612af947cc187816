"""docs/reference/tables.md: the columns of `gateway export`."""

from __future__ import annotations

from deploy.reference import markdown
from deploy.reference.markdown import code, table
from gateway.tables.schema import COLUMNS, shown

INTRO = """
One row is one trajectory: a path through a session (`leaf` of `leaves`). A session's rows stand together; lists by
token have equal length. A struct of `segments` has the fields of a [Segment](http.md#segment), one of
`version_changes` those of a [VersionChange](http.md#versionchange); `tags` and `metrics` are lists of `name` and
`value`. [tables.md](../tables.md) explains export and import.
"""


def page() -> str:
    derived = ", ".join(code(column.name) for column in COLUMNS if column.derived)
    rows = [[code(column.name), shown(column.type), column.meaning] for column in COLUMNS]
    parts = (INTRO, f"An import does not read {derived}.", table(("column", "type", "meaning"), rows))
    return markdown.page("Tables of trajectories", *parts)
