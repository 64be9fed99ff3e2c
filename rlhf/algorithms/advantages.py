"""Advantages: GAE for a critic; group baselines where several completions share a prompt; whitening.

Groups are contiguous: with ``group_size`` G, rewards ``[i * G, (i + 1) * G)`` belong to prompt i. Everything runs on
the whole batch of a training step, so "over the batch" is global however many ranks train on it.

A missing reward is NaN. Baselines and deviations exclude such completions, which get advantage 0; so does a completion
that is the only one of its group with a reward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlhf.batch import TrainBatch

RewardScale = Literal["group", "batch", "none"]

STD_EPSILON = 1e-4  # added to a standard deviation of rewards, as TRL does
WHITEN_EPSILON = 1e-8  # added to a variance


@dataclass(frozen=True)
class AdvantageInputs:
    """An estimator's inputs: the S completions of a training step, with N tokens in total. Read-only.

    Completions of one prompt are neighbours. Per-token tensors hold the completions concatenated, delimited by
    ``completion_lengths``; T also counts the prompts, each before its completion. In an environment a completion is
    what the model sampled, in all turns; T then counts what it observed between them, too. All are on the CPU.
    """

    rewards: Tensor  # float32 [S], clipped and, with rloo, minus the KL; NaN where none was given
    group_size: int  # completions per prompt; divides S
    completion_lengths: Tensor  # int64 [S]
    truncated: Tensor  # bool [S]: cut at the length limit
    tokens: Tensor  # int64 [T]: prompt then completion and observations, sequence after sequence
    prompt_lengths: Tensor  # int64 [S]
    versions: Tensor  # int32 [N]: of the weights that sampled each token
    old_logprobs: Tensor | None  # float32 [N], from the learner; None unless the KL is subtracted from the reward
    ref_logprobs: Tensor | None  # float32 [N], from the reference; None with algorithm.beta=0
    rollout_logprobs: Tensor | None  # float32 [N], from the sampler, NaN where not requested; None if it never was
    # None without an environment:
    sampled: Tensor | None = None  # bool [T]: the completions' tokens among ``tokens``; the others were given
    tail_lengths: Tensor | None = None  # int64 [S]: all tokens after the prompt
    turns: Tensor | None = None  # int32 [N]: which turn of its episode a token belongs to
    turn_rewards: Tensor | None = None  # float32 [N], at a turn's last token; part of ``rewards``

    @classmethod
    def of(cls, batch: TrainBatch, rewards: Tensor, group_size: int) -> "AdvantageInputs":
        return cls(
            rewards=rewards,
            group_size=group_size,
            completion_lengths=batch.completion_lengths,
            truncated=batch.truncated,
            tokens=batch.tokens,
            prompt_lengths=batch.prompt_lengths,
            versions=batch.versions,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            sampled=batch.sampled,
            tail_lengths=batch.tail_lengths,
            turns=batch.turns,
            turn_rewards=batch.turn_rewards,
        )


Estimator = Callable[[AdvantageInputs], Tensor]
"""Returns advantages: float32 [S], one per completion for all of its tokens, or [N], one per token. Its values for
completions without a reward are ignored."""


def place_scores(rewards: Tensor, scores: Tensor, mask: Tensor, *, after_last: bool = False) -> Tensor:
    """Adds each sequence's score to the reward of its last token.

    With ``after_last``, TRL's PPO convention: one position later if there is padding to hold it (the mask passed to
    ``gae`` must then include that position).

    rewards float [B, T] (for example ``-beta * KL``), scores float [B], mask bool or 0/1 [B, T], padded on the right,
    at least one token per row. Returns float [B, T].
    """
    last = mask.long().sum(1) - 1
    if after_last:
        last = (last + 1).clamp(max=mask.shape[1] - 1)
    return rewards.scatter_add(1, last.unsqueeze(1), scores.to(rewards.dtype).unsqueeze(1))


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. Schulman et al. 2016, arXiv 1506.02438, equation 16.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    ``V`` after the last token is ``bootstrap_values``: the critic's estimate beyond the cut of a truncated row, 0 for
    a row that ended; None: 0 for all.

    rewards, values float [B, T]; mask bool or 0/1 [B, T], padded on the right; bootstrap_values float [B] or None.
    Returns (advantages, returns), float [B, T], zero at padding.
    """
    real = mask.bool()
    next_value = torch.zeros_like(values[:, 0]) if bootstrap_values is None else bootstrap_values.to(values.dtype)
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        # At padding both carry over, so a row's recursion starts at its own last token.
        next_advantage = torch.where(real[:, t], advantage, next_advantage)
        next_value = torch.where(real[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(real[:, t], advantage, 0.0)
    return advantages, torch.where(real, advantages + values, 0.0)


def clip_rewards(rewards: Tensor, clip: float | None) -> Tensor:
    """Rewards, float of any shape, clipped to [-clip, clip]; None: unchanged. NaN stays NaN."""
    return rewards if clip is None else rewards.clamp(-clip, clip)


def group_normalized(rewards: Tensor, group_size: int, *, scale: RewardScale) -> Tensor:
    """``(r_i - mean of the group) / (std + 1e-4)``. GRPO: arXiv 2402.03300, section 4.1.2.

    The deviation is Bessel-corrected; ``scale`` says what it is taken over: the ``group``; the raw rewards of the
    ``batch`` (arXiv 2508.08221); or ``none``, no division (Dr. GRPO, arXiv 2503.20783).

    rewards float [B], group-contiguous, NaN where missing. Returns float [B]. Raises ValueError for an unknown scale,
    for group_size < 2 and if group_size does not divide B.
    """
    if scale not in get_args(RewardScale):
        raise ValueError(f"scale={scale!r} is unknown; use group, batch or none")

    def normalise(groups: Tensor) -> Tensor:
        centred = groups - groups.mean(1, keepdim=True)
        if scale == "group":
            return centred / (groups.std(1, keepdim=True) + STD_EPSILON)
        if scale == "batch":
            return centred / (rewards[~rewards.isnan()].std() + STD_EPSILON)
        return centred

    return _by_group(rewards, group_size, normalise)


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """RLOO: each reward minus the mean of the others in its group. Ahmadian et al. 2024, arXiv 2402.14740.

        A_i = r_i - sum_{j != i} r_j / (G - 1)

    rewards float [B], group-contiguous, NaN where missing; G counts the group's rewards that are not missing. Returns
    float [B]. Raises ValueError as ``group_normalized`` does.
    """

    def less_others(groups: Tensor) -> Tensor:
        others = (groups.sum(1, keepdim=True) - groups) / (groups.shape[1] - 1)
        return groups - others

    return _by_group(rewards, group_size, less_others)


def leave_one_out_of_turns(inputs: AdvantageInputs) -> Tensor:
    """``leave_one_out`` turn by turn: what followed turn k, minus the mean of what followed it in the others.

        G_ik = sum_{l >= k} r_il + r_i                  rewards of turn k and later, and of the end
        A_ik = G_ik - sum_{j != i} G_jk / (G - 1)       0 for j that had ended before turn k

    The baseline of a turn depends on other episodes alone, so it leaves the policy gradient unbiased (Williams 1992).
    An average over those that got as far as turn k would not: who got there depends on what was done before.

    Returns float [N]: the same for all tokens of a turn.
    """
    assert inputs.turns is not None and inputs.turn_rewards is not None
    sequence = torch.arange(len(inputs.rewards)).repeat_interleave(inputs.completion_lengths)
    turns = inputs.turns.long()
    by_turn = torch.zeros(len(inputs.rewards), int(turns.max()) + 1)
    given = by_turn.index_put((sequence, turns), inputs.turn_rewards, accumulate=True)
    reached = by_turn.index_put((sequence, turns), torch.ones(())) > 0
    at_end = inputs.rewards - given.sum(1)  # NaN for those without a reward
    followed = given.flip(1).cumsum(1).flip(1) + at_end[:, None]
    followed = torch.where(reached | at_end.isnan()[:, None], followed, 0.0)
    less_others = [leave_one_out(of_turn, inputs.group_size) for of_turn in followed.unbind(1)]
    return torch.stack(less_others, 1)[sequence, turns]


def reinforce_plus_plus_baseline(rewards: Tensor, group_size: int) -> Tensor:
    """REINFORCE++ with baseline: minus the group mean, then whitened over the batch. Hu et al., arXiv 2501.03262.

    rewards float [B], group-contiguous, NaN where missing. Returns float [B]. Raises ValueError as ``group_normalized``
    does.
    """
    centred, given = group_normalized(rewards, group_size, scale="none"), ~rewards.isnan()
    if given.sum() < 2:
        return centred
    alone = (_as_groups(given, group_size).sum(1) == 1).repeat_interleave(group_size)
    return whiten(centred, given).masked_fill(alone, 0.0)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` over the unmasked values; without ``shift_mean`` the mean is added back.

    The variance is Bessel-corrected, as in TRL. Global if ``x`` is the whole batch.

    x float and mask bool or 0/1, of the same shape. Returns float of that shape, zero where masked. Raises ValueError
    if fewer than two values are unmasked.
    """
    real = mask.bool()
    if real.sum() < 2:
        raise ValueError(f"whitening needs at least 2 unmasked values, got {int(real.sum())}; use a larger batch")
    variance, mean = torch.var_mean(x[real])
    whitened = (x - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return torch.where(real, whitened if shift_mean else whitened + mean, 0.0)


def _by_group(rewards: Tensor, group_size: int, advantages_of: Callable[[Tensor], Tensor]) -> Tensor:
    """float [B] from rewards float [B]: ``advantages_of`` takes and returns float [groups, n], without missing rewards.

    Groups with the same number n of rewards run together; those with fewer than two, and missing rewards, get 0.
    """
    groups = _as_groups(rewards, group_size)
    given = ~groups.isnan()
    num_given = given.sum(1, keepdim=True)
    advantages = torch.zeros_like(groups)
    for n in num_given[num_given >= 2].unique().tolist():
        present = given & (num_given == n)
        advantages[present] = advantages_of(groups[present].view(-1, n)).flatten()
    return advantages.flatten()


def _as_groups(rewards: Tensor, group_size: int) -> Tensor:
    """float [B / group_size, group_size]."""
    if group_size < 2:
        raise ValueError(f"group_size={group_size} leaves nothing to compare a reward with; group_size must be >= 2")
    if rewards.numel() % group_size != 0:
        raise ValueError(
            f"group_size={group_size} does not divide the {rewards.numel()} rewards; give whole groups, or a divisor"
        )
    return rewards.reshape(-1, group_size)
