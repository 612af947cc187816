"""The credentials that a client of a gateway sends: the API key of an argument, or of the environment."""

from __future__ import annotations

import os

from protos.errors import InvalidRequest

API_KEY_VARIABLE = "LAMINAR_API_KEY"
KEY_HINT = f"set {API_KEY_VARIABLE} to a key of the gateway's key file"


def bearer(api_key: str | None = None) -> dict[str, str]:
    """The header with `api_key`, or with the one in LAMINAR_API_KEY; none where neither is there. Raises InvalidRequest
    for what no header can hold."""
    key = (os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key).strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise InvalidRequest("the API key has spaces, or characters that are not of ASCII", hint=KEY_HINT)
    return {"Authorization": f"Bearer {key}"}
