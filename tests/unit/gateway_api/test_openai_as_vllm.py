"""Requests as vLLM's own clients send them, and fields that it and SGLang have besides OpenAI's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from gateway.api.errors import RefusedField
from gateway.api.openai.requests import check_trainable, decode_chat, sampling
from gateway.core.tree import TurnTree
from gateway.core.types import SamplingParams, SessionId, TurnRequest
from gateway.ports import ModelInfo, SessionView
from gateway.tokens import Codec
from protos.engines import ENGINE_KINDS
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

EOS = 2
USER = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"model": "policy", "messages": [USER]}
TEXT: dict[str, Any] = {"model": "policy", "prompt": "hello"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CALLS = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>\n' for name in "fg")


def saying(text: str, codec: Codec | None = None) -> ScriptedTurns:
    codec = codec or codecs.tiny()
    return ScriptedTurns(lambda request: Script([*codec.encode(text), EOS]))


async def ask(url: str, path: str, body: Any, status: int = 200, **headers: str) -> Any:
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == status, text
        return json.loads(text) if answer.content_type == "application/json" else events(text)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# The bodies of `vllm bench serve`, by backend: `vllm/benchmarks/lib/endpoint_request_func.py` of vLLM 0.32.
BENCH_COMPLETIONS = {
    "model": "policy",
    "prompt": "hello",
    "repetition_penalty": 1.0,
    "max_tokens": 7,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
}
BENCH_CHAT = {
    "model": "policy",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "max_completion_tokens": 7,
    "stream": True,
    "stream_options": {"include_usage": True},
}
SAMPLED = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "temperature": 0.7,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
}
"""What its options for sampling add to either."""


@pytest.mark.parametrize("extra", [{}, {"ignore_eos": True}, SAMPLED], ids=["plain", "ignore_eos", "sampled"])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BENCH_COMPLETIONS), ("/v1/chat/completions", BENCH_CHAT)]
)
async def test_what_vllms_benchmark_sends_is_answered_as_it_reads(
    path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    turns = saying("the answer")
    async with serving(turns, codecs.tiny()) as url:
        *chunks, usage = await ask(url, path, {**body, **extra}, **{"x-request-id": "bench-0"})
    assert chunks, "there is a first token to time"
    assert all(chunk["choices"] for chunk in chunks)
    text = "".join((c.get("text") or c.get("delta", {}).get("content") or "") for e in chunks for c in e["choices"])
    assert text == codecs.tiny().decode(codecs.tiny().encode("the answer")[:7])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == min(7, len(codecs.tiny().encode("the answer")) + 1)
    assert turns.requests[0].sampling.min_p == extra.get("min_p", 0.0)


async def test_prompts_of_ids_as_its_random_data_set_sends_them() -> None:
    turns = saying("yes")
    async with serving(turns, codecs.tiny()) as url:
        for prompt in ([5, 6, 7], [[5, 6, 7]]):
            await ask(url, "/v1/completions", {**BENCH_COMPLETIONS, "prompt": prompt})
        async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models") as answer:
            first = (await answer.json())["data"][0]
    assert [request.prompt_ids for request in turns.requests] == [(5, 6, 7)] * 2
    assert (first["id"], first["root"]) == ("policy", "policy")


NEUTRAL = {
    "repetition_penalty": 1,
    "min_p": 0,
    "top_k": -1,
    "prompt_logprobs": None,
    "logit_bias": {},
    "stop": "",
    "length_penalty": 1.0,
    "use_beam_search": False,
    "bad_words": [],
    "priority": 0,
    "request_id": "any-name",
    "spaces_between_special_tokens": True,
    "response_format": {"type": "text"},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**TEXT, **NEUTRAL, "echo": False, "best_of": 1, "suffix": ""}),
        (
            "/v1/chat/completions",
            {**CHAT, **NEUTRAL, "functions": [], "function_call": "none", "echo": False, "add_generation_prompt": True},
        ),
    ],
)
async def test_values_that_ask_for_nothing_are_taken(path: str, body: dict[str, Any]) -> None:
    turns = saying("yes")
    async with serving(turns, codecs.tiny()) as url:
        await ask(url, path, body)
    plain = SamplingParams(max_tokens=turns.requests[0].sampling.max_tokens)
    assert turns.requests[0].sampling == plain


async def test_every_parameter_of_sampling_reaches_the_turn() -> None:
    turns = saying("yes")
    asked = {"min_p": 0.05, "repetition_penalty": 1.1, "top_k": 7, "logit_bias": {"5": -1.5, "7": 0}, "min_tokens": 3}
    async with serving(turns, codecs.tiny()) as url:
        await ask(url, "/v1/completions", {**TEXT, **asked, "stream_interval": 8})
    found = turns.requests[0].sampling
    assert (found.min_p, found.repetition_penalty, found.top_k, found.logit_bias) == (0.05, 1.1, 7, ((5, -1.5),))
    assert (found.min_tokens, found.tokens_per_event) == (3, 8)


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_where_only_sglang_serves_a_truncated_policy_is_not_trained_on(name: str) -> None:
    """It reports logprobs as they were before truncation."""
    value = 5 if name == "top_k" else 0.5
    body = decode_chat(json.dumps({**CHAT, name: value}).encode())
    found = sampling(body, prompt_tokens=1, model=ModelInfo("policy", 50, 0), top=0)
    view = SessionView(SessionId("s"), TurnTree(), ephemeral=False, trains=True)
    with pytest.raises(RefusedField, match=f"with `{name}` .*engines report") as refused:
        check_trainable(found, view, frozenset({"sglang"}))
    assert refused.value.param == name
    check_trainable(found, view, frozenset({"sglang", "vllm"}))  # it goes to vLLM
    check_trainable(found, dataclasses.replace(view, trains=False), frozenset({"sglang"}))
    greedy = decode_chat(json.dumps({**CHAT, name: value, "temperature": 0}).encode())
    check_trainable(
        sampling(greedy, prompt_tokens=1, model=ModelInfo("policy", 50, 0), top=0), view, frozenset({"sglang"})
    )


def test_a_truncated_policy_is_not_trained_on_where_who_could_tell_lacks_the_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang does not report its logprobs, and the embedded engine does not take the parameter."""
    lacking = dataclasses.replace(ENGINE_KINDS["embedded"], lacks=frozenset({"min_p"}))
    monkeypatch.setitem(ENGINE_KINDS, "embedded", lacking)
    fleet = ModelInfo("policy", 50, 0, kinds=frozenset({"sglang", "embedded"}))
    body = decode_chat(json.dumps({**CHAT, "top_p": 0.9, "min_p": 0.1}).encode())
    found = sampling(body, prompt_tokens=1, model=fleet, top=0)
    view = SessionView(SessionId("s"), TurnTree(), ephemeral=False, trains=True)
    with pytest.raises(RefusedField, match=r"with `min_p` .*engines report.*of kind vllm, or") as refused:
        check_trainable(found, view, fleet.kinds)
    assert refused.value.param == "min_p"
    check_trainable(found, dataclasses.replace(view, trains=False), fleet.kinds)


