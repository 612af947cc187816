"""From a body of OpenAI's API to a parsed request.

Other APIs put their requests into one of these bodies, and give the form of their answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.calls import history
from gateway.api.calls.answer import AnswerShape, Api, Form
from gateway.api.calls.service import BodyIdentity, ParsedRequest
from gateway.api.openai import requests
from gateway.api.openai.bodies import ChatRequest, CompletionRequest
from gateway.api.openai.forced import NO_CALLS, CallForm
from gateway.api.openai.writer import OpenAIForm
from gateway.core.types import SamplingParams, TurnId
from gateway.ports import Message, ModelInfo, SessionView, Turns
from gateway.tokens import Codec

LONG_BODY_BYTES = 8_000
"""A longer body is tokenised in a thread: it would hold the event loop for milliseconds (1 ms for about 4 KB)."""
LONG_HISTORY_BYTES = 32_000
"""Up to this, a body that the session's record holds nearly whole is handled in the event loop: little is left to
tokenise, and rendering the rest through the template costs less than handing it to a thread."""


class Parser:
    def __init__(self, turns: Turns, codec: Codec) -> None:
        self._turns, self._codec = turns, codec

    def chat(
        self,
        body: ChatRequest,
        size: int,
        *,
        api: Api = "chat",
        form: Form | None = None,
        messages: Sequence[Message] = (),
        after: TurnId | None = None,
    ) -> ParsedRequest:
        """`size`: bytes of the request's body. The rest is of another API that has put its request into a chat's: its
        form, its messages where they are not the body's, and the turn that it continues, where its history repeats it.
        """
        model = requests.find_model(body.model, self._turns.models())
        messages = requests.in_order_of_calls(messages or requests.chat_messages(body.messages))
        requests.check_arguments(messages)
        requests.check_continued(body, messages)
        tools = requests.chat_tools(body, self._codec.tool_format)
        kwargs, shape = body.chat_template_kwargs, requests.chat_shape(body)
        return ParsedRequest(
            api,
            form or OpenAIForm(self._codec),
            model,
            shape,
            _named(body),
            record_head=history.head(api="chat", tools=tools, template_kwargs=kwargs),
            messages=messages,
            make_prompts=lambda view: [
                history.chat_prompt(
                    self._codec,
                    view,
                    messages,
                    tools,
                    kwargs,
                    body.history,
                    generation_prompt=body.add_generation_prompt is not False,
                    continued=bool(body.continue_final_message),
                    after=after,
                )
            ],
            is_long=lambda view: (
                size > LONG_HISTORY_BYTES
                or (
                    size > LONG_BODY_BYTES and history.unrecorded_chars(view, messages, tools, kwargs) > LONG_BODY_BYTES
                )
            ),
            make_sampling=lambda prompt, view: self._sampling(body, shape, model, prompt, view),
            parses_tools=tools is not None and body.tool_choice != "none",
            parses_reasoning=body.separate_reasoning is not False and self._codec.reasoning_format != "none",
            show_special=body.skip_special_tokens is False,
            one_call=body.parallel_tool_calls is False,
            continued=bool(body.continue_final_message),
            without_effect=requests.without_effect(body),
            max_tokens=body.max_completion_tokens or body.max_tokens,
        )

    def completion(
        self, body: CompletionRequest, size: int, *, api: Api = "completion", form: Form | None = None
    ) -> ParsedRequest:
        model = requests.find_model(body.model, self._turns.models())
        prompts = requests.completion_prompts(body, self._codec.vocab_size)
        special, shape = body.add_special_tokens is not False, requests.completion_shape(body, len(prompts))
        return ParsedRequest(
            api,
            form or OpenAIForm(self._codec),
            model,
            shape,
            _named(body),
            record_head=history.head(api="completion"),
            messages=(),
            make_prompts=lambda view: [
                history.completion_prompt(self._codec, view, prompt, add_special_tokens=special) for prompt in prompts
            ],
            is_long=lambda view: size > LONG_BODY_BYTES,
            make_sampling=lambda prompt, view: self._sampling(body, shape, model, prompt, view),
            show_special=body.skip_special_tokens is False,
            num_prompts=len(prompts),
            max_tokens=body.max_tokens,
        )

    def _sampling(
        self,
        body: ChatRequest | CompletionRequest,
        shape: AnswerShape,
        model: ModelInfo,
        prompt: Sequence[int],
        view: SessionView,
    ) -> SamplingParams:
        sampling = requests.sampling(
            body,
            prompt_tokens=len(prompt),
            model=requests.within(model, view),
            top=shape.logprobs or 0,
            tokens_per_event=self._turns.tokens_per_event(streamed=shape.stream),
            call_form=self._call_form(body, prompt),
            vocab_size=self._codec.vocab_size,
        )
        requests.check_trainable(sampling, view, model.kinds)
        return sampling

    def _call_form(self, body: ChatRequest | CompletionRequest, prompt: Sequence[int]) -> CallForm:
        """How a call that the request may force is written; a model that reasons does so before it calls."""
        if not isinstance(body, ChatRequest) or body.tool_choice in (None, "auto", "none"):
            return NO_CALLS
        tools, reasoning = self._codec.tool_format, self._codec.reasoning_format
        if reasoning == "none" or body.continue_final_message:
            return CallForm(tools)
        return CallForm(tools, reasoning, "does" if self._codec.opens_reasoning(prompt) else "may")


def _named(body: ChatRequest | CompletionRequest) -> BodyIdentity:
    return BodyIdentity(body.metadata, body.session_id, body.user)
