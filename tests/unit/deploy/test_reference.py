"""docs/reference: the pages are what the code makes now, they have every part of it, and nothing of a machine."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import click
import pytest

from deploy.reference import configuration, http_api, metrics, pages, rpc
from deploy.setup_env import ROOT
from gateway.api.openapi import schema
from gateway.operate.metrics import METRICS as OF_GATEWAY
from gateway.runtime.counters import Counters
from paramserver.daemon.metrics import METRICS as OF_RELAY
from protos.laminar.v1 import relay_pb2
from tests.unit.deploy.command_lines import COMMANDS

MADE = {name: page() for name, page in pages.PAGES.items()}
OF_THE_PLAN = {"/dev/shm/laminar-USER/NAME"}
"""Absolute paths that texts name for every machine."""


def every_command() -> list[configuration.Command]:
    return [one for top in configuration.programs() for one in configuration.commands(top)]


OF_TESTS = {"attacks.md", "relay-attacks.md", *(f"learning-curve.{suffix}" for suffix in ("md", "png", "svg"))}
"""What attempts get, which tests compare, and what `make bench-learning` writes."""


def part(page: str, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", MADE[page], re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no part {heading!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    heads = {
        line for line, below in zip(text.splitlines(), text.splitlines()[1:], strict=False) if below[:5] == "| ---"
    }
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines if line not in heads]


def test_the_pages_are_fresh() -> None:
    assert pages.stale() == [], "run `make reference`"


def test_a_stale_page_is_named_with_what_mends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main([], tmp_path) == 0
    assert pages.main(["--check"], tmp_path) == 0
    (tmp_path / "http.md").write_text("old")
    (tmp_path / "grpc.md").unlink()
    assert pages.main(["--check"], tmp_path) == 1
    said = capsys.readouterr().err
    assert said == "stale: docs/reference/http.md, docs/reference/grpc.md; run `make reference` and commit\n"
    assert pages.main(["--wrong"], tmp_path) == 2


def test_the_folder_has_the_pages_and_no_others() -> None:
    assert {path.name for path in (ROOT / "docs/reference").iterdir()} == set(pages.PAGES) | OF_TESTS


# -- options


def test_programs_are_those_that_are_installed() -> None:
    assert configuration.PROGRAMS == COMMANDS


def test_every_command_and_option_is_on_the_page() -> None:
    found = every_command()
    assert {"paramserver serve", "gateway serve", "gateway engine", "gateway keys new", "agents-env eval code"} <= {
        one.path for one in found
    }
    for one in found:
        text = part("configuration.md", one.path)
        if isinstance(one.command, click.Group) or "Its options are those of [" in text:
            continue
        shared = part("configuration.md", one.path.rpartition(" ")[0])
        for row in one.rows():
            assert row[0].replace("|", "\\|") in text or row[0] in shared, f"{one.path} {row[0]}"


def test_options_that_stand_elsewhere_are_those_of_the_daemon() -> None:
    words = "without `--log-level`, `--log-format`, `--ready-file`, and"
    page = part("configuration.md", "gateway doctor")
    assert f"Its options are those of [`gateway serve`](#gateway-serve), {words}" in page
    assert re.findall(r"^\| `(--[\w-]+)`", page, re.MULTILINE) == ["--wait-s"]


def test_every_option_says_what_it_is() -> None:
    unclear = [
        f"{one.path} {row[0]}"
        for one in every_command()
        for row in one.rows()
        if row[0].startswith("`-") and not row[4]
    ]
    assert unclear == []


@pytest.mark.parametrize(
    ("command", "row"),
    [
        (
            "paramserver serve",
            "| `--name` | text | this host's name | `PARAMSERVER_SERVE_NAME` | Name of this relay: unique among "
            "relays, and the same after a restart. |",
        ),
        (
            "paramserver serve",
            "| `--pool-bytes` | size | `4GiB` | `PARAMSERVER_SERVE_POOL_BYTES` | Memory for snapshots, allocated at "
            "start: about four times a version. |",
        ),
        (
            "paramserver serve",
            "| `--stripes` | integer, 1 to 16 | `2` | `PARAMSERVER_SERVE_STRIPES` | TCP connections per hop. |",
        ),
        (
            "gateway serve",
            "| `--probe` / `--no-probe` | flag | on |  | Request one token of each engine before and after a load, to "
            "verify that it computes with the new weights. |",
        ),
        (
            "gateway serve",
            "| `--kv-max` | number, above 0, at most 1 | `0.9` |  | Share of an engine's KV cache that turns may "
            "fill. |",
        ),
        ("agents-env exec", "| `--time-limit-s` | seconds, above 0 | `3600` | Limit of one run of the program. |"),
    ],
)
def test_a_row_has_the_value_the_default_and_the_variable(command: str, row: str) -> None:
    assert row in part("configuration.md", command)


def test_a_computed_default_without_a_text_is_refused() -> None:
    command = click.Command("c", params=[click.Option(["--host"], default=socket.gethostname)])
    with pytest.raises(ValueError, match="program --host: a computed default needs a text"):
        configuration.Command("program", command, click.Context(command)).rows()


# -- HTTP


def test_every_route_is_on_the_page() -> None:
    for path, methods in schema()["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in MADE["http.md"]
    assert "Also: `POST /sessions/{sid}/v1/messages`, `POST /s/{sid}/v1/messages`." in part(
        "http.md", "POST /v1/messages"
    )


def test_every_field_of_a_body_says_what_it_is() -> None:
    document = schema()
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].removeprefix(http_api.REF)
        for methods in document["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation
    ]
    assert len(set(bodies)) > 20
    fields = {name: document["components"]["schemas"][name]["properties"] for name in bodies}
    unclear = [
        f"{name}.{field}" for name, found in fields.items() for field in found if "description" not in found[field]
    ]
    assert unclear == []
    assert [
        one["name"]
        for methods in document["paths"].values()
        for operation in methods.values()
        for one in operation["parameters"]
        if one["in"] == "query" and not one.get("description")
    ] == []


def test_a_route_has_its_callers_fields_and_responses() -> None:
    text = part("http.md", "POST /sessions/{sid}/finish")
    assert (
        "- For: roles `admin`, `trainer`; role `agent` for what keys of its name have made; the session's finish key."
        in text
    )
    assert "- Response: `200`, [Finished](#finished) or [SessionAnswer](#sessionanswer)." in text
    assert "| `sid` | path | string | required |" in text
    assert (
        '| `status` | `"completed"`, `"truncated"` | `"completed"` | truncated: a limit ended it, not the agent. |'
        in text
    )
    assert "- For: everybody, without a key." in part("http.md", "GET /healthz")
    assert "| `429` | `out_of_capacity` |" in part("http.md", "Errors")


# -- gRPC


def test_every_service_method_and_message_is_on_the_page() -> None:
    described = relay_pb2.DESCRIPTOR
    for service in described.services_by_name.values():
        methods = {row[0] for row in rows(part("grpc.md", service.full_name))}
        assert methods == {f"`{method.name}`" for method in service.methods}
    for message in described.message_types_by_name.values():
        fields = {(row[0], row[2]) for row in rows(part("grpc.md", message.name))}
        assert fields == {(f"`{field.name}`", str(field.number)) for field in message.fields}


def test_every_method_says_what_it_does() -> None:
    found = [method for source in rpc.sources().values() for service in source.services for method in service.methods]
    assert found
    assert [method.name for method in found if not method.comment] == []


def test_comments_belong_to_what_they_stand_at() -> None:
    source = rpc.parse(
        "// The file.\n"
        'syntax = "proto3";\n'
        "package a.b;\n"
        "service S {\n  // Does.\n  // It all.\n  rpc M(A) returns (stream B);\n}\n"
        "// Of nothing.\n\n"
        "message A { repeated string x = 1; }\n"
        "message B {\n  // Above.\n  map<string, int64> y = 2;  // beside\n}\n"
        "message C {}\n"
    )
    assert (source.package, source.comment) == ("a.b", "The file.")
    assert source.services[0].methods == [rpc.Method("M", "A", "stream B", "Does. It all.")]
    a, b, c = source.messages
    assert (a.comment, a.fields) == ("", [rpc.Field("x", "string", "repeated", "1", "")])
    assert b.fields == [rpc.Field("y", "map<string, int64>", "", "2", "Above. beside")]
    assert c.fields == []


def test_a_line_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 1: .* does not know .enum E"):
        rpc.parse("enum E {")


# -- metrics


def test_every_metric_is_on_the_page_with_its_help() -> None:
    for heading, table in (("Relay", OF_RELAY), ("Gateway", OF_GATEWAY)):
        found = rows(part("metrics.md", heading))
        assert len(found) == len(table)
        for metric, row in zip(table, found, strict=True):
            assert row[0].startswith(f"`{metric.name}")
            assert metric.help
            assert metric.help.replace("<", "\\<") in row
    names = set(re.findall(r"`(laminar_\w+)`", MADE["metrics.md"]))
    assert {"laminar_relay_sent_bytes_total", "laminar_relay_newest_version_age_seconds"} <= names
    assert {
        f"laminar_gateway_{name}_total" for name in Counters.__dataclass_fields__ if name != "cuts_by_reason"
    } <= names


def test_metrics_that_alerts_name_are_on_the_page() -> None:
    names = set(re.findall(r"\blaminar_[a-z_]+[a-z]\b", (ROOT / "deploy/prometheus/alerts.yaml").read_text()))
    assert names
    assert names <= set(re.findall(r"`(laminar_\w+)`", MADE["metrics.md"]))


# -- all


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_has_nothing_of_this_machine(name: str) -> None:
    text = MADE[name]
    paths = set(re.findall(r"(?<![\w.`\]}/:*-])/(?:home|root|tmp|usr|var|opt|work|dev|etc)/[\w./-]*", text))
    assert paths <= OF_THE_PLAN
    assert str(ROOT) not in text


@pytest.mark.parametrize("name", pages.PAGES)
def test_every_table_has_as_many_cells_in_each_row(name: str) -> None:
    width = 0
    for line in MADE[name].splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert cells == width or width == 0 or cells == 0, line
        width = cells


def test_metric_names_come_from_a_scrape() -> None:
    served = {metric.name: family.type for metric, family in metrics.served(OF_RELAY)}
    assert served["laminar_relay_sent"] == "counter"
    assert served["laminar_relay_pins"] == "gauge"
