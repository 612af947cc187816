"""From logits to tokens: bias and penalties, greedy, temperature, min-p, top-k, top-p, with the policy's logprobs.

Each row is drawn by inverting its own cumulative distribution at one uniform number that is a function of (seed,
absolute position) alone: a row's token depends neither on the batch around it nor on where its turn was cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from gateway.engines.embedded.batching.sequence import SamplingParams, Token

_MASK = (1 << 64) - 1
TOP_P_CANDIDATES = 1024
"""Nucleus sampling first looks among this many best tokens; it sorts the vocabulary only when they are too few."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    params: SamplingParams
    position: int
    """Absolute position of the token to be drawn."""
    forbidden_ids: Seq[int] = ()
    """End tokens while fewer than `min_tokens` are generated."""
    token_ids: Seq[int] = ()
    """Prompt and generated ids, the first `num_prompt` the prompt's; needed where `params.penalised`."""
    num_prompt: int = 0


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position), by two rounds of splitmix64."""
    z = _mix((_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK)
    return (z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Seq[SamplingRow], *, processed_logprobs: bool = True) -> list[Token]:
    """One token for each row of `logits` [R, vocab], which may be changed in place when a row forbids tokens."""
    raw = logits
    if not processed_logprobs and any(row.forbidden_ids for row in rows):
        logits = logits.clone()
    for i, row in enumerate(rows):
        if row.forbidden_ids:
            logits[i, list(row.forbidden_ids)] = float("-inf")
    if any(row.params.penalised or row.params.logit_bias for row in rows):
        logits = logits.float().clone()
        for i, row in enumerate(rows):
            _adjust(logits[i], row)
    if all(row.params.greedy and row.params.logprobs is None for row in rows):
        return [Token(id) for id in logits.argmax(-1).tolist()]
    probs = torch.softmax(_process(logits, rows), -1, dtype=torch.float32)
    ids = _draw(logits, probs, rows)
    reported = probs if processed_logprobs else torch.softmax(raw, -1, dtype=torch.float32)
    chosen = reported.gather(1, torch.tensor(ids, device=reported.device)[:, None])[:, 0].log().tolist()
    return [
        _token(id, logprob, reported[i], rows[i].params)
        for i, (id, logprob) in enumerate(zip(ids, chosen, strict=True))
    ]


def _adjust(logits: torch.Tensor, row: SamplingRow) -> None:
    """Bias and penalties, in place and in vLLM's order: they change which token is the likeliest."""
    params, device = row.params, logits.device
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[torch.tensor(ids, device=device)] += torch.tensor(biases, device=device)
    if params.repetition_penalty != 1.0 and row.token_ids:
        present = torch.unique(torch.tensor(row.token_ids, device=device))
        found, penalty = logits[present], params.repetition_penalty
        logits[present] = torch.where(found > 0, found / penalty, found * penalty)
    generated = row.token_ids[row.num_prompt :]
    if generated and (params.presence_penalty or params.frequency_penalty):
        distinct, counts = torch.unique(torch.tensor(generated, device=device), return_counts=True)
        logits[distinct] -= params.frequency_penalty * counts + params.presence_penalty


def _process(logits: torch.Tensor, rows: Seq[SamplingRow]) -> torch.Tensor:
    """Logits after temperature and truncation; greedy rows stay as they are."""
    temperatures = [1.0 if row.params.greedy else row.params.temperature for row in rows]
    scaled = logits
    if any(t != 1.0 for t in temperatures):
        scaled = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    for i, row in enumerate(rows):
        if row.params.truncated:
            scaled = scaled.float() if scaled.dtype != torch.float32 else scaled.clone() if scaled is logits else scaled
            scaled[i] = _truncate(scaled[i], row.params.top_k, row.params.top_p, row.params.min_p)
    return scaled


def _truncate(logits: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """Keeps tokens of `min_p` times the likeliest one's probability, of these the `top_k` most likely, and of those the
    smallest set that holds `top_p` of their mass.
    """
    if min_p > 0.0:
        logits = logits.masked_fill(logits < logits.max() + math.log(min_p), -math.inf)
    if 0 < top_k < logits.shape[0]:
        logits = _keep(logits, *logits.topk(top_k))
    if top_p >= 1.0:
        return logits
    total = torch.logsumexp(logits, 0)
    for candidates in (min(TOP_P_CANDIDATES, logits.shape[0]), logits.shape[0]):
        values, ids = logits.topk(candidates)
        mass = (values - total).exp()
        inside = mass.cumsum(0) - mass < top_p  # the first is always inside
        if not bool(inside[-1]):
            break
    return _keep(logits, values[inside], ids[inside])


def _keep(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -math.inf).index_copy_(0, ids, values)


def _draw(logits: torch.Tensor, probs: torch.Tensor, rows: Seq[SamplingRow]) -> list[int]:
    ids = [0] * len(rows)
    greedy = [i for i, row in enumerate(rows) if row.params.greedy]
    if greedy:
        for i, id in zip(greedy, logits[greedy].argmax(-1).tolist(), strict=True):
            ids[i] = id
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if random:
        noise = [uniform(rows[i].params.seed, rows[i].position) for i in random]
        for i, id in zip(random, _invert(probs if len(random) == len(rows) else probs[random], noise), strict=True):
            ids[i] = id
    return ids


def _invert(probs: torch.Tensor, noise: list[float]) -> list[int]:
    """For each row the token at which its cumulative distribution passes its noise.

    In two levels, blocks of tokens and then tokens of the block: summing a block is fast, a cumulative sum is not.
    """
    num_rows, vocab = probs.shape
    block = math.gcd(vocab, 256)
    blocks = probs.view(num_rows, -1, block)
    masses = blocks.sum(-1).double()
    cumulative = masses.cumsum(-1)
    # Against the row's own total, not 1: rounding must not leave a gap at the end of the vocabulary.
    targets = torch.tensor(noise, dtype=torch.float64, device=probs.device)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = (cumulative - masses).gather(1, chosen)
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, block))[:, 0].double().cumsum(-1)
    within = torch.searchsorted(inside, (targets - before).clamp_(min=0.0), right=True).clamp_(max=block - 1)
    ids: torch.Tensor = (chosen * block + within)[:, 0]
    # A target within rounding of a block's end may fall past its last possible token: take the likeliest then.
    possible = probs.gather(1, ids[:, None])[:, 0] > 0
    if not bool(possible.all()):
        ids = torch.where(possible, ids, probs.argmax(-1))
    result: list[int] = ids.tolist()
    return result


def _token(id: int, logprob: float, probs: torch.Tensor, params: SamplingParams) -> Token:
    if params.logprobs is None:
        return Token(id)
    if params.logprobs == 0:
        return Token(id, logprob)
    values, ids = probs.topk(params.logprobs)
    return Token(id, logprob, tuple(zip(ids.tolist(), values.log().tolist(), strict=True)))
