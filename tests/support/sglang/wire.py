"""What SGLang's routes take, field by field. Unknown fields are refused, which the real server does only in part."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

T = TypeVar("T")


class Refused(Exception):
    """The request is wrong."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: dict[str, Any] | bool


class TagFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="tag"):
    begin: str
    content: JsonSchemaFormat
    end: str


class OrFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="or"):
    elements: Annotated[list[TagFormat], msgspec.Meta(min_length=1)]


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"):
    """As xgrammar 0.2.7 parses it, of which SGLang 0.5.23 is built; the formats that it knows besides are left out."""

    format: TagFormat | OrFormat


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    @property
    def grammars(self) -> list[str]:
        return [g for g in (self.json_schema, self.regex, self.ebnf, self.structural_tag) if g is not None]


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    input_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(msgspec.Struct, forbid_unknown_fields=True):
    torch_empty_cache: bool = True


class BeginBody(msgspec.Struct, forbid_unknown_fields=True):
    selector: Literal["target", "draft", "all"] = "all"


class EndBody(msgspec.Struct, forbid_unknown_fields=True):
    pass


class DiskBody(msgspec.Struct, forbid_unknown_fields=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True
    manifest: dict[str, Any] | None = None


class TensorBody(msgspec.Struct, forbid_unknown_fields=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False


class NameBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    truncate_size: int = 100


class VersionBody(msgspec.Struct, forbid_unknown_fields=True):
    new_version: str
    abort_all_requests: bool = True


def decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.MsgspecError as e:
        raise Refused(str(e)) from e


def check(body: GenerateBody, vocab: int, context: int) -> None:
    """What the real server finds wrong in a request of the right types."""
    params = body.sampling_params
    wrong = {
        "input_ids cannot be empty": not body.input_ids,
        "input_ids beyond the vocabulary": any(not 0 <= i < vocab for i in body.input_ids),
        "temperature must be non-negative": params.temperature < 0,
        "top_p must be in (0, 1]": not 0 < params.top_p <= 1,
        "top_k must be -1 (disable) or at least 1": params.top_k < 1 and params.top_k != -1,
        "min_new_tokens must be in [0, max_new_tokens]": not 0 <= params.min_new_tokens <= (params.max_new_tokens or 0),
        "max_new_tokens must be at least 0": (params.max_new_tokens or 0) < 0,
        "Only one of json_schema, regex, ebnf, or structural_tag can be set": len(params.grammars) > 1,
        "n > 1 is not simulated": params.n != 1,
        "the input is longer than the context": len(body.input_ids) + (params.max_new_tokens or 0) > context,
    }
    for why, holds in wrong.items():
        if holds:
            raise Refused(why)


def forced(params: SamplingParams) -> str:
    """An answer that the structural tag allows; empty without one. Refused as its compiler refuses it."""
    if params.structural_tag is None:
        return ""
    try:
        tag = msgspec.json.decode(params.structural_tag, type=StructuralTag)
    except msgspec.MsgspecError as e:
        raise Refused(f"Failed to compile structural_tag grammar: {e}") from e
    first = tag.format.elements[-1] if isinstance(tag.format, OrFormat) else tag.format
    return first.begin + "{}" + first.end
