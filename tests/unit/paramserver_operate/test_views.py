"""What `paramserver status` shows of a chain: its order, why it is so, rates, what each relay holds."""

from __future__ import annotations

import dataclasses
import json

import pytest

from paramserver.cli_views import show_status, show_versions
from paramserver.client import (
    HopStatus,
    ModelStatus,
    PinStatus,
    RefusedLoad,
    RelayStatus,
    SealedVersion,
    TransferStatus,
)
from protos.version_labels import read_labels

MIB = 1 << 20
HOPS = (
    HopStatus("m", "", 0.0, (7, 8), "", alive=True),
    HopStatus("b", "m", 2.5e9, (7, 8), "", alive=True, transport="nixl"),
    HopStatus("c", "b", 1e8, (7,), "its hop ran at 4% of the others for 2 versions", alive=True),
    HopStatus("late", "b", 1e9, (8,), "", alive=False),
)
REFUSED = (RefusedLoad(8, "e0", "version 8 computes NaN", 3, 0.0),)
STATUS = RelayStatus(
    relay="m",
    instance="i1",
    members=("b", "c", "m"),
    models=(ModelStatus("policy", "m", "s/5", 3, ("m", "b", "c"), (7, 8), 8, "at the tail: c", HOPS, REFUSED),),
    transfers=(
        TransferStatus("policy", 9, "", 5 * MIB, 20 * MIB),
        TransferStatus("policy", 10, "b", 0, 20 * MIB, "tcp"),
    ),
    pins=(PinStatus("policy", 8, "engine [/x]", 12.34),),
    pool_bytes=64 * MIB,
    used_bytes=32 * MIB,
    quarantined_bytes=0,
    cut_off=("z",),
    registry_reachable=False,
    data_address="h:1",
    transport="nixl",
)


def test_status_shows_what_keeps_a_relay_from_its_lease_and_that_it_drains(capsys: pytest.CaptureFixture[str]) -> None:
    show_status(dataclasses.replace(STATUS, draining=True, trouble="the name m was taken"), as_json=False)
    text = capsys.readouterr().out
    assert "TROUBLE: the name m was taken" in text
    assert "draining: it serves what it has and takes no more" in text
    show_status(STATUS, as_json=False)
    text = capsys.readouterr().out
    assert "TROUBLE" not in text
    assert "draining" not in text


def test_status_tells_the_chain_in_order_with_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    show_status(STATUS, as_json=False)
    text = capsys.readouterr().out
    assert "registry not usable: going on with the last view" in text
    assert "model policy: master m, epoch s/5, newest sealed 8, held here: 7 8" in text
    assert "chain, plan 3 (at the tail: c):" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "m", "7", "8"] in rows
    assert ["2", "b", "7", "8", "m", "nixl", "2.328", "GiB/s"] in rows
    assert any(row[:4] == ["3", "c", "7", "b"] and "slow:" in row for row in rows)
    assert ["late", "8", "b", "953.7", "MiB/s", "away"] in rows
    assert "coming: policy version 9 from nobody yet, 25% of 20 MiB" in text
    assert "coming: policy version 10 from b over tcp, 0% of 20 MiB" in text
    assert "transport nixl" in text
    assert "pin: policy version 8 by engine [/x], 12.3 s left" in text
    assert "cut off: z" in text
    assert "engine e0 refused version 8 3 times: version 8 computes NaN" in text


PLAIN = SealedVersion("policy", 7, 70, "job", "d7", 64 * MIB, 0.0)
NOTED = dataclasses.replace(PLAIN, version=8, labels=read_labels({"note": "lower [rate]", "of_tomorrow": "x"}))


def test_labels_are_columns_of_versions_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    show_versions("policy", [PLAIN, NOTED], as_json=False)
    header, plain, noted = capsys.readouterr().out.splitlines()
    assert header.split()[-4:] == ["root", "digest", "note", "of_tomorrow"]
    assert plain.split()[-1] == "d7"
    assert noted.split()[-4:] == ["d7", "lower", "[rate]", "x"]
    other = dataclasses.replace(PLAIN, labels=read_labels({"of_tomorrow": "y"}))
    show_versions("policy", [other, NOTED], as_json=False)
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["note", "of_tomorrow"], "in the table's order"
    show_versions("policy", [PLAIN], as_json=False)
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["root", "digest"]


def test_labels_are_in_the_json_of_versions_whether_given_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    show_versions("policy", [PLAIN, NOTED], as_json=True)
    plain, noted = map(json.loads, capsys.readouterr().out.splitlines())
    assert (plain["labels"]["note"], noted["labels"]["note"]) == ("", "lower [rate]")


def test_status_shows_the_labels_of_the_versions_that_the_relay_holds(capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = STATUS.models
    status = dataclasses.replace(STATUS, models=(dataclasses.replace(model, sealed=(PLAIN, NOTED)),))
    show_status(status, as_json=False)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version ")]
    assert shown == ["version 8 note: lower [rate]", "version 8 of_tomorrow: x"]
    show_status(status, as_json=True)
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert [one["labels"]["note"] for one in found["sealed"]] == ["", "lower [rate]"]
    assert len({PLAIN, NOTED, dataclasses.replace(NOTED)}) == 2, "versions are hashed as before"
