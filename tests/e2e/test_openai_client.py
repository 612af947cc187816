"""The gateway as its users meet it: real processes, driven by the official `openai` client.

One embedded engine on the tiny model answers what the model says; a scripted engine (real HTTP, vLLM's dialect) answers
what a test says, for tool calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.client_gateways import EOS, ServedGateway, over_embedded, over_script
from tests.support.fleet import until

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "What is the sum of 12 and 30?"}]


class Gateway(ServedGateway):
    def client(self, path: str = "/v1", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + path, api_key="unused", max_retries=0, **options)

    def async_client(self, path: str = "/v1") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + path, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with over_embedded(tmp_path_factory.mktemp("openai"), "--disconnect-grace-s=0.2") as found:
        yield Gateway(found.url, found.daemon, found.codec)


CALL = '{"name": "calculator", "arguments": {"expression": "12 + 30"}}'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def tool_user(prompt: str) -> str:
    """Asks the calculator, then reads its answer out; counts where it is asked to."""
    if prompt.endswith("Count.<|im_end|>\n<|im_start|>assistant\n"):
        return "one two three END four five six seven eight nine ten"
    _, answered, result = prompt.rpartition("<tool_response>\n")
    if answered:
        return f"It is {result.split()[0]}."
    return f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture(scope="module")
def tool_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with over_script(tmp_path_factory.mktemp("tools"), tool_user, "--disconnect-grace-s=0.2") as found:
        yield Gateway(found.url, found.daemon, found.codec)


def test_models(gateway: Gateway) -> None:
    with gateway.client() as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        assert client.models.retrieve("policy").owned_by == "laminar"


def test_chat_whole_and_streamed_say_the_same(gateway: Gateway) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 24, "temperature": 0}
    with gateway.client() as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(gateway.codec.render(HELLO))
    assert whole.usage.completion_tokens == 24


async def test_async_clients_side_by_side(gateway: Gateway) -> None:
    async with gateway.async_client() as client:

        async def streamed(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="policy", messages=HELLO, max_tokens=16, seed=seed, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        async def whole(seed: int) -> str:
            answer = await client.chat.completions.create(model="policy", messages=HELLO, max_tokens=16, seed=seed)
            return answer.choices[0].message.content or ""

        texts = await asyncio.gather(*(ask(seed) for seed in range(4) for ask in (streamed, whole)))
    assert texts[0::2] == texts[1::2]  # the same seed says the same, streamed or not
    assert len(set(texts)) > 1


def test_completions_by_ids_return_ids_logprobs_and_versions(gateway: Gateway) -> None:
    prompt = gateway.codec.encode("The trainer makes new weights")
    with gateway.client() as client:
        answer: Any = client.completions.create(
            model="policy",
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            logprobs=2,
            extra_body={"return_token_ids": True, "return_weight_versions": True, "ignore_eos": True},
        )
    [choice] = answer.choices
    assert len(choice.token_ids) == 8
    assert gateway.codec.decode(choice.token_ids) == "".join(choice.logprobs.tokens)
    assert len(choice.logprobs.token_logprobs) == 8
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == pytest.approx(logprob, abs=1e-5)  # greedy: the sampled token is the likeliest
        assert max(top.values()) == top[token]
    [span] = choice.weight_versions
    assert (span["start"], span["end"], span["engine"]) == (0, 8, "e0")
    assert answer.prompt_token_ids == prompt


def test_chat_logprobs(gateway: Gateway) -> None:
    with gateway.client() as client:
        answer = client.chat.completions.create(
            model="policy", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 4
    assert all(token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-5) for token in logprobs.content)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(gateway: Gateway, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 32, "temperature": 0}
    with gateway.client() as client:
        said = client.chat.completions.create(**asked).choices[0].message.content or ""
        stop = said[len(said) // 2 : len(said) // 2 + 3]
        expected = said[: said.index(stop)]
        if stream:
            chunks = list(client.chat.completions.create(**asked, stop=[stop], stream=True))
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = client.chat.completions.create(**asked, stop=stop)
            text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (text, reason) == (expected, "stop")


def test_a_session_over_turns_is_one_record(gateway: Gateway) -> None:
    made = httpx.post(f"{gateway.url}/sessions", json={"group_id": "g", "tags": {"env": "test"}}).json()
    messages = list(HELLO)
    extra = {"return_token_ids": True}
    ids: list[int] = []
    sampled = 0
    with openai.OpenAI(base_url=made["base_url"], api_key=made["api_key"], max_retries=0) as client:
        for turn in range(3):
            raw = client.chat.completions.with_raw_response.create(
                model="policy", messages=messages, max_tokens=6, extra_body=extra
            )
            answer: Any = raw.parse()
            assert raw.headers["X-Session-ID"] == made["session_id"]
            assert answer.prompt_token_ids[: len(ids)] == ids, f"turn {turn} does not extend the record"
            ids = answer.prompt_token_ids + answer.choices[0].token_ids
            sampled += len(answer.choices[0].token_ids)  # up to 6: the model may end before
            messages += [answer.choices[0].message, {"role": "user", "content": f"And {turn}?"}]
    finished = httpx.post(f"{gateway.url}/sessions/{made['session_id']}/finish", json={"reward": 0.5})
    assert finished.status_code == 200, finished.text
    sample = {"reader": "test", "trainer_version": 0, "trajectories": 1, "wait_s": 10}
    [trajectory] = httpx.post(f"{gateway.url}/experience/sample", json=sample, timeout=60).json()["trajectories"]
    assert trajectory["token_ids"] == ids
    assert trajectory["session_id"] == made["session_id"]
    assert sum(trajectory["loss_mask"]) == sampled
    assert trajectory["turns"] == 3
    assert all((lp == 0.0) == (m == 0) for lp, m in zip(trajectory["logprobs"], trajectory["loss_mask"], strict=True))


def test_a_session_by_token_ids_is_one_record(gateway: Gateway) -> None:
    """As train clients do it: they look the context up, tokenise themselves, and name the session in a header."""
    [model] = httpx.get(f"{gateway.url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 2048)
    ids, headers = gateway.codec.render(HELLO), {"X-Session-ID": "by-ids"}
    for history in ("first", "extended"):
        sampling = {"max_tokens": 6, "logprobs": 1, "stop_token_ids": [EOS], "skip_special_tokens": False}
        body = {"model": "policy", "token_ids": ids, "sampling_params": sampling}
        raw = httpx.post(f"{gateway.url}/inference/v1/generate", json=body, headers=headers, timeout=60)
        [choice] = raw.raise_for_status().json()["choices"]
        assert raw.headers["X-Laminar-History"] == history
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{i}" for i in choice["token_ids"]
        ]
        assert all(-100 < entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
        ids = [*ids, *choice["token_ids"], *gateway.codec.encode("<|im_start|>user\nAnd?<|im_end|>\n")]
    finished = httpx.post(f"{gateway.url}/finish_session?session_id=by-ids", json={"reward": 0.5}).json()
    assert (finished["leaves"], finished["turns"]) == (1, 2)
    sample = {"reader": "test", "trainer_version": 0, "trajectories": 1, "wait_s": 10}
    [trajectory] = httpx.post(f"{gateway.url}/experience/sample", json=sample, timeout=60).json()["trajectories"]
    rest = ids[len(trajectory["token_ids"]) :]
    assert (trajectory["session_id"], [*trajectory["token_ids"], *rest]) == ("by-ids", ids)
    assert gateway.codec.decode(rest) == "<|im_start|>user\nAnd?<|im_end|>\n"


def test_branches_of_a_session_reach_the_trainer_as_its_leaves(gateway: Gateway) -> None:
    made = httpx.post(f"{gateway.url}/sessions", json={"group_id": "branches"}).json()
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 6, "seed": 3, "extra_body": {"return_token_ids": True}}
    with openai.OpenAI(base_url=made["base_url"], api_key=made["api_key"], max_retries=0) as client:
        first: Any = client.chat.completions.create(messages=HELLO, n=2, **asked)
        messages = [*HELLO, first.choices[1].message, {"role": "user", "content": "go on"}]
        second: Any = client.chat.completions.create(messages=messages, **asked)
    assert first.choices[0].token_ids != first.choices[1].token_ids, "each choice draws its own noise"
    finished = httpx.post(f"{gateway.url}/sessions/{made['session_id']}/finish", json={"reward": 1.0}).json()
    assert (finished["leaves"], finished["turns"]) == (2, 3)
    sample = {"reader": "t", "trainer_version": 0, "trajectories": 1, "wait_s": 10.0}
    leaves = httpx.post(f"{gateway.url}/experience/sample", json=sample, timeout=60).json()["trajectories"]
    paths = [
        first.prompt_token_ids + first.choices[0].token_ids,
        second.prompt_token_ids + second.choices[0].token_ids,
    ]
    assert sorted(leaf["token_ids"] for leaf in leaves) == sorted(paths)
    said = [len(choice.token_ids) for choice in (*first.choices, *second.choices)]
    assert sorted(sum(leaf["loss_mask"]) for leaf in leaves) == sorted([said[0], said[1] + said[2]])


def test_a_stop_string_ends_the_record_where_the_text_ends(gateway: Gateway) -> None:
    made = httpx.post(f"{gateway.url}/sessions", json={}).json()
    extra = {"return_token_ids": True}
    with openai.OpenAI(base_url=made["base_url"], api_key=made["api_key"], max_retries=0) as client:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 32, "temperature": 0, "extra_body": extra}
        free: Any = gateway.client().chat.completions.create(messages=HELLO, **asked)
        said = free.choices[0].message.content
        stop = said[len(said) // 2 : len(said) // 2 + 3]
        first: Any = client.chat.completions.create(messages=HELLO, stop=stop, **asked)
        messages = [*HELLO, first.choices[0].message, {"role": "user", "content": "go on"}]
        second: Any = client.chat.completions.create(messages=messages, **asked)
    kept = first.choices[0].token_ids
    assert kept == free.choices[0].token_ids[: len(kept)]
    assert len(kept) < 32
    before = first.prompt_token_ids + kept
    assert second.prompt_token_ids[: len(before)] == before
    rest = gateway.codec.decode(second.prompt_token_ids[len(before) :])
    assert rest == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_errors_are_the_clients_own(gateway: Gateway) -> None:
    with gateway.client() as client:
        with pytest.raises(openai.NotFoundError, match="served: 'policy'"):
            client.chat.completions.create(model="gpt-4", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="1 to 64"):
            client.chat.completions.create(model="policy", messages=HELLO, n=65)
        with pytest.raises(openai.BadRequestError, match=r"2048 tokens.* 3000") as caught:
            client.completions.create(model="policy", prompt=[5] * 3000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="unknown field `temprature`"):
            client.chat.completions.create(model="policy", messages=HELLO, extra_body={"temprature": 1})


def test_a_stream_that_is_closed_early_frees_its_session(gateway: Gateway) -> None:
    gateway.hold.touch()  # else the turn might be over first
    aborted = gateway.counter("turns_aborted")
    with gateway.client("/sessions/leaves/v1") as client:
        stream = client.chat.completions.create(
            model="policy", messages=HELLO, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        until(lambda: gateway.counter("turns_aborted") == aborted + 1, "the end of a turn whose client left")
        gateway.hold.unlink()
        again = client.chat.completions.create(model="policy", messages=HELLO, max_tokens=4)
    assert again.choices[0].message.role == "assistant"


def test_raw_bytes_of_a_stream_are_server_sent_events(gateway: Gateway) -> None:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(tool_gateway: Gateway, stream: bool) -> None:
    messages = list(HELLO)
    with tool_gateway.client(f"/sessions/tools-{stream}/v1") as client:
        asked: dict[str, Any] = {"model": "policy", "tools": TOOLS}
        if stream:
            with client.chat.completions.stream(messages=messages, **asked) as events:
                called = events.get_final_completion().choices[0]
        else:
            called = client.chat.completions.create(messages=messages, **asked).choices[0]  # type: ignore[assignment]
        assert called.finish_reason == "tool_calls"
        assert called.message.content == "Let me see."
        assert called.message.tool_calls is not None
        [call] = called.message.tool_calls
        assert call.function.name == "calculator"
        assert json.loads(call.function.arguments) == {"expression": "12 + 30"}
        messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        raw = client.chat.completions.with_raw_response.create(messages=messages, **asked)
    assert raw.headers["X-Laminar-History"] == "extended"
    assert raw.parse().choices[0].message.content == "It is 42."


async def test_tool_call_deltas_of_an_async_stream(tool_gateway: Gateway) -> None:
    async with tool_gateway.async_client() as client:
        stream = await client.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(c.delta.content or "" for c in choices) == "Let me see."
    [call] = [call for c in choices for call in c.delta.tool_calls or []]
    assert (call.index, call.type) == (0, "function")
    assert call.function is not None
    assert json.loads(call.function.arguments or "") == {"expression": "12 + 30"}
    assert choices[-1].finish_reason == "tool_calls"


def test_a_stop_string_in_an_answer_that_had_ended_shortens_the_record(tool_gateway: Gateway) -> None:
    count: list[Any] = [{"role": "user", "content": "Count."}]
    extra = {"return_token_ids": True}
    with tool_gateway.client("/sessions/counts/v1") as client:
        first: Any = client.chat.completions.create(model="policy", messages=count, stop="END", extra_body=extra)
        assert first.choices[0].message.content == "one two three "
        kept = tool_gateway.codec.decode(first.choices[0].token_ids)
        assert kept.startswith("one two three END")
        assert "five" not in kept
        more = [*count, first.choices[0].message, {"role": "user", "content": "What is 1+1?"}]
        second: Any = client.chat.completions.create(model="policy", messages=more, extra_body=extra)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert "five" not in tool_gateway.codec.decode(second.prompt_token_ids)
