"""One self-contained page: markup, style, script and data in a single file that a browser opens from disk."""

from __future__ import annotations

from importlib.resources import files

import msgspec

from deploy.demo.report.model import ReportModel


def render(model: ReportModel) -> str:
    """The page's text. The data sits in it as JSON, in the element `#data`."""
    parts = files(__package__) / "assets"
    page = (parts / "page.html").read_text()
    for mark, content in (
        ("/*style*/", (parts / "page.css").read_text()),
        ("/*script*/", (parts / "page.js").read_text()),
        ("/*data*/", _embedded(model)),
    ):
        before, after = page.split(mark)
        page = f"{before}{content}{after}"
    return page


def _embedded(model: ReportModel) -> str:
    """JSON that cannot end the script element it stands in, whatever a session is called."""
    return msgspec.json.encode(model).decode().replace("<", "\\u003c")
