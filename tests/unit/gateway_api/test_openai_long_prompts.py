"""Long prompts and long sessions: what they cost everybody else."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from typing import Any

import aiohttp
import pytest

from gateway.api.calls.history import completion_prompt
from gateway.core.tree import TurnTree
from gateway.core.types import SamplingParams, SessionId, TurnId, TurnRecord, TurnRequest
from gateway.ports import SessionView
from gateway.tokens import Codec
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

EOS = 2
TRIES = 5
"""A pause of the whole machine is one of the loop, too."""


async def longest_pause(task: asyncio.Task[Any]) -> float:
    """Seconds for which the event loop stood still at most while the task ran."""
    longest, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_large_prompt_is_tokenised_beside_everything_else(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, threads = codecs.qwen25(), list[tuple[int, float]]()
    text = "The answer is 42; call the calculator to be sure. " * 30_000  # 1.5 MB
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 1}
    asked |= {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = json.dumps(asked).encode()
    turns = ScriptedTurns(lambda request: Script([EOS]), context_tokens=1 << 30)
    encode = Codec.encode

    def encoding(self: Codec, text_: str, **how: Any) -> list[int]:
        began = time.perf_counter()
        ids = encode(self, text_, **how)
        if len(text_) >= len(text):
            threads.append((threading.get_ident(), time.perf_counter() - began))
        return ids

    monkeypatch.setattr(Codec, "encode", encoding)
    async with serving(turns, codec) as url, aiohttp.ClientSession() as http:

        async def ask() -> int:
            async with http.post(f"{url}/v1/{path}", data=io.BytesIO(body)) as answer:
                await answer.read()
                return answer.status

        paused: list[str] = []
        for _ in range(TRIES):
            threads.clear()
            task = asyncio.create_task(ask())
            pause = await longest_pause(task)
            assert task.result() == 200
            [(thread, took)] = threads
            assert thread != threading.get_ident()
            if pause < took / 2:
                return
            paused.append(f"{pause:.3f} s, of {took:.3f} s of tokenising")
    raise AssertionError(f"the loop stood still for {paused}")


@pytest.mark.parametrize("codec", [codecs.tiny, codecs.sentencepiece], ids=lambda codec: codec.__name__)
def test_long_and_short_texts_have_the_same_tokens(codec: Any) -> None:
    text = "The answer is 42; ünïcode, too. <|im_end|> " * 200
    assert len(text) > 2000
    for special in (False, True):
        plain = codec().tokenizer.encode(text, add_special_tokens=special).ids
        assert codec().encode(text, add_special_tokens=special) == plain


def session_of(codec: Codec, num_turns: int) -> tuple[TurnTree, list[int]]:
    """A conversation of texts, each going on from the one before it."""
    tree, ids, parent = TurnTree(), list[int](), None
    for number in range(num_turns):
        prompt = [*ids, *codec.encode(f" Question {number}?")]
        said = codec.encode(f" Answer {number}.")
        request = TurnRequest(
            TurnId(f"t{number}"), SessionId("s"), number, tuple(prompt), SamplingParams(max_tokens=9), parent
        )
        tree.add(TurnRecord(request, said, [0.0] * len(said), [], "length"))
        ids, parent = [*prompt, *said], request.turn_id
    return tree, ids


@pytest.mark.parametrize("make", [codecs.tiny, codecs.sentencepiece], ids=lambda codec: codec.__name__)
def test_what_a_session_said_is_decoded_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = make()
    tree, ids = session_of(codec, 30)
    view = SessionView(SessionId("s"), tree, ephemeral=False)
    decoded = 0
    decode = Codec.decode

    def decoding(self: Codec, token_ids: Any) -> str:
        nonlocal decoded
        decoded += 1
        return decode(self, token_ids)

    monkeypatch.setattr(Codec, "decode", decoding)
    text = decode(codec, ids) + " More, please: é"
    for _ in range(3):
        found = completion_prompt(codec, view, text, add_special_tokens=False)
        assert (found.parent, found.history) == (tree.newest.turn_id if tree.newest else None, "extended")
        assert found.token_ids[: len(ids)] == ids
    assert decoded == 30, "each path once, whatever is asked"
    before = completion_prompt(
        codec, view, decode(codec, tree.ids(tree.turns[TurnId("t7")])) + "!", add_special_tokens=False
    )
    assert (before.parent, before.history) == ("t7", "branch")
    assert completion_prompt(codec, view, "Something else", add_special_tokens=False).parent is None


def test_a_turn_that_is_cut_short_is_decoded_again() -> None:
    codec = codecs.tiny()
    tree, ids = session_of(codec, 2)
    view = SessionView(SessionId("s"), tree, ephemeral=False)
    completion_prompt(codec, view, "x", add_special_tokens=False)
    assert tree.newest is not None
    tree.newest.shorten(1)
    kept = tree.ids(tree.newest)
    found = completion_prompt(codec, view, codec.decode(kept) + " on", add_special_tokens=False)
    assert found.parent == "t1"
    assert found.token_ids[: len(kept)] == kept != ids
