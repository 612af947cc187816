"""A pytest plugin: clients of httpx share the context in which they trust the host's CAs.

Each client reads all of the host's certificates, in 20 ms of processor time, and hundreds of them call loopback alone.
"""

from __future__ import annotations

import functools
import importlib
import os
import ssl
from collections.abc import Callable
from typing import Any

DEFAULTS = ("httpx._transports.default", "httpx2._transports.default")
"""httpx, and the one that openai's client brings in some releases."""
CAS = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def shared(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """`create_ssl_context` of httpx, called once for the default of each environment."""

    @functools.cache
    def default(trust_env: bool, *_: str | None) -> ssl.SSLContext:
        return create(verify=True, cert=None, trust_env=trust_env)

    def create_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return create(verify=verify, cert=cert, trust_env=trust_env)
        return default(trust_env, *map(os.environ.get, CAS))

    return create_ssl_context


def pytest_configure() -> None:
    for name in DEFAULTS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        module.create_ssl_context = shared(module.create_ssl_context)  # type: ignore[attr-defined]
