"""What an answer is held to: a JSON schema or a pattern, from a request's `response_format` or `structured_outputs`."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.openai_errors import BadField, RefusedField
from gateway.api.openai_types import ChatRequest, CompletionRequest
from gateway.core.sampling import CONSTRAINING
from gateway.ports import ModelInfo


def constraint(body: ChatRequest | CompletionRequest, model: ModelInfo) -> tuple[str, str]:
    """The JSON schema or the pattern that the answer is held to; both empty for none."""
    schema, field = response_schema(body) if isinstance(body, ChatRequest) else "", "response_format"
    regex = ""
    if (wanted := body.structured_outputs) is not None:
        if sum((bool(schema), wanted.json is not None, bool(wanted.regex))) != 1:
            raise BadField(
                "structured_outputs", "an answer has one constraint", hint="`json` or `regex`, and no `response_format`"
            )
        field, regex = "structured_outputs", wanted.regex or ""
        schema = schema if wanted.json is None else _schema_text(wanted.json)
    if (schema or regex) and not model.constrains:
        raise RefusedField(
            field,
            "no engine of this gateway can constrain an answer",
            hint=f"add one of these kinds: {', '.join(sorted(CONSTRAINING))}",
        )
    return schema, regex


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, dict):
        return msgspec.json.encode(schema).decode()
    try:
        msgspec.json.decode(schema, type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise BadField("structured_outputs.json", f"a JSON schema is an object: {e}") from e
    return schema


def response_schema(body: ChatRequest) -> str:
    """The JSON schema that constrains the answer, as text; empty for none."""
    wanted = body.response_format
    if wanted is None or wanted == {"type": "text"}:
        return ""
    if wanted == {"type": "json_object"}:
        return '{"type":"object"}'
    described = wanted.get("json_schema")
    if wanted.get("type") != "json_schema" or not isinstance(described, dict):
        raise RefusedField(
            "response_format",
            f"`response_format` of type {wanted.get('type')!r} is not supported",
            hint="'text', 'json_object', or 'json_schema' with its `json_schema`",
        )
    if not isinstance(schema := described.get("schema"), dict):
        raise BadField("response_format.json_schema.schema", "a JSON schema is an object")
    return msgspec.json.encode(schema).decode()
