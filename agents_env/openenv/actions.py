"""How a model acts in an OpenEnv environment, by the schema of its actions.

| the schema | what the model does | the action |
|---|---|---|
| one required field, of text | replies | the whole reply is the field |
| OpenEnv's own `call_tool` | calls the environment's tools | the call |
| any other | calls the tool `act` with the schema as its parameters | its arguments |

A reply without a call, where calls are actions, ends the episode: so agents say that they are done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agents_env.environment import Message, Reply, Tool, ToolCall

ACT = "act"
CALLS_MAX = 8
"""Calls of one reply that are played; those after them get an error."""


@dataclass(frozen=True, slots=True)
class Act:
    """One action of a reply. `action` None: it is none, for `error`. `call_id` None: the reply itself is the action."""

    action: Mapping[str, Any] | None
    call_id: str | None = None
    error: str = ""

    def result(self, text: str) -> Message:
        """The message by which the model learns what came of it."""
        if self.call_id is None:
            return {"role": "user", "content": text}
        return {"role": "tool", "content": text, "tool_call_id": self.call_id}


@dataclass(frozen=True, slots=True)
class Actions:
    """`field`: of the action, where replies are actions. `tools`: what the model may call elsewhere."""

    kind: Literal["text", "act", "tools"]
    field: str = ""
    tools: tuple[Tool, ...] = ()

    def of(self, reply: Reply) -> list[Act]:
        """The actions of a reply; none: the model has ended the episode."""
        if self.kind == "text":
            return [Act({self.field: reply.text})]
        return [self._of_call(call, number) for number, call in enumerate(reply.tool_calls)]

    def _of_call(self, call: ToolCall, number: int) -> Act:
        if number >= CALLS_MAX:
            return Act(None, call.call_id, f"error: at most {CALLS_MAX} calls at once")
        names = [tool.name for tool in self.tools]
        if call.name not in names:
            return Act(None, call.call_id, f"error: there is no tool {call.name[:40]!r}, only {', '.join(names)}")
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return Act(None, call.call_id, "error: the arguments are no JSON object")
        if self.kind == "act":
            return Act(arguments, call.call_id)
        return Act({"type": "call_tool", "tool_name": call.name, "arguments": arguments}, call.call_id)


def takes_calls(schema: Mapping[str, Any]) -> bool:
    """Whether the actions are calls of the environment's own tools, over MCP."""
    kind = schema.get("properties", {}).get("type", {})
    return "tool_name" in schema.get("properties", {}) and "call_tool" in (kind.get("const"), kind.get("default"))


def actions(schema: Mapping[str, Any], tools: Sequence[Tool] = ()) -> Actions:
    """`tools`: those of an environment for which `takes_calls`."""
    if takes_calls(schema):
        return Actions("tools", tools=tuple(tools))
    fields = {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}
    required = [name for name in schema.get("required", ()) if name in fields]
    only = required or list(fields)
    if len(only) == 1 and fields[only[0]].get("type") == "string" and "enum" not in fields[only[0]]:
        return Actions("text", field=only[0])
    shown = {key: value for key, value in schema.items() if key not in ("title", "description", "additionalProperties")}
    parameters = {**shown, "type": "object", "properties": fields}
    return Actions("act", tools=(Tool(ACT, schema.get("description") or "Acts in the environment.", parameters),))


def text_of(observation: Mapping[str, Any], fields: Sequence[str] = ()) -> str:
    """What the model reads of an observation: the result of a call, else the only text in it, else its JSON. `fields`:
    those that it reads, instead of all but `metadata`."""
    if "tool_name" in observation and "result" in observation:
        return _result(observation)
    shown = {name: value for name, value in observation.items() if _is_shown(name, value, fields)}
    if not shown and not fields:
        shown = dict(observation.get("metadata") or {})
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False)


def _is_shown(name: str, value: Any, fields: Sequence[str]) -> bool:
    if fields:
        return name in fields
    return name != "metadata" and value is not None and value not in ("", [], {})


def _result(observation: Mapping[str, Any]) -> str:
    if (error := observation.get("error")) is not None:
        return f"error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = observation["result"]
    if isinstance(result, dict) and isinstance(parts := result.get("content"), list):
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return ("error: " if result.get("is_error") else "") + "\n".join(texts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
