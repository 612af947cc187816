"""Writes responses in the form of OpenAI's Responses API (checked with its official client).

A whole answer is at most one item of reasoning and one of text, then its calls. A stream has an item whenever the kind
of what the model writes changes: text after a call is an item of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from gateway.api.calls.answer import AnswerHead, provenance
from gateway.api.calls.turn_view import Answer
from gateway.api.openai.writer import sampled_tokens
from gateway.api.responses.bodies import ResponsesRequest
from gateway.api.responses.events import ResponseEvents, event
from gateway.api.responses.schema import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from gateway.tokens import Codec
from protos.errors import LaminarError

_json = msgspec.json.Encoder().encode

ID_PREFIX = "resp_"
"""Of a response's id; the rest is its turn's."""


def items(
    turn_id: str, reasoning: str, text: str, calls: Sequence[tuple[str, str, str]], status: ItemStatus
) -> list[OutputItem]:
    """The items of a whole answer. `calls`: id, name and arguments of each."""
    found: list[OutputItem] = []
    if reasoning:
        found.append(ReasoningItem(id=f"rs_{turn_id}_0", status=status, content=[ReasoningText(text=reasoning)]))
    if text or not calls:
        found.append(OutputMessage(id=f"msg_{turn_id}_{len(found)}", status=status, content=[OutputText(text=text)]))
    for call_id, name, arguments in calls:
        found.append(
            FunctionCallItem(
                id=f"fc_{turn_id}_{len(found)}", status="completed", call_id=call_id, name=name, arguments=arguments
            )
        )
    return found


@dataclass(slots=True)
class ResponsesForm:
    """Implements `gateway.api.calls.answer.Form`, for one request."""

    codec: Codec
    asked: ResponsesRequest
    events_of: ResponseEvents | None = field(default=None)  # of the stream, once it has begun

    def answer_id(self, head: AnswerHead) -> str:
        return f"{ID_PREFIX}{head.turn_id}"

    def headers(self, head: AnswerHead) -> Mapping[str, str]:
        return {}

    def body(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        status: ItemStatus = "completed" if answer.finish_reason == "stop" else "incomplete"
        calls = [(call.id, call.name, call.arguments) for call in answer.calls]
        found = items(head.turn_id, "".join(answer.reasonings), answer.text, calls, status)
        if head.shape.logprobs is not None:
            for item in found:
                if isinstance(item, OutputMessage):
                    item.content[0].logprobs = sampled_tokens(
                        self.codec, answer.token_ids, answer.logprobs, answer.top_logprobs, head.shape.logprobs
                    )
        return _json(self._ended(head, answer, found))

    def events(self, head: AnswerHead, choice: int) -> ResponseEvents:
        self.events_of = ResponseEvents(self.codec, head, self._begun(head))
        return self.events_of

    def stream_end(self, head: AnswerHead, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        assert self.events_of is not None
        response = self._ended(head, answer, self.events_of.items)
        return self.events_of.event(f"response.{response.status}", response=response)

    def error_event(self, error: LaminarError) -> bytes:
        """Two events: `response.failed` for clients that follow the response, `error` for those that would take any
        end of the stream for its own."""
        failure = ResponseError("server_error" if error.http_status >= 500 else error.code, str(error))
        described = {"code": error.code, "message": str(error), "param": getattr(error, "param", None)}
        if self.events_of is None:
            return event("error", 0, **described, error=described)
        failed = self.events_of.failed(failure)
        return failed + self.events_of.event("error", **described, error=described)

    def _begun(self, head: AnswerHead) -> ResponseObject:
        """The response before its first token, with what was requested."""
        asked = self.asked
        return ResponseObject(
            id=self.answer_id(head),
            created_at=head.created_unix_s,
            status="in_progress",
            model=head.model,
            previous_response_id=asked.previous_response_id,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools or (),
            text={"format": {"type": "text"}} if asked.text is None else _set(asked.text),
            reasoning={"effort": None, "summary": None} if asked.reasoning is None else _set(asked.reasoning),
            top_logprobs=head.shape.logprobs,
            store=asked.store is not False,
            user=asked.user,
            prompt_token_ids=head.prompt_ids(0) if head.shape.token_ids else UNSET,
        )

    def _ended(self, head: AnswerHead, answer: Answer, output: Sequence[OutputItem]) -> ResponseObject:
        response = self._begun(head)
        response.output, response.usage = output, self._usage(head, answer)
        response.status = "completed" if answer.finish_reason == "stop" else "incomplete"
        if response.status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        if head.shape.token_ids:
            response.token_ids = answer.token_ids
        if head.shape.weight_versions:
            response.weight_versions = answer.spans
        response.laminar = provenance(head, answer)
        return response

    def _usage(self, head: AnswerHead, answer: Answer) -> ResponseUsage:
        prompt, sampled = len(head.prompt_ids(0)), len(answer.token_ids)
        reasoned = min(sampled, len(self.codec.encode("".join(answer.reasonings)))) if answer.reasonings else 0
        return ResponseUsage(prompt, sampled, prompt + sampled, InputTokensDetails(), OutputTokensDetails(reasoned))


def _set(options: msgspec.Struct) -> dict[str, Any]:
    """The options that the request has."""
    return {name: value for name, value in msgspec.to_builtins(options).items() if value is not None}
