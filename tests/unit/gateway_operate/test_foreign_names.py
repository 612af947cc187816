"""Whatever others named is printed so that it forges no line and steers no terminal: every view, with an escape
sequence in every text that it shows."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console, Group

from agents_env.session_view import described
from gateway.operate import repack_view, sessions_view, status_view, top
from gateway.operate.feed_reader import Seen, frames
from paramserver import cli_views
from paramserver import top as relay_top
from paramserver.client import SealedVersion
from protos import terminal
from protos.errors import Unavailable
from protos.findings import Finding, report_findings
from protos.terminal import Failed, say
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import complete, gateway, get
from tests.unit.gateway_operate.test_cli_repack import PLAN
from tests.unit.paramserver_operate.test_views import STATUS

EVIL = "\x1b[2J\x9b31m\u202e[red]\nFORGED line"
STEERING = ("\x1b", "\x9b", "\u202e", "\r")


def spoiled(value: Any, *, kept: frozenset[str] = frozenset()) -> Any:
    """`value` with the sequence in each of its texts; fields in `kept` stay as they are."""
    if isinstance(value, str):
        return value + EVIL
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.name not in kept]
        return dataclasses.replace(value, **{name: spoiled(getattr(value, name), kept=kept) for name in fields})
    if isinstance(value, dict):
        return {name: inner if name in kept else spoiled(inner, kept=kept) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(spoiled(one, kept=kept) for one in value)
    return value


def check(text: str) -> None:
    assert "FORGED" in text, "the view shows none of it"
    for sequence in STEERING:
        assert sequence not in text, f"{sequence!r} in {text!r}"
    assert not [line for line in text.splitlines() if line.strip().startswith("FORGED")]
    assert "[red]" in text, "markup"


def printed(show: Callable[[Console], None]) -> str:
    file = io.StringIO()
    show(Console(file=file, markup=False, highlight=False, width=10_000))
    return file.getvalue()


@pytest.mark.parametrize("kept", [frozenset[str](), frozenset({"state", "mode", "kind"})], ids=["all", "but states"])
async def test_status_and_top(tmp_path: Path, kept: frozenset[str]) -> None:
    seen = Seen()
    gone = ScriptedEngine("gone", url="http://127.0.0.1:9")
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, gone) as (found, http):
        await complete(http)
        status = await get(http, "/status")
        async for kind, frame in frames(found.url, limit=1):
            seen.take(kind, frame)
    more = {EVIL: EVIL}
    bad = spoiled(status, kept=kept)
    bad |= {"refused_relays": more, "engines_elsewhere": more, "unreachable_relays": [EVIL], "unclaimed": EVIL}
    bad["sessions"]["waiting_for"] = {EVIL: 1}
    bad["admission"] |= {"full": True, "reader": EVIL, "batch": 1, "bound": 2, "notes": more, "waiting_groups": [EVIL]}
    bad["bounds"] |= {"refused_by_key": 1, "holders": {EVIL: {"sessions": 1, "turns": 1}}}
    bad["engines"][0]["held_by"] = [{"session_id": EVIL, "on_version_loss": "strict", "idle_s": 1.0}]
    check(printed(lambda console: status_view.show(bad, console)))
    tables = spoiled(seen.tables, kept=kept)
    engines = dict(zip(seen.tables["engines"], bad["engines"], strict=True))
    relay = {"relay": EVIL, "trouble": EVIL, "error": EVIL, "model": None}
    hop = {"relay": EVIL, "rate_bytes_s": 1.0, "alive": True, "slow": EVIL}
    chained = {"relay": EVIL, "model": {"master": EVIL, "hops": [hop]}}
    figures = {"estimated": 1.0, "measured": None}
    receipt = {"number": 1, "version": 1, "engine": EVIL, "num_moves": 1, "price_s": figures, "gain_s": figures}
    tables |= {"gateway": bad, "engines": engines, "relays": {EVIL: relay, "b": chained}, "receipts": {"1": receipt}}
    seen.tables = tables
    seen.status["repack"]["plans"] = [{"version": 1, "freed": [EVIL], "moves": 1}]
    before = list(seen.events)
    seen.events.clear()
    seen.events.extend(spoiled(before))
    check(printed(lambda console: console.print(top.view(seen, lines=200, away=EVIL))))


def test_a_relays_status_versions_and_top() -> None:
    bad = spoiled(STATUS)
    check(printed(lambda console: console.print(Group(*cli_views.describe(bad)))))
    for pin in bad.pins:
        assert EVIL in pin.holder
    check(printed(lambda console: console.print(Group(*relay_top.view(bad, relay_top.Arrivals(), EVIL)))))


def test_a_relays_versions(capsys: pytest.CaptureFixture[str]) -> None:
    version = SealedVersion(
        model="policy",
        version=1,
        step=1,
        run=EVIL,
        size_bytes=1,
        sealed_unix_s=1.0,
        root_digest=EVIL,
        labels={EVIL: EVIL},
    )
    cli_views.show_versions("policy", [version], as_json=False)
    check(capsys.readouterr().out)
    for as_json in (lambda: cli_views.show_versions("p", [version], as_json=True),):
        as_json()
        assert not set(STEERING) & set(capsys.readouterr().out)


def test_lines_of_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    session = {"session_id": EVIL, "idle_s": 1.0, "kept_by": EVIL, "turns": 1, "engine": EVIL, "version": 1}
    live = {"live": 1, "sessions": [{**session, "state": EVIL}]}
    ended = {"abandoned": [], "failed": {EVIL: EVIL}}
    segment = {"start": 0, "version": 1, "engine": EVIL, "evidence": EVIL}
    trajectory = {
        "leaf": 0,
        "leaves": 1,
        "group_id": EVIL,
        "sample_index": 0,
        "reward": 1.0,
        "status": EVIL,
        "turns": 1,
        "token_ids": [1],
        "loss_mask": [1],
        "logprobs": [0.0],
        "versions": [1],
        "tags": {EVIL: EVIL},
        "segments": [segment],
    }
    span = {"turn": 0, "sampled": True, "start": 0, "end": 1, "text": EVIL}
    recorded = {"trajectory": trajectory, "spans": [span], "tokens": []}
    for lines in (
        sessions_view.describe(live, None),
        sessions_view.describe_abandoned(ended),
        repack_view.describe({"plans": [spoiled(PLAN)]}, dry_run=True),
        described({"session_id": EVIL, "state": EVIL, "trajectories": [recorded]}),
    ):
        say(*lines)
        out = capsys.readouterr().out
        for sequence in STEERING:
            assert sequence not in out
        assert not [line for line in out.splitlines() if line.startswith("FORGED")]
        assert "FORGED" in out
    with pytest.raises(SystemExit):
        report_findings([Finding(EVIL, right=False, found=EVIL, remedy=EVIL)])
    check(capsys.readouterr().out)


def test_an_error_that_ends_a_command() -> None:
    @click.command()
    def failing() -> None:
        raise Failed(str(Unavailable(EVIL, hint=EVIL)))

    check(CliRunner().invoke(failing).output)


PRINTING = re.compile(r"\b(Text|Console|click\.echo|click\.ClickException|basicConfig)\(")
PLACES = {
    "protos/terminal.py": "the one place",
    "protos/findings.py": "a coloured word before `one_line`",
    "protos/process.py": "the log of daemons, by `OneLine`",
    "agents_env/cli.py": "names of its own commands",
    "agents_env/run.py": "JSON, in ASCII",
    "agents_env/session_view.py": "JSON, in ASCII",
    "gateway/cli.py": "JSON, in ASCII, and what a backup counted",
    "gateway/faultkit/cli.py": "its own addresses",
    "gateway/tables/cli.py": "what it counted",
    "gateway/operate/keys.py": "keys that it made",
    "gateway/operate/top.py": "its own words",
    "gateway/engines/embedded/cli.py": "what it measured",
    "paramserver/cli_views.py": "JSON, in ASCII",
    "paramserver/cli.py": "its own addresses",
    "paramserver/credentials/commands.py": "identities that it made",
}


def test_nothing_else_prints() -> None:
    roots = ("protos", "gateway", "paramserver", "agents_env")
    files = [path for root in roots for path in sorted(Path(root).rglob("*.py")) if "laminar" not in path.parts]
    found = {str(path) for path in files if PRINTING.search(path.read_text())}
    assert found - PLACES.keys() == set(), "print by `protos.terminal`"
    assert PLACES.keys() - found == set(), "these print no more"


def test_a_pipe_breaks_no_line() -> None:
    assert (terminal.console().is_terminal, terminal.console().width) == (False, terminal.PIPE_COLUMNS)
