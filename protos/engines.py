"""How engines, and the relays beside them, are named: the words that relays and the gateway share."""

from __future__ import annotations

from urllib.parse import urlsplit

from protos.errors import UnsupportedField

HOST_MAX = 253
"""Characters of a host's name, as the DNS has it."""

ENGINE_KINDS = {
    "vllm": "vLLM, its OpenAI server in development mode",
    "sglang": "SGLang, its own API",
    "embedded": "`gateway engine`, which speaks vLLM's API",
}


def check_kind(kind: str, said: str) -> None:
    """UnsupportedField unless there is an adapter for `kind`; `said` is where it was named."""
    if kind not in ENGINE_KINDS:
        raise UnsupportedField(f"{said}: no adapter for {kind!r}", hint=f"known kinds: {', '.join(ENGINE_KINDS)}")


def is_host_port(address: str) -> bool:
    """Whether `address` is HOST:PORT, as relays and etcd are named."""
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536


def base_url_hint(url: str) -> str:
    """What to try instead of an address that was copied from an OpenAI client, which has the API's path in it."""
    return f"without the /v1: {url.rstrip('/').removesuffix('/v1')}" if url.rstrip("/").endswith("/v1") else ""


def is_address(url: str) -> bool:
    """Whether an engine can be asked there: http or https, a host that can be, and no port that none can have."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")
        return parts.scheme in ("http", "https") and 0 < len(host) <= HOST_MAX and parts.port != 0
    except ValueError:  # the port is no number, or too large; a part of the host is empty, or too long
        return False