def test_a_constrained_and_truncated_answer_is_not_trained_on_where_each_engine_does_but_one_of_both() -> None:
    """SGLang holds the constraint, and the embedded engine would report the logprobs: no engine would ever take it."""
    fleet = ModelInfo("policy", 50, 0, kinds=frozenset({"sglang", "embedded"}))
    body = decode_chat(json.dumps({**CHAT, "top_p": 0.9, "structured_outputs": {"regex": "[a-z]+"}}).encode())
    found = sampling(body, prompt_tokens=1, model=fleet, top=0)
    view = SessionView(SessionId("s"), TurnTree(), ephemeral=False, trains=True)
    with pytest.raises(RefusedField, match=r"with `top_p` .*of kind vllm, or"):
        check_trainable(found, view, fleet.kinds)
    check_trainable(found, view, fleet.kinds | {"vllm"})


# -- a batch of prompts


def by_prompt(answers: dict[int, str]) -> Callable[[TurnRequest], Script]:
    return lambda request: Script([*codecs.tiny().encode(answers[request.prompt_ids[-1]]), EOS])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_prompts_is_answered_choice_by_choice(stream: bool) -> None:
    codec, turns = codecs.tiny(), ScriptedTurns(by_prompt({60: "first", 61: "second"}))
    asked = {**TEXT, "prompt": [[50, 60], [51, 52, 61]], "n": 2, "return_token_ids": True, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    async with serving(turns, codec) as url:
        told = await ask(url, "/v1/completions", asked)
    if stream:
        *chunks, last = told
        choices = [c for e in chunks for c in e["choices"]]
        texts = ["".join(c["text"] for c in choices if c["index"] == i) for i in range(4)]
        prompts = [next(c["prompt_token_ids"] for c in choices if c["index"] == i) for i in range(4)]
        usage = last["usage"]
    else:
        texts, usage = [c["text"] for c in told["choices"]], told["usage"]
        prompts = [c["prompt_token_ids"] for c in told["choices"]]
        assert [c["index"] for c in told["choices"]] == [0, 1, 2, 3]
        assert "prompt_token_ids" not in told, "there is no one prompt"
    assert texts == ["first", "first", "second", "second"]
    assert prompts == [[50, 60]] * 2 + [[51, 52, 61]] * 2
    assert usage["prompt_tokens"] == 5, "each prompt once"
    assert len({request.turn_id for request in turns.requests}) == 4
    assert [request.choice for request in turns.requests] == [0, 1, 2, 3]
    assert len({request.session_id for request in turns.requests}) == 1


async def test_a_batch_of_texts() -> None:
    turns = saying("yes")
    async with serving(turns, codecs.tiny()) as url:
        told = await ask(url, "/v1/completions", {**TEXT, "prompt": ["a", "b", "c"]})
    assert [c["text"] for c in told["choices"]] == ["yes"] * 3
    assert [r.prompt_ids for r in turns.requests] == [tuple(codecs.tiny().encode(t)) for t in "abc"]


# -- who asks


@pytest.mark.parametrize("user", ["John Smith <j@x.org>", "a/b", "ü\n", "x" * 1000, ".."])
async def test_a_user_is_any_text_and_always_the_same_session(user: str) -> None:
    turns = saying("yes")
    async with serving(turns, codecs.tiny()) as url:
        for _ in range(2):
            await ask(url, "/v1/chat/completions", {**CHAT, "user": user})
        await ask(url, "/v1/chat/completions", {**CHAT, "user": "other"})
        await ask(url, "/v1/chat/completions", {**CHAT, "user": ""})
    first, again, other, nobody = turns.identities
    assert first.session_id == again.session_id != other.session_id
    assert first.session_id is not None
    assert first.session_id.startswith("user-")
    assert other.session_id == "other"
    assert nobody.session_id is None


# -- messages


async def test_text_parts_are_lines() -> None:
    """As vLLM joins them."""
    turns, codec = saying("yes"), codecs.tiny()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with serving(turns, codec) as url:
        await ask(url, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert "one\ntwo" in codec.decode(turns.requests[0].prompt_ids)


CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("codec", [codecs.tiny, codecs.qwen25, codecs.qwen3, codecs.llama3], ids=lambda c: c.__name__)
async def test_an_answer_goes_on_with_the_last_message(codec: Callable[[], Codec]) -> None:
    turns = saying(" of it", codec())
    messages = [USER, {"role": "assistant", "content": "All"}]
    async with serving(turns, codec()) as url:
        told = await ask(url, "/v1/chat/completions", {**CHAT, **CONTINUED, "messages": messages})
    assert told["choices"][0]["message"]["content"] == " of it"
    prompt = codec().decode(turns.requests[0].prompt_ids)
    assert prompt.endswith("All"), prompt
    thought = "<think>\n\n</think>\n\n" if codec is codecs.qwen3 else ""  # as its template has it
    assert prompt.removesuffix("All") == codec().render_text([USER]) + thought


async def test_what_was_continued_is_one_message_to_the_next_turn() -> None:
    codec = codecs.tiny()
    turns = saying(" of it", codec)
    begun = [USER, {"role": "assistant", "content": "All"}]
    whole = [USER, {"role": "assistant", "content": "All of it"}, {"role": "user", "content": "Why?"}]
    async with serving(turns, codec) as url:
        await ask(url, "/s/s1/v1/chat/completions", {**CHAT, **CONTINUED, "messages": begun})
        await ask(url, "/s/s1/v1/chat/completions", {**CHAT, "messages": whole})
    first, second = turns.requests
    assert second.parent == first.turn_id
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


async def test_a_recorded_answer_that_was_cut_is_gone_on_with_from_its_ids() -> None:
    codec = codecs.tiny()
    left = [Script(codec.encode("All"), finish="length"), Script([*codec.encode(" of it"), EOS])]
    turns = ScriptedTurns(lambda request: left.pop(0))
    begun = [USER, {"role": "assistant", "content": "All"}]
    async with serving(turns, codec) as url:
        await ask(url, "/s/s1/v1/chat/completions", CHAT)
        await ask(url, "/s/s1/v1/chat/completions", {**CHAT, **CONTINUED, "messages": begun})
    first, second = turns.requests
    assert second.prompt_ids == (*first.prompt_ids, *codec.encode("All"))
    assert second.origin.history == "branch"


@pytest.mark.parametrize(
    "body",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": ""}]},
        {
            "continue_final_message": True,
            "add_generation_prompt": True,
            "messages": [USER, {"role": "assistant", "content": "x"}],
        },
    ],
)
async def test_what_cannot_be_continued_is_refused(body: dict[str, Any]) -> None:
    async with serving(saying("yes"), codecs.tiny()) as url:
        told = await ask(url, "/v1/chat/completions", {**CHAT, **body}, 400)
    assert told["error"]["param"] == "continue_final_message"


# -- tool calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 1000])
async def test_without_parallel_calls_an_answer_ends_with_its_first(stream: bool, chunk: int) -> None:
    codec = codecs.qwen25()
    ids = [*codec.encode("Well. " + CALLS), EOS]
    turns = ScriptedTurns(lambda request: Script(ids, chunk=chunk))
    asked = {**CHAT, "tools": TOOLS, "parallel_tool_calls": False, "stream": stream, "return_token_ids": True}
    async with serving(turns, codec) as url:
        told = await ask(url, "/v1/chat/completions", asked)
    if stream:
        deltas = [c for e in told for c in e["choices"]]
        calls = [call for d in deltas for call in d["delta"].get("tool_calls", [])]
        finish = [d["finish_reason"] for d in deltas if d["finish_reason"]]
        used = [i for d in deltas for i in d.get("token_ids", [])]
        stop = [d["stop_reason"] for d in deltas if d["finish_reason"]]
    else:
        [choice] = told["choices"]
        calls, finish, used = choice["message"]["tool_calls"], [choice["finish_reason"]], choice["token_ids"]
        stop = [choice["stop_reason"]]
    assert [call["function"]["name"] for call in calls] == ["f"]
    assert (finish, stop) == (["tool_calls"], [None])
    assert codec.decode(used).endswith("</tool_call>"), "what was not read is not recorded"
    assert turns.early == [len(used)]


async def test_with_parallel_calls_all_are_told() -> None:
    codec = codecs.qwen25()
    async with serving(saying(CALLS, codec), codec) as url:
        told = await ask(url, "/v1/chat/completions", {**CHAT, "tools": TOOLS})
    assert [c["function"]["name"] for c in told["choices"][0]["message"]["tool_calls"]] == ["f", "g"]
