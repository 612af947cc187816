"""From a request's body to its parameters: decoding, validation and defaults. Pure.

Raises BadField and RefusedField, which name the field and its valid values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from gateway.api.bodies import Number, check_texts, decode, in_range
from gateway.api.calls.answer import AnswerShape
from gateway.api.errors import BadField, ContextExceeded, RefusedField
from gateway.api.openai.bodies import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    WHAT_TO_DO,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    _Common,
)
from gateway.api.openai.constraints import constraint
from gateway.api.openai.forced import NO_CALLS, CallForm
from gateway.core.parameters import PARAMETERS, Parameter, required, truncating
from gateway.core.sampling import distorted, kinds_for
from gateway.core.types import SamplingParams
from gateway.ports import Message, ModelInfo, SessionView
from gateway.tokens import ToolFormat
from gateway.tokens.bridge import content_text
from protos.engines import ENGINE_KINDS
from protos.errors import InvalidRequest, Unavailable, UnknownModel

Body = TypeVar("Body", ChatRequest, CompletionRequest)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's and vLLM's default for /v1/completions. Chat defaults to what the context has left."""
LOGPROBS_MAX = 20
CHOICES_MAX = 64
"""Answers to one request: as many as turns that a session may have side by side."""
STOPS_MAX = 16
STOP_LENGTH_MAX = 256
STOP_IDS_MAX = BIASES_MAX = 1024
INTERVAL_MAX = 4096
CHECKED_ELSEWHERE = frozenset({"prompt"})
"""Fields of bodies whose numbers are checked here: token ids against the vocabulary."""
ROLES = ("system", "developer", "user", "assistant", "tool")

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def decode_chat(raw: bytes) -> ChatRequest:
    return _check_neutral(decode(_chat, raw, unchecked=CHECKED_ELSEWHERE), NEUTRAL_CHAT)


def decode_completion(raw: bytes) -> CompletionRequest:
    return _check_neutral(decode(_completion, raw, unchecked=CHECKED_ELSEWHERE), NEUTRAL_COMPLETION)


def _check_neutral(body: Body, neutral: dict[str, tuple[Any, ...]]) -> Body:
    for name, allowed in neutral.items():
        value = getattr(body, name)
        if value not in allowed:
            raise RefusedField(name, f"`{name}`={value!r} is not supported", hint=WHAT_TO_DO.get(name, "leave it out"))
    return body


def find_model(name: str, models: Sequence[ModelInfo]) -> ModelInfo:
    for model in models:
        if model.name == name:
            return model
    served = ", ".join(sorted(repr(model.name) for model in models)) or "none"
    raise UnknownModel(f"no model {name!r} here", hint=f"served: {served}")


