"""docs/reference/http.md: every route of the gateway, from its table and the OpenAPI schema that it serves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import gateway.api.errors
import gateway.api.responses.parser
import gateway.engines.base
import protos.errors
from deploy.reference import markdown
from deploy.reference.markdown import code, first_sentence, link, number, prose, table
from gateway.api.calls.fields import NEUTRAL
from gateway.api.openai.routes import PREFIXES
from gateway.api.openapi import schema
from gateway.api.routes import GROUPS, Json, Route
from gateway.core.access import Operation
from protos.access.roles import ROLES
from protos.errors import LaminarError

REF = "#/components/schemas/"
ERROR_MODULES = (protos.errors, gateway.api.errors, gateway.api.responses.parser, gateway.engines.base)
"""Where the errors are defined that a client may get."""
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
EXACT = 10**15 - 1
"""Bounds from here on only keep a number exact."""
FIELDS = ("field", "type", "default", "what it is")

INTRO = """
A running gateway serves the same as a schema, `GET /openapi.json`. Bodies are JSON. A field that is not listed is
refused by name. Without access control everybody may use every route; with `--api-keys` the roles and keys that a
route names may: [security.md](../security.md) explains them. [agents.md](../agents.md),
[experience.md](../experience.md) and [prompt-pool.md](../prompt-pool.md) explain how the routes belong together.
"""
HEADERS = """
A model call may stand below the gateway's root, or below a session's URL. It may have these headers:
"""
ANSWER_HEADERS = """
Its response has these:
"""
ERRORS = """
Every route may respond with an error. The body is [Error](#error), on the routes of Anthropic's API
[AnthropicError](#anthropicerror); `message` says what is wrong and what would be right, `code` is one of the table.
`Retry-After` says when a repeated request may succeed, and `x-should-retry: false` that none will. A stream that has
begun ends with the error as its last event. A body larger than `--body-bytes-max` gets 413 with the code `too_large`, a
method that a path does not have 405 with `method_not_allowed`.
"""
OBJECTS = """
What bodies and responses are made of, in the order of their names.
"""


def page() -> str:
    document = schema()
    parts = [part for title, routes in GROUPS.items() for part in _group(title, routes, document)]
    return markdown.page(
        "HTTP API of the gateway",
        INTRO,
        *_contents(),
        *parts,
        "## Errors",
        ERRORS,
        table(("status", "code", "when"), _errors()),
        "## Objects",
        OBJECTS,
        *(part for name in _objects(document) for part in _object(name, document)),
    )


def _contents() -> Iterator[str]:
    yield "\n".join(
        [
            *(
                f"- {link(title, title)}: {', '.join(map(_linked, _merged(routes)))}"
                for title, routes in GROUPS.items()
            ),
            f"- {link('Errors', 'Errors')}, {link('Objects', 'Objects')}",
        ]
    )


def _linked(routes: Sequence[Route]) -> str:
    return link(code(_call(routes[0])), _call(routes[0]))


def _call(route: Route) -> str:
    return f"{route.method.upper()} {route.path}"


def _merged(routes: Iterable[Route]) -> list[list[Route]]:
    """Routes that differ by their prefix alone stand together, the one below the root first."""
    found: dict[tuple[str, str], list[Route]] = {}
    for route in routes:
        found.setdefault((route.method, _below_prefix(route.path)), []).append(route)
    return list(found.values())


def _below_prefix(path: str) -> str:
    """A model call's path without the session that it may begin with."""
    below = next((path.removeprefix(prefix) for prefix in PREFIXES if prefix and path.startswith(f"{prefix}/")), path)
    return below if below.startswith(("/v1/", "/inference/")) else path


def _group(title: str, routes: Sequence[Route], document: Json) -> Iterator[str]:
    yield f"## {title}"
    turn = next((route for route in routes if route.turn), None)
    if turn is not None:
        operation = document["paths"][turn.path][turn.method]
        headers = [one for one in operation["parameters"] if one["in"] == "header"]
        yield HEADERS
        yield table(("header", "what it is"), [(code(one["name"]), prose(one["description"])) for one in headers])
        answered = operation["responses"][str(turn.status)]["headers"]
        yield ANSWER_HEADERS
        yield table(
            ("header", "what it is"), [(code(name), prose(one["description"])) for name, one in answered.items()]
        )
    for same in _merged(routes):
        yield from _route(same, document)


def _route(same: Sequence[Route], document: Json) -> Iterator[str]:
    route = same[0]
    operation = document["paths"][route.path][route.method]
    yield f"### {_call(route)}"
    yield prose(operation["summary"])
    facts = [f"- For: {_who(route.operation)}."]
    if len(same) > 1:
        facts.insert(0, f"- Also: {', '.join(code(_call(one)) for one in same[1:])}.")
    facts += [f"- Response: {text}." for text in _responses(operation)]
    yield "\n".join(facts)
    parameters = [one for one in operation["parameters"] if one["in"] != "header"]
    yield table(
        ("parameter", "in", "type", "default", "what it is"),
        [
            (
                code(one["name"]),
                one["in"],
                _type(one["schema"]),
                "required" if one.get("required") else "",
                prose(one.get("description", "")),
            )
            for one in parameters
        ],
    )
    if "requestBody" in operation:
        body = operation["requestBody"]
        (name,) = _names(body["content"]["application/json"]["schema"])
        yield f"Body, {'required' if body['required'] else 'which may be left out'}: {code(name)}."
        yield from _fields(name, document)


def _who(operation: Operation) -> str:
    """The roles and keys that may use a route."""
    if operation.public:
        return "everybody, without a key"
    roles = [role for role in ROLES if role in operation.roles]
    own = [role for role in ROLES if role in operation.own]
    who = [f"{'role' if len(roles) == 1 else 'roles'} {', '.join(map(code, roles))}"]
    who += [f"role {code(role)} for what keys of its name have made" for role in own]
    who += ["the session's own key"] if operation.session_key else []
    who += ["the session's finish key"] if operation.finish_key else []
    return "; ".join(who)


def _responses(operation: Json) -> Iterator[str]:
    """A text for each status that is no error, with the names of bodies."""
    for status, response in operation["responses"].items():
        if not status.isdigit() or status in ("401", "403"):
            continue
        content: Mapping[str, Json] = response.get("content", {})
        kinds = [code(kind) for kind in content if kind != "application/json"]
        names = [link(name, name) for name in _names(content.get("application/json", {}).get("schema", {}))]
        texts = [" or ".join(names)] if names else []
        if "application/json" in content and not names:
            kinds.insert(0, code("application/json"))
        texts += [f"{'also ' if names else ''}{' or '.join(kinds)}"] if kinds else []
        yield f"{code(status)}, {', '.join(texts)}" if texts else code(status)


def _names(found: Json) -> list[str]:
    return [one["$ref"].removeprefix(REF) for one in found.get("anyOf", [found]) if "$ref" in one]


def _objects(document: Json) -> list[str]:
    """The components, without those that only a route shows, as its body."""
    components = document["components"]["schemas"]
    bodies = {route.body.__name__ for routes in GROUPS.values() for route in routes if route.body is not None}
    return sorted(components.keys() - (bodies - set(_refs(components))))


def _refs(found: Any) -> Iterator[str]:
    """The names of all components that others refer to."""
    if isinstance(found, Mapping):
        if isinstance(ref := found.get("$ref"), str):
            yield ref.removeprefix(REF)
        for one in found.values():
            yield from _refs(one)
    elif isinstance(found, list):
        for one in found:
            yield from _refs(one)


def _object(name: str, document: Json) -> Iterator[str]:
    yield f"### {name}"
    yield from _fields(name, document)


def _fields(name: str, document: Json) -> Iterator[str]:
    """What a component is, and tables of its fields: those that do something, and those that do not."""
    found = document["components"]["schemas"][name]
    if "description" in found:
        yield prose(found["description"])
    if "properties" not in found:
        yield f"{_type(found)}."
        return
    fields, required = found["properties"], set(found.get("required", ()))
    neutral = {field: one["enum"] for field, one in fields.items() if one.get("description") == NEUTRAL}
    rows = [
        (code(field), _type(one), _default(one, field in required), prose(one.get("description", "")))
        for field, one in fields.items()
        if field not in neutral
    ]
    yield table(FIELDS, rows) or "It has no fields."
    if neutral:
        yield "These have no effect, and only these values are accepted:"
        values = {field: ", ".join(code(json.dumps(one)) for one in allowed) for field, allowed in neutral.items()}
        yield table(("field", "values"), [(code(field), text) for field, text in values.items()])


def _default(field: Json, required: bool) -> str:
    if required:
        return "required"
    if "default" not in field:
        return "optional"
    value = field["default"]
    return "its fields' own" if isinstance(value, dict) and value else code(json.dumps(value))


# -- a type


def _type(found: Json) -> str:
    """A JSON schema in words."""
    if "$ref" in found:
        name = found["$ref"].removeprefix(REF)
        return link(name, name)
    if "anyOf" in found:
        return _any([_type(one) for one in found["anyOf"]])
    if "enum" in found:
        return ", ".join(code(json.dumps(value)) for value in found["enum"])
    if "const" in found:
        return code(json.dumps(found["const"]))
    kind = found.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return _array(found)
    if kind == "object":
        return _map(found)
    return f"{kind}{_bounds(found)}"


def _any(kinds: list[str]) -> str:
    """One of several types; null, which means that a field is left out, comes last."""
    *others, last = kinds
    comma = "," * any(", " in kind for kind in others)
    return f"{' or '.join(others)}{comma} or {last}" if others else last


def _within(found: Json) -> str:
    text = _type(found)
    return f"({text})" if ", " in text else text


def _array(found: Json) -> str:
    if "prefixItems" in found:
        return f"array of {', '.join(_type(one) for one in found['prefixItems'])}"
    items = found.get("items")
    text = f"array of {_within(items)}" if items else "array"
    return text + _size(found, "minItems", "maxItems", "items")


def _map(found: Json) -> str:
    values = found.get("additionalProperties")
    if "properties" in found:  # of the error bodies, which are no structs
        inner = ", ".join(f"{code(name)}: {_type(one)}" for name, one in found["properties"].items())
        return f"object with {inner}"
    text = f"object of {_within(values)}" if values else "object"
    return text + _size(found, "minProperties", "maxProperties", "entries")


def _bounds(found: Json) -> str:
    """The range of a number, or the length of a text."""
    if "minLength" in found or "maxLength" in found:
        return _size(found, "minLength", "maxLength", "characters")
    bounds = {name: found[name] for name in BOUNDS if abs(found.get(name, EXACT)) < EXACT}
    if "minimum" in bounds and "maximum" in bounds:
        return f", {number(bounds['minimum'])} to {number(bounds['maximum'])}"
    return "".join(f", {BOUNDS[name]} {number(value)}" for name, value in bounds.items())


def _size(found: Json, low: str, high: str, what: str) -> str:
    if low in found and high in found:
        return f", {found[low]:,} to {found[high]:,} {what}"
    if high in found:
        return f", at most {found[high]:,} {what}"
    return f", at least {found[low]:,} {what}" if low in found else ""


# -- errors


def _errors() -> list[tuple[str, str, str]]:
    """Each class of errors that a route may respond with; of one code, the class that others are made of."""
    found: dict[tuple[int, str], type[LaminarError]] = {}
    for kind in _classes():
        found.setdefault((kind.http_status, kind.code), kind)
    return [
        (code(str(status)), code(name), first_sentence(kind.__doc__))
        for (status, name), kind in sorted(found.items(), key=lambda one: one[0])
    ]


def _classes() -> list[type[LaminarError]]:
    """The classes of errors that reach clients, without their base."""
    kinds = (kind for module in ERROR_MODULES for kind in vars(module).values() if _is_of(kind, module.__name__))
    return [kind for kind in kinds if issubclass(kind, LaminarError) and kind is not LaminarError]


def _is_of(kind: object, module: str) -> bool:
    """Whether it is a class that is defined in the module, and not imported there."""
    return isinstance(kind, type) and kind.__module__ == module
