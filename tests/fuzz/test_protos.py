"""Calls of the relay's gRPC service with any message: an answer, or an error of our vocabulary."""

from __future__ import annotations

import random
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from protos.laminar.v1 import relay_pb2 as pb
from tests.fuzz.cases import EXAMPLES, ODD_NAMES, SEED, Case, kept, mutated
from tests.fuzz.watched import unharmed
from tests.support.relays import Relays
from trainer_client import Publisher

SERVICE = pb.DESCRIPTOR.services_by_name["Relay"]
PATIENCE_S = 0.5
"""Streams, and calls that wait for something, are given up after it."""
WAITS = ("Watch", "HoldRun", "Stage", "Announce", "Commit", "Drop", "Locate")
LEFT_OUT = ("Drain", "Adopt")
"""They are to change the relay as a whole, and do: no later case would meet the same relay."""
INTEGERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**53, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 1e-308)

pytestmark = pytest.mark.slow


def message_of(method: str) -> Any:
    return getattr(pb, SERVICE.methods_by_name[method].input_type.name)


def filled(chance: random.Random, message: Any, depth: int = 0) -> None:
    """Some of its fields, with values at the edges of their types."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.4:
            continue
        repeated = field.is_repeated
        if field.type == field.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                getattr(message, field.name)[_value(chance, field.message_type.fields_by_name["key"])] = "x"
            elif depth < 3:
                inner = getattr(message, field.name).add() if repeated else getattr(message, field.name)
                filled(chance, inner, depth + 1)
        elif repeated:
            getattr(message, field.name).extend(_value(chance, field) for _ in range(chance.choice((1, 2, 70))))
        else:
            setattr(message, field.name, _value(chance, field))


def _value(chance: random.Random, field: Any) -> Any:
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            names = [name for name in ODD_NAMES if name.isascii() or "\ud800" not in name]
            return chance.choice([*names, "policy", "fuzzed", "sealed", "F32"])
        case field.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case field.CPPTYPE_INT32:
            return chance.choice([number for number in INTEGERS if -(2**31) <= number < 2**31])
        case field.CPPTYPE_DOUBLE:
            return chance.choice(FLOATS)
        case _:
            return chance.choice(INTEGERS)


def requests(method: str) -> list[Case]:
    """The kept ones, mutations of their bytes, and messages that are filled field by field."""
    chance = random.Random(f"protos {method} {SEED}")
    [seed] = [case for case in kept("protos") if case.of == method]
    whole = json_format.Parse(seed.data, message_of(method)())
    start = Case(seed.name, "", whole.SerializeToString())
    found = [start, *(mutated(chance, start, f"{method}-{SEED}-{number}") for number in range(EXAMPLES))]
    for number in range(EXAMPLES):
        message = message_of(method)()
        message.CopyFrom(whole)
        filled(chance, message)
        found.append(Case(f"{method}-{SEED}-filled-{number}", "", message.SerializeToString()))
    return found


def parses(method: str, data: bytes) -> bool:
    try:
        message_of(method).FromString(data)
    except DecodeError:
        return False
    return True


def call(channel: grpc.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """The call's status; that of a stream that goes on is OK."""
    path = f"/{SERVICE.full_name}/{method}"
    timeout_s = PATIENCE_S if method in WAITS else 30.0
    try:
        if SERVICE.methods_by_name[method].server_streaming:
            next(channel.unary_stream(path)(data, timeout=timeout_s), None)
        else:
            channel.unary_unary(path)(data, timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and method in WAITS:
            return grpc.StatusCode.OK
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


UNFORESEEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


def test_a_relay_answers_any_message(relays: Relays) -> None:
    daemon = relays.start("a")
    methods = [method.name for method in SERVICE.methods if method.name not in LEFT_OUT]
    assert {case.of for case in kept("protos")} == {*methods, "Adopt"}
    counts = dict.fromkeys(methods, 0)
    with Publisher(daemon.ready["grpc"], "policy") as publisher:
        publisher.publish({"w": np.arange(5000, dtype=np.float32)}, step=1)
    with grpc.insecure_channel(daemon.ready["grpc"]) as channel, unharmed(daemon):
        for method in methods:
            for case in requests(method):
                status = call(channel, method, case.data)
                whole = parses(method, case.data)
                counts[method] += status is grpc.StatusCode.OK
                assert status not in UNFORESEEN or not whole, f"{case}: {status}"
    print(f"answered: {counts}")
    assert all(counts[method] for method in ("Status", "Versions", "Acquire", "Locate", "Stage", "ReportLoad")), counts