def chat_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Plain messages for templates and records, checked. `developer` is OpenAI's newer word for `system`."""
    if not messages:
        raise BadField("messages", "`messages` is empty", hint="send at least one message")
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_arguments(messages: Sequence[Message]) -> None:
    """Raises BodyTooLarge for calls whose arguments, where they are text, would take too much decoded."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    texts = [function["arguments"] for function in calls if isinstance(function.get("arguments"), str)]
    check_texts("the arguments of the calls", texts)


def _chat_message(message: ChatMessage, path: str) -> Message:
    if message.role not in ROLES:
        raise BadField(f"{path}.role", f"unknown role {message.role!r}", hint=f"one of {', '.join(ROLES)}")
    for name in ("refusal", "audio", "function_call"):
        if getattr(message, name):
            raise RefusedField(f"{path}.{name}", f"`{path}.{name}` is not supported", hint="leave it out")
    if message.tool_calls and message.role != "assistant":
        raise BadField(f"{path}.tool_calls", f"a {message.role} message cannot have tool_calls")
    if message.content is None and not message.tool_calls and message.role != "assistant":
        raise BadField(f"{path}.content", f"a {message.role} message needs content")
    _check_parts(message.content, f"{path}.content")
    plain: dict[str, Any] = msgspec.to_builtins(message)
    plain["role"] = "system" if message.role == "developer" else message.role
    plain.setdefault("content", None)
    for name in ("annotations", "refusal", "audio", "function_call", "parsed"):
        plain.pop(name, None)
    for call in plain.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call["function"].setdefault("arguments", "")
    return plain


def _check_parts(content: str | list[dict[str, Any]] | None, path: str) -> None:
    if not isinstance(content, list):
        return
    for index, part in enumerate(content):
        if part.get("type") != "text":
            raise RefusedField(
                f"{path}[{index}].type", f"content of type {part.get('type')!r} is not supported", hint="only 'text' is"
            )
        if not isinstance(part.get("text"), str):
            raise BadField(f"{path}[{index}].text", "a text part needs a string `text`")


def check_continued(body: ChatRequest, messages: Sequence[Message]) -> None:
    """Raises BadField unless the last message can be continued, where `continue_final_message` requests that."""
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise BadField(
            "continue_final_message",
            "an answer either continues the last message or begins one of its own",
            hint="send `add_generation_prompt`: false",
        )
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not content_text(last.get("content")):
        raise BadField("continue_final_message", "the last message is not an assistant's text that can be continued")


def in_order_of_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with the results of each answer's calls in the order of the calls: most templates write no ids, so
    that a model takes the first result for the first call's. BadField for one that names no call of the answer before.

    Results stay as they are where a call or a result has no id.
    """
    ordered = list(messages)
    answers = [position for position, message in enumerate(messages) if message.get("tool_calls")]
    for answer in answers:
        places = {call.get("id"): number for number, call in enumerate(messages[answer]["tool_calls"])}
        after = itertools.takewhile(lambda at: messages[at]["role"] != "assistant", range(answer + 1, len(messages)))
        results = [at for at in after if messages[at]["role"] == "tool"]
        named = [messages[at].get("tool_call_id") for at in results]
        if not all([*places, *named]):
            continue
        for at, name in zip(results, named, strict=True):
            if name not in places:
                raise BadField(
                    "messages",
                    f"message {at} (tool): no call of the answer before it has the id {name!r:.80}",
                    hint=f"its calls: {', '.join(map(repr, places)):.400}",
                )
        wanted = sorted(results, key=lambda at, places=places: places[messages[at]["tool_call_id"]])  # type: ignore[misc]
        for at, source in zip(results, wanted, strict=True):
            ordered[at] = messages[source]
    return ordered


def chat_tools(body: ChatRequest, form: ToolFormat) -> list[dict[str, Any]] | None:
    """The tools to render, whose calls are parsed; None for no tools."""
    if not body.tools:
        return None
    for index, tool in enumerate(body.tools):
        if tool.type != "function":
            raise RefusedField(f"tools[{index}].type", f"tools of type {tool.type!r} are not supported")
    if form == "none":
        raise RefusedField(
            "tools",
            "this model's chat template writes tool calls in a way the gateway cannot parse",
            hint="leave it out",
        )
    return [msgspec.to_builtins(tool) for tool in body.tools]


def without_effect(body: ChatRequest) -> list[str]:
    """What the request asks for and does not get: a call's arguments are what the model wrote, unless its call is
    forced, which is a grammar."""
    if not any(tool.function.strict for tool in body.tools or ()) or body.tool_choice not in (None, "auto", "none"):
        return []
    return ["tools.function.strict"]


def completion_prompts(body: CompletionRequest, vocab_size: int) -> list[str | list[int]]:
    """The prompts, each as text or as token ids of the vocabulary: one, or a batch, whose answers are choices."""
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        return [_completion_prompt(one, vocab_size) for one in prompt]
    return [_completion_prompt(prompt, vocab_size)]


def _completion_prompt(prompt: str | list[Any], vocab_size: int) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(type(item) is int and item >= 0 for item in prompt):
        raise BadField(
            "prompt",
            "`prompt` must be a string, a list of token ids that is not empty, or a list of either",
        )
    if (largest := max(prompt)) >= vocab_size:
        raise BadField("prompt", f"token id {largest} is not in the vocabulary", hint=f"ids are below {vocab_size}")
    return prompt


