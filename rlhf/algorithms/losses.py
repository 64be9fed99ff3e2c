"""Policy and value losses over packed tokens.

Layout: the completion tokens of S sequences concatenated, ``[N]``, delimited by ``lengths`` int64 ``[S]``, all on one
device. A sequence is never split. Log-probabilities and entropies are in nats.

Every loss is ``(per_token_loss * weights).sum()``. ``weights`` come from ``token_weights`` over the WHOLE optimiser
step (all ranks, all micro-batches) before its first forward. Losses, gradients and stats of micro-batches and ranks
then simply add up, and no result depends on how the step was divided.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rlhf.algorithms.kl import k2, kl_penalty

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "rloo"]
ImportanceSamplingLevel = Literal["token", "sequence", "sequence_sum"]
Stats = dict[str, Tensor]


@dataclass(frozen=True)
class LossInputs:
    """A per-token loss's inputs: a micro-batch of S whole sequences, with N completion tokens in total.

    Read-only. ``ratio`` is at the level of ``algorithm.importance_sampling_level``.
    """

    logprobs: Tensor  # float [N], from the policy being trained; with gradient
    old_logprobs: Tensor  # float [N], from the policy before the update
    ratio: Tensor  # float [N], ``importance_ratio``; with gradient
    advantages: Tensor  # float [N]
    lengths: Tensor  # int64 [S]: tokens of each sequence
    mask: Tensor  # bool [N]: tokens that count; the loss of the others is not used, but must be finite
    ref_logprobs: Tensor | None = None  # float [N], from the reference; None with algorithm.beta=0
    rollout_logprobs: Tensor | None = None  # float [N], from the sampler, NaN where not requested; or None


TokenLoss = Callable[[LossInputs], tuple[Tensor, Stats]]
"""Returns each token's loss, float [N] with gradient, and stats by name, [N] each, to be averaged over tokens."""


