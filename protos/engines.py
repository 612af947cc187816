"""How engines, and the relays beside them, are named: the words that relays and the gateway share."""

from __future__ import annotations

from urllib.parse import urlsplit

from protos.errors import UnsupportedField

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


def is_address(url: str) -> bool:
    """Whether an engine can be asked there: http or https, a host, and no port that none can have."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        return False
