"""SGLang's `/generate`: the request, and its stream's events as chunks.

- An event repeats everything so far, or has only what is new, depending on a flag of the server. `completion_tokens`
  counts all so far, so the lengths of the lists show which it is; a list that fits neither is a cut.
- Ids and logprobs are taken from `output_token_logprobs`, where they stand together.
- A structural tag is sent as JSON text in xgrammar's own form, which SGLang's default grammar backend compiles
  unchanged. Its older form (`structures`, `triggers`) allows text around calls; llguidance accepts that form only, and
  refuses.
- A stream is complete only with a finish of type "stop" or "length".
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from gateway.core.parameters import sent
from gateway.core.types import SamplingParams, TopLogprob
from gateway.engines.base import CutReason, EngineChunk, NoLogprob, RequestRefused, StreamCut, TokenId
from gateway.engines.http import cut_reason, one_line
from protos.errors import LaminarError

Logprob = tuple[float | None, TokenId, str | None]


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _Finish | None = None
    output_token_logprobs: list[Logprob] = []
    output_top_logprobs: list[list[Logprob] | None] | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def generate_body(
    prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str, *, seeds: bool = False
) -> dict[str, object]:
    """The request. The gateway matches stop strings itself, and needs all ids, special ones included.

    `seeds`: the server samples by seeds, all requests without one by the same.
    """
    params: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        **sent(sampling),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.min_tokens:
        params["min_new_tokens"] = sampling.min_tokens
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.json_schema:
        params["json_schema"] = sampling.json_schema
    if sampling.regex:
        params["regex"] = sampling.regex
    if sampling.structural_tag:
        params["structural_tag"] = sampling.structural_tag
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    elif seeds:
        params["sampling_seed"] = secrets.randbits(31)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    return {
        "rid": request_id,
        "input_ids": prompt_ids,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,  # of outputs only: 0 would defeat the prefix cache
        "top_logprobs_num": sampling.top_logprobs,
        "stream": True,
    }


class Reader:
    """One stream's events into chunks. `over`: the server ended the request, so it needs no abort."""

    def __init__(self, url: str, top_logprobs: int) -> None:
        self._url, self._top = url, top_logprobs
        self._taken = 0
        self.over = False

    def chunk(self, data: bytes) -> EngineChunk:
        """Raises StreamCut or RequestRefused."""
        meta = self._meta(data)
        finish = meta.finish_reason
        if finish is None:
            return self._chunk(meta)
        self.over = True
        if finish.type in ("stop", "length"):
            return self._chunk(meta)
        failure = self._aborted(finish)
        if isinstance(failure, RequestRefused):  # its event counts a token that it does not have
            raise failure
        try:
            return msgspec.structs.replace(self._chunk(meta), failure=failure)  # tokens sampled before the abort count
        except StreamCut as e:
            raise failure from e

    def _meta(self, data: bytes) -> _Meta:
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise StreamCut("protocol", f"{self._url} sent an event that /generate does not send: {e}") from e
        if event.error is not None:
            self.over = True
            raise self._error(event.error)
        if event.meta_info is None:
            raise StreamCut("protocol", f"{self._url} sent an event without meta_info")
        return event.meta_info

    def _chunk(self, meta: _Meta) -> EngineChunk:
        sampled = self._new(meta.output_token_logprobs, meta.completion_tokens, "logprobs")
        tops = None
        if self._top and meta.output_top_logprobs:
            new = self._new(meta.output_top_logprobs, meta.completion_tokens, "top logprobs")
            tops = tuple(tuple(TopLogprob(i, p) for p, i, _ in top or () if p is not None) for top in new)
        self._taken = meta.completion_tokens
        logprobs = tuple(logprob for logprob, _, _ in sampled if logprob is not None)
        if len(logprobs) != len(sampled):
            raise NoLogprob(f"{self._url} sent a token whose logprob is null: it computes NaN")
        kind = meta.finish_reason.type if meta.finish_reason is not None else None
        return EngineChunk(
            tuple(token_id for _, token_id, _ in sampled),
            logprobs,
            tops,
            kind if kind in ("stop", "length") else None,  # type: ignore[arg-type]  # narrowed here
            _versions(meta),
        )

    def _new(self, values: list[Any], total: int, what: str) -> list[Any]:
        """Those of `values` that are new: the list has all `total` so far, or only those since the last event."""
        if len(values) == total >= self._taken:
            return values[self._taken :]
        if len(values) == total - self._taken:
            return values
        raise StreamCut(
            "protocol", f"{self._url} sent {len(values)} {what} at {total} tokens, of which {self._taken} were known"
        )

    def _aborted(self, finish: _Finish) -> LaminarError:
        message = finish.message or f"ended a turn with {finish.type!r}"
        return self._failure(finish.status_code, message, "abort")

    def _error(self, error: Any) -> LaminarError:
        """The server refuses a request with status 200 and the error as the stream's only event."""
        stated = error if isinstance(error, dict) else {}
        return self._failure(stated.get("code"), stated.get("message") or error, "server_error")

    def _failure(self, status: object, message: object, reason: CutReason) -> LaminarError:
        said = one_line(str(message))
        if isinstance(status, int):
            if (found := cut_reason(status)) is None:
                return RequestRefused(f"{self._url} refused the request: {said}")
            reason = found
        return StreamCut(reason, f"{self._url}: {said}")


def _versions(meta: _Meta) -> tuple[str, ...]:
    if meta.weight_versions:
        return tuple(span.version for span in meta.weight_versions)
    return (meta.weight_version,) if meta.weight_version is not None else ()