def token_weights(
    lengths: Tensor,
    *,
    loss_type: LossType,
    max_completion_length: int | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Each token's weight in the loss of one optimiser step with S sequences and M unmasked tokens.

        dapo, bnpo, cispo   1 / M                               arXiv 2503.14476, equation 8
        grpo, rloo          1 / (S * tokens of the sequence)    arXiv 2402.03300, equation 3
        dr_grpo             1 / (S * max_completion_length)     arXiv 2503.20783

    TRL's bnpo divides by the tokens of a local batch; here that is the whole step, which makes it dapo. A fully masked
    sequence still counts in S, as in TRL.

    lengths int64 [S]; mask bool [N], True where a token counts, or None for all. Returns ``dtype`` [N], zero where
    masked. Raises ValueError for an unknown loss type and for dr_grpo without max_completion_length.
    """
    _check_choice("loss_type", loss_type, LossType)
    if mask is None:
        mask = torch.ones(int(lengths.sum()), dtype=torch.bool, device=lengths.device)
    counted = mask.to(dtype)
    if loss_type in ("grpo", "rloo"):
        sequence_tokens = sum_sequences(counted, lengths).clamp(min=1)
        return counted / (len(lengths) * _spread(sequence_tokens, lengths, len(counted)))
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' divides by max_completion_length, which is None; give it in tokens")
        return counted / (len(lengths) * max_completion_length)
    return counted / mask.sum().clamp(min=1)


def truncation_mask(lengths: Tensor, truncated: Tensor) -> Tensor:
    """Excludes completions cut at the length limit: DAPO's overlong filtering, arXiv 2503.14476, section 3.4.

    lengths int64 [S], truncated bool [S]. Returns bool [N], True where the token counts, for ``token_weights``.
    """
    return _spread(~truncated, lengths, int(lengths.sum()))


def top_entropy_mask(entropy: Tensor, quantile: float, mask: Tensor) -> Tensor:
    """The share ``quantile`` of unmasked tokens with the highest entropy. Wang et al. 2025, arXiv 2506.01939.

    Named after TRL's top_entropy_quantile: 0.2 keeps the top fifth, and ties at the threshold.

    entropy float [N], quantile in (0, 1], mask bool [N], True where a token counts. Returns bool [N].
    """
    candidates = entropy[mask]
    if len(candidates) == 0:
        return mask
    # kthvalue: torch.quantile refuses more than 2**24 elements. Rounded: in floating point (1 - 0.7) * 10 > 3.
    rank = math.ceil(round((1 - quantile) * (len(candidates) - 1), 6))
    threshold = candidates.kthvalue(rank + 1).values
    return mask & (entropy >= threshold)


def importance_ratio(
    logprobs: Tensor, old_logprobs: Tensor, lengths: Tensor, mask: Tensor, *, level: ImportanceSamplingLevel
) -> Tensor:
    """``pi / pi_old`` of each token, or of its sequence.

        token         exp(l_t)          PPO, arXiv 1707.06347, equation 6
        sequence      exp(mean_t l_t)   GSPO, arXiv 2507.18071, equation 7
        sequence_sum  exp(sum_t l_t)    the sequence as one action: RLOO, arXiv 2402.14740

    with ``l = logprobs - old_logprobs`` and t over the unmasked tokens of the sequence.

    logprobs, old_logprobs float [N]; lengths int64 [S]; mask bool [N]. Returns float [N]: a sequence's ratio repeated
    at each of its tokens; at level token, 1 where masked.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    if level == "token":
        return log_ratio.exp()
    sequence_log_ratio = sum_sequences(log_ratio, lengths)
    if level == "sequence":
        sequence_log_ratio = sequence_log_ratio / sum_sequences(mask.to(log_ratio.dtype), lengths).clamp(min=1)
    return _spread(sequence_log_ratio.exp(), lengths, len(log_ratio))


def rollout_importance_ratio(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    cap: float,
    floor: float | None = None,
) -> Tensor:
    """``pi_old / pi_rollout``: corrects for the sampler's own numerics and staleness.

    Ratios outside [floor, cap] are clamped to the bound (``truncate``: Yao et al. 2025, Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training) or set to 0 (``mask``: Liu et al. 2025, When Speed Kills Stability). The
    ratio of a ``sequence`` is the product over its tokens.

    old_logprobs (the learner's, before the update), rollout_logprobs (the sampler's) float [N]; lengths int64 [S];
    mask bool [N]; floor None: 0. Returns float [N], no gradient. Raises ValueError for an unknown level or mode.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r} is unknown; use token or sequence")
    ratio_level = "token" if level == "token" else "sequence_sum"
    with torch.no_grad():
        ratio = importance_ratio(old_logprobs, rollout_logprobs, lengths, mask, level=ratio_level)
    if mode == "truncate":
        return ratio.clamp(min=floor, max=cap)
    if mode == "mask":
        return ratio.masked_fill((ratio > cap) | (ratio < (floor or 0.0)), 0.0)
    raise ValueError(f"mode={mode!r} is unknown; use truncate or mask")


def clipped_surrogate_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    bounds: tuple[float, float],
    delta: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """``-min(min(r, delta) A, clip(r, *bounds) A)``. PPO, arXiv 1707.06347, equation 7.

    ``bounds`` are (1 - epsilon_low, 1 + epsilon_high); unequal epsilons are clip-higher (DAPO, arXiv 2503.14476,
    equation 10). ``delta`` bounds the ratio that PPO leaves unbounded where A < 0 (two-sided clip, INTELLECT-2, arXiv
    2505.07291); the clipped branch uses the original ratio. ``dual_clip`` c bounds the same side through the objective,
    by c A where A < 0 (Ye et al. 2020, arXiv 1912.09729); the two agree if c = delta > bounds[1].

    ratio, advantages float [N]. Returns the per-token loss, float [N].
    """
    clipped = ratio.clamp(*bounds) * advantages
    unclipped = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    objective = torch.min(unclipped, clipped)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    return -objective


def cispo_loss(ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, epsilon_high: float) -> Tensor:
    """``-sg(min(r, epsilon_high)) A log pi``: clips the weight, keeps every gradient. arXiv 2506.13585, equation 4.

    As in TRL, ``epsilon_high`` bounds the ratio itself (5.0, say), where the paper has 1 + epsilon; there is no lower
    bound.

    ratio, logprobs, advantages float [N]. Returns the per-token loss, float [N].
    """
    return -ratio.clamp(max=epsilon_high).detach() * advantages * logprobs


@dataclass(frozen=True)
class PolicyLossSettings:
    """The settings of a policy loss, named as in the ``algorithm`` configuration.

    ``loss_type`` rloo always uses the ratio of whole sequences (sequence_sum). cispo has only an upper bound,
    ``epsilon_high``; it ignores epsilon_low, delta and dual_clip. ``beta`` weighs the KL IN THE LOSS; 0 if the KL is
    part of the reward (PPO, and RLOO in TRL).

    Raises ValueError for an unknown choice and for rloo at level sequence.
    """

    loss_type: LossType
    epsilon_low: float
    epsilon_high: float
    delta: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: ImportanceSamplingLevel = "token"
    beta: float = 0.0
    kl_bias_correction: bool = True

    def __post_init__(self) -> None:
        _check_choice("loss_type", self.loss_type, LossType)
        _check_choice("importance_sampling_level", self.importance_sampling_level, ImportanceSamplingLevel)
        if self.loss_type == "rloo" and self.importance_sampling_level == "sequence":
            raise ValueError("loss_type='rloo' has a ratio of its own; leave importance_sampling_level at 'token'")

    @property
    def ratio_level(self) -> ImportanceSamplingLevel:
        return "sequence_sum" if self.loss_type == "rloo" else self.importance_sampling_level

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Beyond these, clipping removes the gradient (cispo: caps the weight)."""
        if self.loss_type == "cispo":
            return 0.0, self.epsilon_high
        return 1 - self.epsilon_low, 1 + self.epsilon_high

    def surrogate(self, inputs: LossInputs) -> tuple[Tensor, Stats]:
        """The built-in ``TokenLoss``: ``cispo_loss`` or ``clipped_surrogate_loss``, and where the clip binds."""
        ratio, advantages = inputs.ratio, inputs.advantages
        if self.loss_type == "cispo":
            loss = cispo_loss(ratio, inputs.logprobs, advantages, epsilon_high=self.epsilon_high)
        else:
            loss = clipped_surrogate_loss(
                ratio, advantages, bounds=self.ratio_bounds, delta=self.delta, dual_clip=self.dual_clip
            )
        return loss, _clip_stats(ratio, advantages, self.ratio_bounds)


def packed_policy_loss(
    settings: PolicyLossSettings,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    rollout_ratio: Tensor | None = None,
    entropy_mask: Tensor | None = None,
    token_loss: TokenLoss | None = None,
) -> tuple[Tensor, Stats]:
    """One micro-batch's share of the policy loss of an optimiser step.

        loss = sum_t weights_t * (surrogate_t * entropy_mask_t * rollout_ratio_t + beta * kl_t)

    The surrogate is ``token_loss``, or that of the settings if None; the KL is ``kl_penalty``. As in TRL, the KL keeps
    the tokens that entropy_mask drops.

    logprobs (the only one with gradient), old_logprobs, advantages, weights, ref_logprobs, rollout_logprobs,
    rollout_ratio float [N]; lengths int64 [S]; entropy_mask bool [N]. ``weights``: these tokens' part of
    ``token_weights``; a token of weight zero contributes nothing. ``num_tokens``: tokens of nonzero weight in the whole
    optimiser step.

    Returns (loss, stats), 0-dim tensors. Stats are already divided by num_tokens: added over micro-batches and ranks
    they are means over the tokens of the step. They are those of token_loss; ``ratio``: pi / pi_old; ``approx_kl``: k2
    to the old policy; with beta, ``kl``: to the reference, as penalised. The settings' own surrogate gives
    ``clip_ratio/{low,high,region}_mean``: share of tokens clipped below, above, either way.

    Raises ValueError for beta without ref_logprobs.
    """
    mask = weights != 0
    ratio = importance_ratio(logprobs, old_logprobs, lengths, mask, level=settings.ratio_level)
    inputs = LossInputs(logprobs, old_logprobs, ratio, advantages, lengths, mask, ref_logprobs, rollout_logprobs)
    loss, token_stats = (token_loss or settings.surrogate)(inputs)
    for factor in (entropy_mask, rollout_ratio):
        loss = loss if factor is None else loss * factor
    token_stats |= {"ratio": ratio, "approx_kl": k2(logprobs, old_logprobs)}
    if settings.beta != 0:
        if ref_logprobs is None:
            raise ValueError(
                f"beta={settings.beta} needs ref_logprobs, the reference's log-probabilities; pass them, or set beta=0"
            )
        kl = kl_penalty(logprobs, ref_logprobs, ratio if settings.kl_bias_correction else None)
        loss = loss + settings.beta * kl
        token_stats["kl"] = kl
    stats = {name: (x.detach() * mask).sum() / max(num_tokens, 1) for name, x in token_stats.items()}
    return (loss * weights).sum(), stats


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    importance_sampling_level: ImportanceSamplingLevel = "token",
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_bias_correction: bool = True,
    rollout_ratio: Tensor | None = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, Stats]:
    """``packed_policy_loss`` of one padded batch that is a whole optimiser step.

    logprobs, old_logprobs, ref_logprobs float [B, T]; mask bool or 0/1 [B, T]; advantages float [B] or [B, T];
    rollout_ratio float [B, T] or, per sequence, [B, 1]. max_completion_length None: T. Padding is never read.

    Returns (loss, stats) and raises as ``PolicyLossSettings`` and ``packed_policy_loss`` do.
    """
    settings = PolicyLossSettings(
        loss_type=loss_type,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        delta=delta,
        importance_sampling_level=importance_sampling_level,
        beta=beta,
        kl_bias_correction=kl_bias_correction,
    )
    keep = mask.bool()
    lengths = keep.sum(1)
    length_limit = keep.shape[1] if max_completion_length is None else max_completion_length

    def pack(x: Tensor) -> Tensor:
        return x.expand_as(keep)[keep]

    return packed_policy_loss(
        settings,
        pack(logprobs),
        pack(old_logprobs),
        pack(advantages.unsqueeze(1) if advantages.dim() == 1 else advantages),
        lengths,
        token_weights(lengths, loss_type=loss_type, max_completion_length=length_limit, dtype=logprobs.dtype),
        num_tokens=int(lengths.sum()),
        ref_logprobs=None if ref_logprobs is None else pack(ref_logprobs),
        rollout_ratio=None if rollout_ratio is None else pack(rollout_ratio),
    )


