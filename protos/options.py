"""Types of options that more than one command has."""

from __future__ import annotations

import math

import click

from protos.engines import is_host_port
from protos.process import LOG_LEVELS


class HostPort(click.ParamType[str]):
    """HOST:PORT."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        if not is_host_port(str(value)):
            self.fail(f"{value!r} is not HOST:PORT, like 127.0.0.1:7000", param, context)
        return str(value)


class Name(click.ParamType[str]):
    """Not empty: a shell variable that is not set names nothing."""

    name = "name"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        if not str(value).strip():
            self.fail("it is empty", param, context)
        return str(value)


class Number(click.FloatRange):
    """A number in a range: `nan` is in none, though it is neither below nor above it."""

    def convert(self, value: float, param: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, param, context))
        if math.isnan(number):
            self.fail(f"{value} is no number", param, context)
        return number


LOG_LEVEL = click.Choice(LOG_LEVELS)

PORT_MAX = 65535
PORT = click.IntRange(0, PORT_MAX)
"""To listen on; 0 takes a free one."""
