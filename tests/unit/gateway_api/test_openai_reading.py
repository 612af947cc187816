"""Reasoning, calls and stop strings of an answer, through the whole route: what is said, recorded, and why it ended."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


async def answer(text: str, chunk: int = 1, **asked: Any) -> tuple[dict[str, Any], str]:
    """The choice of a model that reasons, and the text of the ids that were recorded."""
    codec = codecs.qwen3()
    ids = [*codec.encode(text), codec.tokenizer.token_to_id("<|im_end|>")]
    turns = ScriptedTurns(lambda request: Script(ids, chunk=chunk))
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True, **asked}
    async with serving(turns, codec) as url, aiohttp.ClientSession() as http:
        said = await (await http.post(f"{url}/v1/chat/completions", json=body)).json()
    [choice] = said["choices"]
    return choice, codec.decode(choice["token_ids"])


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_one_call_ends_an_answer_and_a_mention_of_its_tag_does_not(chunk: int) -> None:
    thought = f"<think>\nIt ends with </tool_call>: {CALL}\n</think>\n\nSo </tool_call> it is: "
    choice, recorded = await answer(f"{thought}{CALL}{CALL}", chunk, tools=TOOLS, parallel_tool_calls=False)
    assert recorded == f"{thought}{CALL}"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert choice["message"]["content"] == "So </tool_call> it is:"
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_a_stop_string_in_the_reasoning_ends_nothing(chunk: int) -> None:
    thought = "<think>\nHe asks. Question: what\n</think>\n\n"
    choice, recorded = await answer(f"{thought}Less.\nQuestion: next", chunk, stop=["Question:"])
    assert choice["message"]["content"] == "Less.\n"
    assert choice["message"]["reasoning_content"] == "He asks. Question: what"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Question:")
    assert recorded == f"{thought}Less.\nQuestion:"


async def test_a_stop_string_within_an_argument_ends_nothing() -> None:
    call = CALL.replace("{}", '{"text": "Question: END"}')
    choice, _ = await answer(f"<think></think>{call}\nEND", tools=TOOLS, stop=["END"])
    [called] = choice["message"]["tool_calls"]
    assert called["function"]["arguments"] == '{"text": "Question: END"}'


async def test_a_call_in_reasoning_that_nothing_closes_is_the_answer() -> None:
    choice, _ = await answer(f"<think>\nI will.\n\n{CALL}", tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("I will.", None)


@pytest.mark.parametrize(("begun", "reasons"), [("<think>\nFirst", True), ("First", False)])
async def test_a_message_that_began_its_reasoning_goes_on_with_it(begun: str, reasons: bool) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
    how = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    choice, _ = await answer(" this.\n</think>\n\nDone.", **how)
    said = (choice["message"].get("reasoning_content"), choice["message"]["content"])
    assert said == ((" this.", "Done.") if reasons else (None, " this.\n</think>\n\nDone."))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("begin", ["<think></think>", "<think>\nI write.\n", "x<|im_start|>"])
async def test_special_tokens_within_a_call_are_text_and_elsewhere_hidden(begin: str, chunk: int) -> None:
    """A model that writes a chat template into a file, its own tags included."""
    text = "a <|im_start|>user </tool_call> <|im_start|><|im_start|>"
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"text": "{text}"}}}}\n</tool_call>'
    choice, recorded = await answer(f"{begin}{call}<|im_start|>", chunk, tools=TOOLS)
    [called] = choice["message"]["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"text": text}
    assert "im_start" not in (choice["message"]["content"] or "") + (choice["message"].get("reasoning_content") or "")
    assert recorded == f"{begin}{call}<|im_start|><|im_end|>"


async def test_without_tools_no_special_token_is_shown() -> None:
    choice, _ = await answer(f"<think></think>{CALL.replace('f', '<|im_start|>')}", chunk=7)
    assert choice["message"]["content"] == CALL.replace("f", "")


async def test_a_special_token_at_which_the_engine_stopped_is_no_text_of_an_unfinished_call() -> None:
    codec = codecs.qwen3()
    started = codec.tokenizer.token_to_id("<|im_start|>")
    turns = ScriptedTurns(lambda request: Script([*codec.encode("<tool_call>{"), started]))
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    async with serving(turns, codec) as url, aiohttp.ClientSession() as http:
        said = await (await http.post(f"{url}/v1/chat/completions", json=body)).json()
    assert said["choices"][0]["message"]["content"] == "<tool_call>{"
