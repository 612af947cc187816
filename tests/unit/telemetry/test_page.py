"""docs/telemetry.md: its commands are of this release, its log line has the fields, its table the spans."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from deploy.setup_env import ROOT
from gateway.core import spans as of_sessions
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import GroupId, SamplingParams, SessionId, TurnId, TurnRecord, TurnRequest
from gateway.engines.embedded.answers import Answer, completion_span
from gateway.engines.embedded.batching.sequence import GenerationRequest
from gateway.engines.embedded.batching.sequence import SamplingParams as EngineParams
from gateway.engines.embedded.dialect import CompletionBody
from gateway.engines.embedded.text import Text
from paramserver.core import spans as of_versions
from paramserver.core.records import Epoch, FileSpec, Holding, Manifest
from protos.telemetry.context import TRACEPARENT, TraceContext
from protos.telemetry.logs import FIELDS
from protos.telemetry.spans import Span
from protos.trajectories import Segment
from tests.support.tiny_model import tiny_tokenizer
from tests.unit.deploy.command_lines import check

PAGE = Path(ROOT / "docs/telemetry.md").read_text()
TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_commands_are_of_this_release() -> None:
    (endpoint,) = {str(check(shlex.split(line)).params["otlp"]) for line in block("sh").splitlines()}
    collector = yaml.safe_load(block("yaml"))
    assert endpoint == f"http://{collector['receivers']['otlp']['protocols']['http']['endpoint']}"


def test_the_log_line_has_the_fields_in_their_order() -> None:
    line = json.loads(block("json"))
    assert list(line) == ["time", "level", "logger", "message", *(name for name in FIELDS if name != "relay")]


def made() -> Mapping[str, Span]:
    """A span of each kind."""
    segment = Segment(
        turn=0, engine="e0", incarnation="i", version=1, start=0, end=2, cause="move", started_unix_s=2, ended_unix_s=3
    )
    request = TurnRequest(TurnId("t"), SessionId("s"), 0, (1, 2), SamplingParams(max_tokens=2))
    record, spec = TurnRecord(request, [3, 4], segments=[segment]), SessionSpec(SessionId("s"), GroupId("s"))
    manifest = Manifest("policy", 1, "run", 1, Epoch("s", 1), (FileSpec("f", 1),))
    labels, generation = {TRACEPARENT: TRACE.traceparent}, GenerationRequest("r", (1,), EngineParams(max_tokens=1))
    answer = Answer(CompletionBody(model="policy", prompt=[1]), generation, "policy", Text(tiny_tokenizer()))
    answer.first_token_s = 0.1
    hop = Holding("a", 1.0, 0.1, "tcp")
    found = [
        of_sessions.session_span(SessionState(spec, 0.0, 0.0), TRACE, "finished", 1.0),
        of_sessions.turn_span(spec, TRACE, record, 1.0, 4.0, "stop"),
        of_sessions.segment_span(TRACE, request, 0, segment, "finished"),
        of_sessions.pause_span(TRACE, request, 1, segment, segment),
        of_sessions.load_span(
            TRACE, model="m", version=1, engine="e", address="h:1", started_unix_s=0, ended_unix_s=1, error=""
        ),
        completion_span(TRACE, generation, answer, 0.0, 1.0),
        of_versions.publish_span(manifest, labels, "a", announced_unix_s=0, ended_unix_s=1),
        of_versions.fetch_span(manifest, labels, "b", hop, duration_s=1, ended_unix_s=1),
    ]
    return {span.name: span for span in found if span is not None}


def test_the_table_has_every_span_with_its_attributes() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \| laminar-\w+ \| (.*) \|$", PAGE, re.MULTILINE)
    shown = {names.split(", ")[0]: re.findall(r"(\w+)(?: \([^)]*\))?(?:, |$)", text) for names, text in rows}
    assert shown == {name: [key.removeprefix("laminar.") for key in span.attributes] for name, span in made().items()}
