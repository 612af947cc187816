"""From a body of the Responses API to a chat's request, with the history that it inherits.

`previous_response_id` names a turn in the record of a live session. The next prompt extends that turn's ids, also after
a restart of the gateway, as far as the session is recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gateway.api.bodies import decode
from gateway.api.calls.service import ParsedRequest
from gateway.api.errors import BadField, ContextExceeded, RefusedField
from gateway.api.openai.bodies import ChatRequest, FunctionSpec, Tool
from gateway.api.openai.parser import Parser
from gateway.api.openai.requests import check_obfuscation
from gateway.api.responses import items
from gateway.api.responses.bodies import (
    ENCRYPTED,
    INCLUDABLE,
    LOGPROBS,
    NEUTRAL,
    NEUTRAL_REASONING,
    NEUTRAL_TOOL,
    SHARED,
    WHAT_TO_DO,
    ResponsesRequest,
)
from gateway.api.responses.form import ResponsesForm
from gateway.api.responses.record import conversation_of, recorded
from gateway.core.types import SamplingParams, TurnId
from gateway.ports import SessionView, Turns
from gateway.tokens import Codec
from protos.errors import NotFound

_decoder = msgspec.json.Decoder(ResponsesRequest)

RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""Fields of the chat's request that have another name in this API."""


class PreviousResponseNotFound(BadField):
    """No live session has that response. OpenAI's clients know the code."""

    code = "previous_response_not_found"

    def __init__(self, cause: NotFound) -> None:
        super().__init__("previous_response_id", cause.message, hint=cause.hint)


class ResponsesParser:
    def __init__(self, turns: Turns, codec: Codec, chats: Parser) -> None:
        self._turns, self._codec, self._chats = turns, codec, chats

    def decode(self, raw: bytes) -> ResponsesRequest:
        body = decode(_decoder, raw)
        _check_supported(body)
        return body

    def previous(self, body: ResponsesRequest) -> tuple[SessionView, TurnId] | None:
        """The session and the turn that the call continues: looked up in the event loop, which changes sessions."""
        if body.previous_response_id is None:
            return None
        try:
            return recorded(self._turns, body.previous_response_id)
        except NotFound as e:
            raise PreviousResponseNotFound(e) from e

    def parse(
        self, body: ResponsesRequest, num_bytes: int, previous: tuple[SessionView, TurnId] | None
    ) -> ParsedRequest:
        """`num_bytes`: of the request's body."""
        inherited = [] if previous is None else items.carried(conversation_of(*previous))
        messages = [*items.instructed(body.instructions), *inherited, *items.input_messages(body.input)]
        size = num_bytes + sum(len(str(message.get("content"))) for message in inherited)
        with _own_names():
            parsed = self._chats.chat(
                _chat(body),
                size,
                form=ResponsesForm(self._codec, body),
                messages=messages,
                after=None if previous is None else previous[1],
            )
        named = parsed.named
        if previous is not None:
            named = dataclasses.replace(named, previous=previous[0].session_id)

        def make_sampling(prompt: Sequence[int], view: SessionView) -> SamplingParams:
            with _own_names():
                return parsed.make_sampling(prompt, view)

        return dataclasses.replace(
            parsed,
            named=named,
            make_sampling=make_sampling,
            kept=body.store is not False,
            without_effect=[
                *(name.replace("function.", "") for name in parsed.without_effect),
                *([f"include={ENCRYPTED}"] if ENCRYPTED in (body.include or ()) else ()),
            ],
        )


def _check_supported(body: ResponsesRequest) -> None:
    _neutral(body, NEUTRAL)
    if body.reasoning is not None:
        _neutral(body.reasoning, NEUTRAL_REASONING, "reasoning.")
    if body.text is not None:
        _neutral(body.text, {"verbosity": (None, "medium")}, "text.")
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise RefusedField(
                f"include[{index}]", f"`include` of {name!r} is not supported", hint=f"one of {', '.join(INCLUDABLE)}"
            )
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise BadField("top_logprobs", "`top_logprobs` needs its `include`", hint=f'send "include": ["{LOGPROBS}"]')
    check_obfuscation(body.stream_options)
    if body.stream_options is not None and body.stream_options.include_usage:
        raise RefusedField("stream_options.include_usage", "a response has its usage in any case", hint="leave it out")


def _neutral(options: msgspec.Struct, neutral: dict[str, tuple[Any, ...]], before: str = "") -> None:
    for name, allowed in neutral.items():
        value = getattr(options, name)
        if value not in allowed:
            path = before + name
            raise RefusedField(
                path, f"`{path}`={value!r:.80} is not supported", hint=WHAT_TO_DO.get(path, "leave it out")
            )


def _chat(body: ResponsesRequest) -> ChatRequest:
    shared = {name: getattr(body, name) for name in SHARED}
    return ChatRequest(
        messages=[],
        max_completion_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()) or None,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body),
        **shared,
    )


def _tools(tools: Sequence[dict[str, Any]] | None) -> list[Tool] | None:
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] if tools else None


def _tool(tool: dict[str, Any], path: str) -> Tool:
    if tool.get("type") != "function":
        raise RefusedField(
            f"{path}.type", f"tools of type {tool.get('type')!r} are not supported", hint="only 'function' is"
        )
    neutral = {name for name, allowed in NEUTRAL_TOOL.items() if tool.get(name) in allowed}
    given = {name: value for name, value in tool.items() if name not in {"type", *neutral} and value is not None}
    for name in given:
        if name not in FunctionSpec.__struct_fields__:
            why = "is not supported" if name in NEUTRAL_TOOL else "is unknown"
            raise RefusedField(f"{path}.{name}", f"field `{path}.{name}` {why}", hint="leave it out")
    try:
        return Tool("function", msgspec.convert(given, FunctionSpec))
    except msgspec.ValidationError as e:
        raise BadField(path, f"`{path}` is not a function: {e}") from e


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RefusedField(
            "tool_choice",
            f"`tool_choice`={choice!r:.80} is not supported",
            hint="'auto', 'none', 'required', or {\"type\": \"function\", \"name\": ...}",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema}}


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Errors of the chat's fields name those of this API."""
    try:
        yield
    except (BadField, RefusedField, ContextExceeded) as e:
        for theirs, own in RENAMED.items():
            if e.param == theirs:
                e.param = own
            e.message = e.message.replace(f"`{theirs}`", f"`{own}`")
            e.hint = e.hint.replace(f"`{theirs}`", f"`{own}`")
        raise