def entropy_bonus(entropy: Tensor, weights: Tensor, *, coef: float) -> Tensor:
    """``-coef * sum(weights * entropy)``: added to a loss, it rewards entropy. PPO, arXiv 1707.06347, equation 9.

    entropy float [N] with gradient, weights float [N]. Returns a 0-dim tensor; adds up over micro-batches.
    """
    return -coef * (entropy * weights).sum()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip_range: float
) -> tuple[Tensor, Stats]:
    """``0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``. Huang et al. 2022, The 37 Implementation Details
    of PPO, detail 9.

    values (with gradient), old_values, returns float [N]; weights float [N], those of ``token_weights`` for dapo (then
    all results are means over the tokens of the optimiser step and add up over micro-batches and ranks).

    Returns (loss, stats): 0-dim tensors; ``value/clip_ratio`` is the share of tokens where the clipped term is larger.
    """
    clipped_values = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    loss = 0.5 * (torch.max(unclipped, clipped) * weights).sum()
    return loss, {"value/clip_ratio": ((clipped > unclipped) * weights).sum().detach()}


def _clip_stats(ratio: Tensor, advantages: Tensor, bounds: tuple[float, float]) -> dict[str, Tensor]:
    """bool [N] each: where the ratio is beyond the bound that the advantage pushes it towards."""
    low = (ratio < bounds[0]) & (advantages < 0)
    high = (ratio > bounds[1]) & (advantages > 0)
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is unknown; use {', '.join(get_args(choices))}")


def sum_sequences(x: Tensor, lengths: Tensor) -> Tensor:
    """float [N] -> [S]. segment_reduce, not index_add: its order of summation is fixed, even on CUDA.

    On CUDA the lengths are not checked: the host would have to wait for the GPU.
    """
    return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=x.is_cuda)


def _spread(x: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """[S] -> [N = num_tokens]: each sequence's value at each of its tokens."""
    return x[torch.repeat_interleave(lengths, output_size=num_tokens)]
