"""What `paramserver status` shows of a chain: its order, why it is so, rates, what each relay holds."""

from __future__ import annotations

import dataclasses

import pytest

from paramserver.cli_views import show_status
from paramserver.client import HopStatus, ModelStatus, PinStatus, RefusedLoad, RelayStatus, TransferStatus

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
    assert "registry away: going on with the last view" in text
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
