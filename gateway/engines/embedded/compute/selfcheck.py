"""The self-check of batch-invariant mode, on this machine and before serving.

The mode depends on a property that torch does not guarantee: a kernel of fixed shape rounds a row the same way whatever
the other rows hold. So an engine in that mode verifies it with its own weights first, or does not start.
"""

from __future__ import annotations

import random
from dataclasses import replace

from gateway.engines.embedded.batching.sequence import GenerationRequest, SamplingParams, Token
from gateway.engines.embedded.engine import Engine
from protos.errors import LaminarError

PROMPT_TOKENS = 70
TURN = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
CUT = 3


def check_invariance(engine: Engine) -> None:
    """LaminarError unless a turn alone, beside others, and cut and resumed agree in every bit of their logprobs."""
    rng = random.Random(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(engine.shape.vocab) for _ in range(length))

    prompt = draw(min(PROMPT_TOKENS, engine.config.max_model_len // 2))
    others = [GenerationRequest(f"other-{i}", draw(3 + 17 * i), replace(TURN, max_tokens=5)) for i in range(3)]
    turn = GenerationRequest("turn", prompt, TURN)
    alone = _run(engine, [turn])
    beside = _run(engine, [*others, turn])
    rest = replace(
        turn, prompt_ids=prompt + tuple(token.id for token in alone[:CUT]), params=replace(TURN, max_tokens=5)
    )
    resumed = alone[:CUT] + _run(engine, [rest, others[0]])
    if not alone == beside == resumed:
        raise LaminarError(
            "this machine's matrix kernels are not batch-invariant: a turn alone, beside others and resumed differ",
            hint="run without --batch-invariant",
        )


def _run(engine: Engine, requests: list[GenerationRequest]) -> list[Token]:
    """The tokens of "turn", every request computed from nothing."""
    engine.scheduler.new_epoch()
    for request in requests:
        engine.add(request)
    tokens: list[Token] = []
    while not engine.idle:
        tokens += [d.token for d in engine.step() if d.request_id == "turn" and d.token is not None]
    return tokens
