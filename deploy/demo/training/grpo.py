"""The arithmetic of GRPO: advantages within groups, and the clipped loss per token. Nothing here knows a model.

Sources: group-relative advantages from DeepSeekMath (arXiv 2402.03300, section 4.1); a loss averaged over tokens
and the higher upper clip from DAPO (arXiv 2503.14476, sections 3.1 and 3.3). The ratio is taken against the
logprobs that the engines recorded while sampling (the behaviour policy's), whatever version that was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Clip:
    """The ratio of new to behaviour probability counts only within [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.28


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per token; `loss` carries the gradient, the others are for the eye."""

    loss: torch.Tensor  # [M]
    clipped: torch.Tensor  # [M] bool: no gradient, because the ratio left the clip range
    kl: torch.Tensor  # [M] estimate of KL(behaviour || policy), never negative


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, *, epsilon: float = 1e-4) -> torch.Tensor:
    """[N] rewards, [N] group numbers from 0: each reward less its group's mean, over the group's deviation.

    Exactly zero throughout a group whose rewards are all equal: such a group teaches nothing and can be skipped.
    """
    rewards = rewards.double()  # means of equal float32 rewards are not always that reward
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    zeros = torch.zeros(num_groups, dtype=rewards.dtype)
    sizes = zeros.index_add(0, groups, torch.ones_like(rewards))
    means = zeros.index_add(0, groups, rewards) / sizes
    centred = rewards - means[groups]
    centred[centred.abs() < 1e-9] = 0.0
    deviations = (zeros.index_add(0, groups, centred.square()) / sizes).sqrt()
    return (centred / (deviations[groups] + epsilon)).float()


def token_loss(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> TokenLoss:
    """All [M]: new and recorded logprobs of the sampled tokens, and the advantage of each token's trajectory."""
    log_ratio = logprobs - behaviour
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    gain, bounded_gain = ratio * advantages, bounded * advantages
    with torch.no_grad():
        kl = ratio - 1.0 - log_ratio  # with samples from the behaviour policy, E[ratio] is 1
    return TokenLoss(loss=-torch.minimum(gain, bounded_gain), clipped=bounded_gain < gain, kl=kl)
