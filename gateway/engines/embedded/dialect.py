"""vLLM's dialect: the bodies of requests, checked field by field.

Every unknown field and every value that this engine does not support is refused by name: a sampling parameter that was
silently dropped would make the policy another one than the trainer assumes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from gateway.engines.embedded.batching.sequence import GenerationRequest, SamplingParams
from protos.decoding import decode_json
from protos.errors import InvalidRequest, TooLarge, UnknownModel, UnsupportedField

LOGPROBS_MAX = 20
SALT_LEN_MAX = 1024
STREAM_INTERVAL_MAX = 4096


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions, with vLLM's defaults."""

    model: str | None = None
    prompt: str | list[int | list[int]]
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int = 1
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # logprobs name tokens "token_id:N", which is unambiguous
    return_weight_versions: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    user: str | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_p: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    # Accepted only where they change nothing:
    n: int | None = 1
    best_of: int | None = 1
    echo: bool | None = False
    stop: str | list[str] | None = None
    suffix: str | None = None
    structured_outputs: Any = None
    priority: int = 0
    spaces_between_special_tokens: bool = True


NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "stop": (None, [], ""),
    "suffix": (None, ""),
    "structured_outputs": (None,),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
}
"""Fields that the embedded engine does not support, with the values that change nothing."""


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class UpdateInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    version: int | str | None = None
    digest: str | None = None


class UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    update_info: UpdateInfo


class FinishBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weight_version: str | None = None


class LabelBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    new_version: str


class AbortBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_ids: list[str] | None = None


class InitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    init_info: dict[str, Any] = {}


class RpcKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weights_path: str


class RpcBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: Literal["reload_weights"]
    kwargs: RpcKwargs
    args: list[str] = []
    timeout: float | None = None


T = TypeVar("T", bound=msgspec.Struct)


def decode(raw: bytes, kind: type[T]) -> T:
    """A checked body; InvalidRequest names the wrong field and its type."""
    try:
        return decode_json(raw or b"{}", kind)
    except msgspec.ValidationError as e:
        raise InvalidRequest(f"malformed body: {e}", hint=f"fields: {', '.join(kind.__struct_fields__)}") from e
    except msgspec.DecodeError as e:
        raise InvalidRequest(f"the body is not JSON: {e}", hint="send a JSON object") from e


class Limits(msgspec.Struct, frozen=True):
    """The limits that a request is checked against."""

    model: str
    max_model_len: int
    vocab: int


def to_request(
    body: CompletionBody, request_id: str, limits: Limits, encode: Callable[[str, bool], list[int]]
) -> GenerationRequest:
    """The request in a body; LaminarError names the first thing that is wrong.

    `encode(text, add_special_tokens)` returns the ids of a text prompt.
    """
    if body.model not in (None, limits.model):
        raise UnknownModel(f"model {body.model!r} is not served here", hint=f"this engine serves {limits.model!r}")
    for name, neutral in NEUTRAL.items():
        if getattr(body, name) not in neutral:
            raise UnsupportedField(
                f"{name}={getattr(body, name)!r} is not supported by the embedded engine",
                hint=f"leave {name} out" + (" and match stop strings in the gateway" if name == "stop" else ""),
            )
    prompt_ids = _prompt_ids(body, encode)
    params = _sampling_params(body)
    _check_lengths(prompt_ids, params.max_tokens, limits)
    _check_ids("prompt", prompt_ids, limits.vocab)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab)
    _check_ids("logit_bias", (token_id for token_id, _ in params.logit_bias), limits.vocab)
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= SALT_LEN_MAX:
        raise InvalidRequest("cache_salt is empty or too long", hint=f"1 to {SALT_LEN_MAX} characters")
    if not 1 <= body.stream_interval <= STREAM_INTERVAL_MAX:
        raise InvalidRequest(
            f"stream_interval is {body.stream_interval}", hint=f"tokens per chunk, 1 to {STREAM_INTERVAL_MAX}"
        )
    return GenerationRequest(request_id, tuple(prompt_ids), params, body.cache_salt or "")


def _prompt_ids(body: CompletionBody, encode: Callable[[str, bool], list[int]]) -> list[int]:
    if isinstance(body.prompt, str):
        ids = encode(body.prompt, body.add_special_tokens)
    elif body.prompt and isinstance(body.prompt[0], list):
        if len(body.prompt) > 1:
            raise UnsupportedField(f"prompt holds {len(body.prompt)} prompts", hint="send one prompt per request")
        ids = body.prompt[0]
    else:
        ids = [id for id in body.prompt if isinstance(id, int)]
        if len(ids) < len(body.prompt):
            raise InvalidRequest("prompt mixes token ids and lists", hint="send one list of token ids")
    if not ids:
        raise InvalidRequest("the prompt is empty", hint="send at least one token id")
    return ids


def _sampling_params(body: CompletionBody) -> SamplingParams:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = 0 if body.top_k is None else body.top_k
    min_p = body.min_p or 0.0
    presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
    repetition = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    checks = (
        ("min_p", min_p, 0.0 <= min_p <= 1.0, "0 (off) to 1"),
        ("presence_penalty", presence, -2.0 <= presence <= 2.0, "-2 to 2"),
        ("frequency_penalty", frequency, -2.0 <= frequency <= 2.0, "-2 to 2"),
        ("repetition_penalty", repetition, 0.0 < repetition <= 2.0, "above 0, at most 2; 1 for none"),
        ("max_tokens", max_tokens, max_tokens >= 1, "at least 1"),
        ("min_tokens", body.min_tokens, 0 <= body.min_tokens <= max_tokens, "0 to max_tokens"),
        ("temperature", temperature, 0.0 <= temperature <= 100.0, "0 (greedy) to 100"),
        ("top_p", top_p, 0.0 < top_p <= 1.0, "above 0, at most 1"),
        ("top_k", top_k, top_k >= -1, "0 or -1 for no limit, else at least 1"),
        (
            "logprobs",
            body.logprobs,
            body.logprobs is None or 0 <= body.logprobs <= LOGPROBS_MAX,
            f"0 to {LOGPROBS_MAX}",
        ),
    )
    for name, value, good, hint in checks:
        if not good:
            raise InvalidRequest(f"{name} is {value}", hint=hint)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=_biases(body.logit_bias),
        seed=int.from_bytes(os.urandom(8), "little") if body.seed is None else body.seed,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=body.logprobs,
    )


def _biases(found: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    for name, bias in (found or {}).items():
        if not name.isascii() or not name.isdigit() or not -100.0 <= bias <= 100.0:
            raise InvalidRequest(f"logit_bias holds {name!r}: {bias}", hint="token ids, each with -100 to 100")
    return tuple({int(name): bias for name, bias in (found or {}).items()}.items())


def _check_lengths(prompt_ids: list[int], max_tokens: int, limits: Limits) -> None:
    total = len(prompt_ids) + max_tokens
    if total > limits.max_model_len:
        raise TooLarge(
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {max_tokens}: {total} in all, but the model's"
            f" maximum context length here is {limits.max_model_len}",
            hint=f"shorten the prompt to below {limits.max_model_len} tokens and lower max_tokens",
        )


def _check_ids(field: str, ids: Iterable[int], vocab: int) -> None:
    for id in ids:
        if not 0 <= id < vocab:
            raise InvalidRequest(f"{field} holds token id {id}", hint=f"ids of this model are 0 to {vocab - 1}")
