"""The demo's report: a recording in, summary numbers and one self-contained page out."""

from deploy.demo.report.model import report_model
from deploy.demo.report.page import render
from deploy.demo.report.summary import Summary, summarise

__all__ = ["Summary", "render", "report_model", "summarise"]