def chat_shape(body: ChatRequest) -> AnswerShape:
    if body.top_logprobs and not body.logprobs:
        raise BadField("top_logprobs", "`top_logprobs` needs `logprobs`: true")
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    return _shape(body, in_range("top_logprobs", wanted, 0, LOGPROBS_MAX))


def completion_shape(body: CompletionRequest, num_prompts: int) -> AnswerShape:
    return _shape(body, in_range("logprobs", body.logprobs, 0, LOGPROBS_MAX), num_prompts)


def _shape(body: _Common, logprobs: int | None, num_prompts: int = 1) -> AnswerShape:
    if body.stream_options is not None and not body.stream:
        raise BadField("stream_options", "`stream_options` needs `stream`: true")
    check_obfuscation(body.stream_options)
    each = in_range("n", body.n, 1, CHOICES_MAX) or 1
    if each * num_prompts > CHOICES_MAX:
        raise BadField(
            "prompt",
            f"{num_prompts} prompts with {each} answers each",
            hint=f"at most {CHOICES_MAX} answers a request: send several",
        )
    return AnswerShape(
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        weight_versions=bool(body.return_weight_versions),
        choices=each * num_prompts,
    )


def check_obfuscation(options: StreamOptions | None) -> None:
    if options is not None and options.include_obfuscation:
        raise RefusedField(
            "stream_options.include_obfuscation",
            "`stream_options.include_obfuscation`=True is not supported: no event is padded",
            hint="leave it out",
        )


def within(model: ModelInfo, view: SessionView) -> ModelInfo:
    """The model with no more context than the session may use."""
    most = view.max_context_tokens
    if most is None or most >= model.context_tokens:
        return model
    return dataclasses.replace(model, context_tokens=most)


def check_trainable(sampling: SamplingParams, view: SessionView, kinds: frozenset[str] = frozenset()) -> None:
    """Refuses, by name, a parameter under which a session that is trained on would record logprobs that are not the
    behaviour policy's.

    `kinds`: those of the fleet's engines. A truncated turn goes only to engines that take what truncates it, hold its
    constraint if it has one, and report its logprobs.
    """
    if not view.trains:
        return
    if view.logprobs_kind == "processed":
        for name in truncating(sampling):
            able = kinds_for(constrained=sampling.constrained, truncated=True, parameters=(name,))
            if kinds and able is not None and not kinds & able:
                raise RefusedField(
                    name,
                    f"with `{name}` the recorded logprobs are not the policy's: engines report those before truncation",
                    hint=f"leave it out, add engines of kind {' or '.join(sorted(able))}, "
                    'or make the session with "train": false',
                )
        return
    for name in distorted(sampling):
        raise RefusedField(
            name,
            f"with `{name}` the recorded logprobs are not the policy's: the engines report raw ones",
            hint='leave it out, run the engines with processed logprobs, or make the session with "train": false',
        )


def sampling(
    body: ChatRequest | CompletionRequest,
    *,
    prompt_tokens: int,
    model: ModelInfo,
    top: int,
    tokens_per_event: int = 1,
    call_form: CallForm = NO_CALLS,
    vocab_size: int = 1 << 31,
) -> SamplingParams:
    """The sampling parameters, within the context that the prompt leaves. TooLarge, with both lengths, for a prompt
    that leaves none."""
    numbers = {parameter.name: _number(body, parameter) for parameter in PARAMETERS}
    # When a turn continues elsewhere, its generated tokens are in the prompt: a repetition penalty that counts the
    # prompt counts them still.
    counts = bool(numbers["presence_penalty"] or numbers["frequency_penalty"])
    prompt_counts = all(ENGINE_KINDS[kind].penalises_prompt for kind in model.kinds)
    counts = counts or (numbers["repetition_penalty"] != 1.0 and not prompt_counts)
    held = constraint(body, model, call_form)
    if prompt_tokens < 1:
        raise InvalidRequest("the prompt is empty: it has no tokens", hint="send at least one token to continue from")
    if not model.context_tokens:
        why = f": {model.away}" if model.away else ""
        hint = "see gateway status, and try again"
        raise Unavailable(f"no engine that serves {model.name!r} has responded yet{why}", hint=hint)
    room = model.context_tokens - prompt_tokens
    if room < 1:
        raise ContextExceeded(
            "messages" if isinstance(body, ChatRequest) else "prompt",
            f"this model's maximum context length is {model.context_tokens} tokens, and the prompt has {prompt_tokens}",
            hint=f"at most {model.context_tokens - 1} tokens of prompt leave room for an answer",
        )
    max_tokens = min(room, _max_tokens(body, room))
    found = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=in_range("min_tokens", body.min_tokens, 0, max_tokens) or 0,
        **numbers,
        seed=in_range("seed", body.seed, -(1 << 63), (1 << 63) - 1),
        stop=_stops(body.stop),
        stop_token_ids=_stop_ids(body.stop_token_ids, vocab_size),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=top,
        logit_bias=_biases(body.logit_bias, vocab_size),
        json_schema=held.json_schema,
        regex=held.regex,
        structural_tag=held.structural_tag,
        in_place=held.any or (counts and not model.penalties_move),
        tokens_per_event=max(tokens_per_event, in_range("stream_interval", body.stream_interval, 1, INTERVAL_MAX) or 1),
    )
    _check_taken(found, model.kinds)
    return found


