"""Kinds of engines and what they can do; addresses of engines and relays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from protos.errors import UnsupportedField

URL_NAME = r"^(?!\.{1,2}$)[^\s/?#%]{1,256}$"
"""Of an engine or a group: the name stands in URLs as it is."""
URL_NAME_HINT = "1 to 256 characters without spaces and any of / ? # %, and not `.` or `..`"
HOST_MAX = 253
"""Characters of a host's name, the limit of the DNS."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What engines of one kind can do, as far as it decides where a request or a version may go."""

    text_routes: Mapping[str, str]  # paths of its own API for text: of "chat" and "completion"
    constrains: bool = True  # holds an answer to a JSON schema, a pattern or tags
    truncated_logprobs: bool = True  # reports logprobs of the distribution after `top_p`, `top_k` and their like
    penalises_prompt: bool = True  # `repetition_penalty` counts the prompt's tokens as well
    lacks: frozenset[str] = frozenset()  # sampling parameters that it does not take: any of core.types.SamplingParams
    loads: bool = True  # takes published versions; False: it serves what it was started with, and has no relay


_OPENAI = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
ENGINE_KINDS = {
    "vllm": EngineKind(_OPENAI),  # its OpenAI server in development mode
    "sglang": EngineKind(_OPENAI, truncated_logprobs=False, penalises_prompt=False),  # its own API
    # `gateway engine` speaks vLLM's API, without chat templates and grammars
    "embedded": EngineKind({"completion": "/v1/completions"}, constrains=False),
}
"""By the name that options and registrations have."""


def check_kind(kind: str, source: str) -> None:
    """UnsupportedField unless there is an adapter for `kind`; `source` names the option or record that has it."""
    if kind not in ENGINE_KINDS:
        raise UnsupportedField(f"{source}: no adapter for {kind!r}", hint=f"known kinds: {', '.join(ENGINE_KINDS)}")


def check_relay(kind: str, relay: str | None, source: str) -> None:
    """UnsupportedField where an engine of a kind that loads no versions is to load them from `relay`."""
    if relay and not ENGINE_KINDS[kind].loads:
        raise UnsupportedField(
            f"{source}: engines of kind {kind} load no published versions, from {relay} or any other relay",
            hint="leave the relay out: such an engine serves the version that it was started with",
        )


def is_host_port(address: str) -> bool:
    """Whether `address` is HOST:PORT, the form of addresses of relays and etcd."""
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536


def base_url_hint(url: str) -> str:
    """The address to use instead of one that ends in `/v1`, as copied from an OpenAI client; "" for any other."""
    return f"without the /v1: {url.rstrip('/').removesuffix('/v1')}" if url.rstrip("/").endswith("/v1") else ""


def is_address(url: str) -> bool:
    """Whether `url` can be an engine's address: http or https, a valid host, a valid port if there is one, and nothing
    behind the path, to which the routes of an engine are appended."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")
        whole = parts.scheme in ("http", "https") and 0 < len(host) <= HOST_MAX and parts.port != 0
        return whole and "?" not in url and "#" not in url
    except ValueError:  # the port is no number, or too large; a part of the host is empty, or too long
        return False
