"""What is kept of turns that are over: within a bound in bytes, which counts their prompts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
import pytest

from gateway.core.types import TopLogprob
from gateway.turns import joinable
from gateway.turns.joinable import PROMPT_TOKEN_BYTES, TOKEN_BYTES
from tests.support import codecs
from tests.support.gateway_shell import BUDGET, PROMPT, read, shell
from tests.support.scripted_engine import ScriptedEngine


async def test_the_oldest_go_first_when_their_prompts_take_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, idempotency_window_s=600.0) as found:
        turns = found.sessions.joinable
        runs = [found.run() for _ in range(4)]
        for run in runs:
            await read(run)
        each = len(PROMPT) * PROMPT_TOKEN_BYTES + BUDGET * TOKEN_BYTES
        monkeypatch.setattr(joinable, "KEPT_BYTES_MAX", 4 * each)
        assert list(turns.sweep(0.0)) == []
        await runs[2].finish_early(5)  # a stop string of a reader that was slower than the engine
        monkeypatch.setattr(joinable, "KEPT_BYTES_MAX", 2 * each)
        assert list(turns.sweep(0.0)) == runs[:2]
        monkeypatch.setattr(joinable, "KEPT_BYTES_MAX", each - 1)
        assert list(turns.sweep(0.0)) == runs[2:]
        assert turns._over_bytes == 0, "what was counted is given back, also of a turn that became shorter"
        assert turns._bytes == {}


async def test_alternatives_count_as_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, idempotency_window_s=600.0) as found:
        turns = found.sessions.joinable
        plain, told = found.run(), found.run(top_logprobs=20)
        for run in (plain, told):
            await read(run)
        top = [tuple(TopLogprob(int(f"{n}00"), -float(n)) for n in range(20)) for _ in told.record.token_ids]
        told.record.top_logprobs[:] = top
        turns.end(told, 0.0)
        tracemalloc.start()
        copied = msgspec.msgpack.decode(msgspec.msgpack.encode(top), type=list[tuple[TopLogprob, ...]])
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        counted = turns._bytes[told.request.turn_id] - turns._bytes[plain.request.turn_id]
        assert len(copied) == BUDGET
        assert taken / 1.5 < counted < taken * 1.5
        monkeypatch.setattr(joinable, "KEPT_BYTES_MAX", counted)
        assert list(turns.sweep(0.0)) == [plain, told]


def test_prompts_share_their_integers() -> None:
    codec = codecs.tiny()
    first, second = (codec.shared([int("300"), int("5"), int("500")]) for _ in range(2))
    assert first == second == (300, 5, 500)
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert codec.shared([1 << 40]) == (1 << 40,)