def _check_taken(sampling: SamplingParams, kinds: frozenset[str]) -> None:
    """Refuses, by name, a parameter that no engine of these kinds takes."""
    for name in required(sampling):
        able = kinds_for(constrained=False, parameters=(name,))
        if able is not None and not able & kinds:
            raise RefusedField(
                name,
                f"no engine of this gateway takes `{name}`",
                hint=f"leave it out, or add one of these kinds: {', '.join(sorted(able))}",
            )


def _number(body: ChatRequest | CompletionRequest, parameter: Parameter) -> Any:
    value = getattr(body, parameter.name)
    if value is None or value == parameter.off:
        return parameter.default
    if not parameter.fits(value):
        raise BadField(parameter.name, f"`{parameter.name}`={value} is out of range", hint=parameter.range)
    return value


def _max_tokens(body: ChatRequest | CompletionRequest, room: int) -> int:
    name, value, default = "max_tokens", body.max_tokens, COMPLETION_MAX_TOKENS
    if isinstance(body, ChatRequest):
        default = room
        if body.max_completion_tokens is not None:
            if value is not None and value != body.max_completion_tokens:
                raise BadField("max_tokens", "`max_tokens` and `max_completion_tokens` differ", hint="send only one")
            name, value = "max_completion_tokens", body.max_completion_tokens
    return _default(in_range(name, value, 1, None), default)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if stop and isinstance(stop, str) else tuple(stop or ())
    if len(stops) > STOPS_MAX:
        raise BadField("stop", f"{len(stops)} stop strings", hint=f"at most {STOPS_MAX}")
    for text in stops:
        if not 1 <= len(text) <= STOP_LENGTH_MAX:
            raise BadField("stop", f"a stop string of {len(text)} characters", hint=f"1 to {STOP_LENGTH_MAX}")
    return stops


def _biases(found: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if found and len(found) > BIASES_MAX:
        raise BadField("logit_bias", f"{len(found)} biases", hint=f"at most {BIASES_MAX}")
    biases: dict[int, float] = {}
    for name, bias in (found or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocab_size):
            raise BadField("logit_bias", f"{name[:40]!r} is not a token id", hint=f"ids are 0 to {vocab_size - 1}")
        in_range(f"logit_bias.{name}", bias, -100.0, 100.0)
        biases[int(name)] = bias
    return tuple((token_id, bias) for token_id, bias in biases.items() if bias)


def _stop_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    if len(ids) > STOP_IDS_MAX:
        raise BadField("stop_token_ids", f"{len(ids)} stop token ids", hint=f"at most {STOP_IDS_MAX}")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            hint = f"ids are 0 to {vocab_size - 1}"
            raise BadField("stop_token_ids", f"token id {token_id} is not in the vocabulary", hint=hint)
    return tuple(ids)


def _default(value: Number | None, default: Number) -> Number:
    return default if value is None else value
