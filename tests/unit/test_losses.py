"""Policy and value losses: TRL's numbers, arithmetic by hand, and independence from how a step is cut."""

import json
import math
from pathlib import Path

import pytest
import torch

from rlhf.algorithms.losses import (
    PolicyLossSettings,
    clipped_surrogate_loss,
    entropy_bonus,
    importance_ratio,
    packed_policy_loss,
    policy_loss,
    rollout_importance_ratio,
    token_weights,
    top_entropy_mask,
    truncation_mask,
    value_loss,
)

CASES = json.loads((Path(__file__).parent / "golden" / "loss.json").read_text())["cases"]
GOLDENS = [
    pytest.param(case, expected, id=f"{i}-{j}-{expected['loss_type']}-{expected['importance_sampling_level']}")
    for i, case in enumerate(CASES)
    for j, expected in enumerate(case["expected"])
]
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "rloo"]


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def golden_loss(case, expected, *, padding=None):
    """Loss and gradient of a golden; ``padding`` overwrites what the padded positions hold."""
    mask = f64(case["mask"])

    def padded(key):
        x = f64(case[key])
        return x if padding is None else torch.where(mask.bool(), x, padding)

    logprobs = padded("new").requires_grad_()
    loss, _ = policy_loss(
        logprobs,
        padded("old"),
        f64(case["adv"]),
        mask,
        loss_type=expected["loss_type"],
        epsilon_low=expected["epsilon"][0],
        epsilon_high=expected["epsilon"][1],
        importance_sampling_level=expected["importance_sampling_level"],
        beta=expected["beta"],
        ref_logprobs=padded("ref") if expected["beta"] else None,
        rollout_ratio=padded("isr") if expected.get("rollout_ratio") else None,
        **{option: expected[option] for option in ("delta", "kl_bias_correction") if option in expected},
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


@pytest.mark.parametrize(("case", "expected"), GOLDENS)
def test_loss_and_gradient_are_those_of_trl(case, expected):
    loss, gradient = golden_loss(case, expected)
    torch.testing.assert_close(loss, f64(expected["loss"]), rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, f64(expected["grad"]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("expected", CASES[2]["expected"], ids=lambda e: e["loss_type"])
def test_padding_is_never_read(expected):
    loss, gradient = golden_loss(CASES[2], expected, padding=math.nan)
    torch.testing.assert_close(loss, f64(expected["loss"]), rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, f64(expected["grad"]), rtol=0, atol=1e-9)


def random_step(num_sequences=6, seed=0):
    """One packed optimiser step with everything on: (lengths, truncated, per-token tensors)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (num_sequences,), generator=generator)
    num_tokens = int(lengths.sum())

    def draw():
        return torch.randn(num_tokens, dtype=torch.float64, generator=generator)

    old_logprobs = -draw().abs()
    tensors = {
        "logprobs": old_logprobs + 0.3 * draw(),
        "old_logprobs": old_logprobs,
        "advantages": draw(),
        "ref_logprobs": old_logprobs + 0.3 * draw(),
        "rollout_ratio": (0.1 * draw()).exp(),
        "entropy_mask": draw() > 0,
    }
    return lengths, torch.arange(num_sequences) == 1, tensors


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [*((t, "token") for t in LOSS_TYPES), *((t, "sequence") for t in LOSS_TYPES if t != "rloo")],
)
def test_micro_batches_sum_to_the_whole_step(loss_type, level):
    lengths, truncated, tensors = random_step()
    mask = truncation_mask(lengths, truncated)
    weights = token_weights(lengths, loss_type=loss_type, max_completion_length=10, mask=mask, dtype=torch.float64)

    settings = PolicyLossSettings(
        loss_type, epsilon_low=0.2, epsilon_high=0.3, dual_clip=3.0, importance_sampling_level=level, beta=0.1
    )

    def run(first, last):
        """Loss, gradient and stats of sequences first to last."""
        tokens = slice(int(lengths[:first].sum()), int(lengths[:last].sum()))
        part = {name: x[tokens].clone() for name, x in tensors.items()}
        logprobs = part.pop("logprobs").requires_grad_()
        loss, stats = packed_policy_loss(
            settings,
            logprobs,
            part.pop("old_logprobs"),
            part.pop("advantages"),
            lengths[first:last],
            weights[tokens],
            num_tokens=int(mask.sum()),
            **part,
        )
        (gradient,) = torch.autograd.grad(loss, logprobs)
        return loss.detach(), gradient, stats

    whole_loss, whole_gradient, whole_stats = run(0, 6)
    parts = [run(0, 1), run(1, 2), run(2, 6)]  # the second holds only the truncated sequence
    torch.testing.assert_close(sum(loss for loss, _, _ in parts), whole_loss)
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in parts]), whole_gradient)
    for name, value in whole_stats.items():
        torch.testing.assert_close(sum(stats[name] for _, _, stats in parts), value)
    assert not whole_gradient[~mask].any(), "truncated completions must not train"
    assert whole_gradient[mask].any()


def test_token_weights_by_hand():
    lengths = torch.tensor([1, 3])
    mask = torch.tensor([True, True, False, True])
    for loss_type in ("dapo", "bnpo", "cispo"):
        weights = token_weights(lengths, loss_type=loss_type, mask=mask, dtype=torch.float64)
        torch.testing.assert_close(weights, f64([1 / 3, 1 / 3, 0, 1 / 3]))
    for loss_type in ("grpo", "rloo"):
        weights = token_weights(lengths, loss_type=loss_type, mask=mask, dtype=torch.float64)
        torch.testing.assert_close(weights, f64([1 / 2, 1 / 4, 0, 1 / 4]))
    weights = token_weights(lengths, loss_type="dr_grpo", max_completion_length=5, mask=mask, dtype=torch.float64)
    torch.testing.assert_close(weights, f64([1 / 10, 1 / 10, 0, 1 / 10]))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_weights_of_a_step_that_is_masked_entirely_are_zero(loss_type):
    mask = torch.zeros(4, dtype=torch.bool)
    weights = token_weights(torch.tensor([1, 3]), loss_type=loss_type, max_completion_length=5, mask=mask)
    assert torch.equal(weights, torch.zeros(4))


def test_importance_ratio_by_hand():
    lengths, mask = torch.tensor([2, 3]), torch.tensor([True, True, True, False, True])
    old = f64([-1.0, -1.0, -2.0, -2.0, -2.0])
    new = old + f64([0.1, 0.3, 0.2, 9.0, -0.6])
    token = importance_ratio(new, old, lengths, mask, level="token").log()
    torch.testing.assert_close(token, f64([0.1, 0.3, 0.2, 0.0, -0.6]))
    sequence = importance_ratio(new, old, lengths, mask, level="sequence").log()
    torch.testing.assert_close(sequence, f64([(0.1 + 0.3) / 2] * 2 + [(0.2 - 0.6) / 2] * 3))
    total = importance_ratio(new, old, lengths, mask, level="sequence_sum").log()
    torch.testing.assert_close(total, f64([0.1 + 0.3] * 2 + [0.2 - 0.6] * 3))


def test_rloo_by_hand():
    # Two sequences of 2 and 1 tokens; ratios exp(0.1 + 0.2) and exp(-0.1); nothing is clipped at epsilon 0.5.
    old = f64([[-1.0, -1.0], [-1.0, 0.0]])
    logprobs = (old + f64([[0.1, 0.2], [-0.1, 0.0]])).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0]])
    loss, _ = policy_loss(logprobs, old, f64([2.0, -1.0]), mask, loss_type="rloo", epsilon_low=0.5, epsilon_high=0.5)
    assert loss.item() == pytest.approx(-(2 * math.exp(0.3) - 1 * math.exp(-0.1)) / 2)
    loss.backward()
    # d ratio / d logprob = ratio, at every token of the sequence.
    gradient = [[-2 * math.exp(0.3) / 2, -2 * math.exp(0.3) / 2], [math.exp(-0.1) / 2, 0.0]]
    torch.testing.assert_close(logprobs.grad, f64(gradient))


def test_clip_higher_and_two_sided_clip_by_hand():
    ratio, advantages = f64([1.5, 1.5, 0.5, 0.5, 9.0]), f64([2.0, -2.0, 2.0, -2.0, -2.0])
    loss = clipped_surrogate_loss(ratio, advantages, bounds=(0.8, 1.3))
    torch.testing.assert_close(-loss, f64([1.3 * 2, 1.5 * -2, 0.5 * 2, 0.8 * -2, 9.0 * -2]))
    loss = clipped_surrogate_loss(ratio, advantages, bounds=(0.8, 1.3), delta=4.0)
    torch.testing.assert_close(-loss, f64([1.3 * 2, 1.5 * -2, 0.5 * 2, 0.8 * -2, 4.0 * -2]))


def test_dual_clip_by_hand():
    # Only a negative advantage with a ratio beyond c = 3 is touched, and it gets no gradient.
    ratio, advantages = f64([9.0, 2.0, 9.0]).requires_grad_(), f64([-2.0, -2.0, 2.0])
    loss = clipped_surrogate_loss(ratio, advantages, bounds=(0.8, 1.2), dual_clip=3.0)
    torch.testing.assert_close(-loss.detach(), f64([3.0 * -2, 2.0 * -2, 1.2 * 2]))
    loss.sum().backward()
    torch.testing.assert_close(ratio.grad, f64([0.0, 2.0, 0.0]))


def test_gradient_reaches_logprobs_and_stops_at_stats():
    logprobs = f64([[-0.5, -1.0]]).requires_grad_()
    loss, stats = policy_loss(
        logprobs,
        logprobs.detach(),
        f64([1.0]),
        torch.ones(1, 2),
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.1,
        ref_logprobs=f64([[-0.7, -0.9]]),
    )
    loss.backward()
    assert logprobs.grad.abs().min() > 0
    assert set(stats) == {f"clip_ratio/{part}_mean" for part in ("low", "high", "region")} | {
        "ratio",
        "approx_kl",
        "kl",
    }
    assert not any(x.requires_grad or x.dim() for x in stats.values())


def test_on_policy_gradient_is_that_of_reinforce():
    # At ratio 1 every type's gradient is -advantage * weight; nothing is clipped yet.
    old = f64([[-0.5, -1.0], [-2.0, -0.1]])
    for loss_type in ("dapo", "cispo"):
        logprobs = old.clone().requires_grad_()
        loss, _ = policy_loss(
            logprobs, old, f64([1.0, -3.0]), torch.ones(2, 2), loss_type=loss_type, epsilon_low=0.2, epsilon_high=5.0
        )
        loss.backward()
        torch.testing.assert_close(logprobs.grad, f64([[-1 / 4, -1 / 4], [3 / 4, 3 / 4]]))


def test_stats_by_hand():
    # Ratios 0.5 (A < 0: clipped low), 2 (A > 0: clipped high), 2 (A < 0: not clipped), 1.
    old = torch.zeros(1, 4, dtype=torch.float64)
    logprobs = f64([[math.log(0.5), math.log(2), math.log(2), 0.0]])
    _, stats = policy_loss(
        logprobs,
        old,
        f64([[-1.0, 1.0, -1.0, 1.0]]),
        torch.ones(1, 4),
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.1,
        ref_logprobs=old,
        kl_bias_correction=False,
    )
    assert stats["clip_ratio/low_mean"].item() == pytest.approx(1 / 4)
    assert stats["clip_ratio/high_mean"].item() == pytest.approx(1 / 4)
    assert stats["clip_ratio/region_mean"].item() == pytest.approx(2 / 4)
    assert stats["approx_kl"].item() == pytest.approx(3 * math.log(2) ** 2 / 2 / 4)
    # k3 = 1 / r - 1 + log r at ratios 0.5, 2, 2, 1.
    k3 = (2 - 1 - math.log(2)) + 2 * (0.5 - 1 + math.log(2)) + 0
    assert stats["kl"].item() == pytest.approx(k3 / 4)


def test_entropy_mask_drops_the_surrogate_and_keeps_the_kl():
    lengths = torch.tensor([2])
    logprobs = f64([-0.5, -1.0]).requires_grad_()
    loss, _ = packed_policy_loss(
        PolicyLossSettings("dapo", epsilon_low=0.2, epsilon_high=0.2, beta=0.5, kl_bias_correction=False),
        logprobs,
        logprobs.detach(),
        f64([3.0, 3.0]),
        lengths,
        token_weights(lengths, loss_type="dapo", dtype=torch.float64),
        num_tokens=2,
        ref_logprobs=f64([-0.5, -1.0 + math.log(2)]),
        entropy_mask=torch.tensor([True, False]),
    )
    # Token 0: surrogate -3, no KL. Token 1: no surrogate, k3 = 2 - 1 - log 2.
    assert loss.item() == pytest.approx((-3 + 0.5 * (1 - math.log(2))) / 2)


def test_top_entropy_mask_by_hand():
    entropy = torch.tensor([0.1, 0.9, 0.5, 0.7, 99.0, 0.3])
    mask = torch.tensor([True, True, True, True, False, True])
    kept = top_entropy_mask(entropy, 0.5, mask)  # of 0.1 0.3 0.5 0.7 0.9 the median and above
    assert kept.tolist() == [False, True, True, True, False, False]
    assert torch.equal(top_entropy_mask(entropy, 1.0, mask), mask)
    assert not top_entropy_mask(entropy, 0.5, torch.zeros_like(mask)).any()


@pytest.mark.parametrize("quantile", [0.1, 0.2, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("num_tokens", [1, 2, 11, 100])
def test_top_entropy_mask_is_the_threshold_of_torch_quantile(quantile, num_tokens):
    entropy = torch.rand(num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(num_tokens))
    kept = top_entropy_mask(entropy, quantile, torch.ones(num_tokens, dtype=torch.bool))
    threshold = torch.quantile(entropy, 1 - quantile)
    assert torch.equal(kept, entropy >= threshold - 1e-12)


def test_truncation_mask():
    mask = truncation_mask(torch.tensor([1, 2, 1]), torch.tensor([False, True, False]))
    assert mask.tolist() == [True, False, False, True]


def test_rollout_importance_ratio_by_hand():
    lengths, mask = torch.tensor([2, 1]), torch.ones(3, dtype=torch.bool)
    rollout = f64([-1.0, -1.0, -1.0])
    old = rollout + f64([math.log(3), math.log(0.5), math.log(0.25)]).requires_grad_()

    def ratio(level, mode, **bounds):
        return rollout_importance_ratio(old, rollout, lengths, mask, level=level, mode=mode, **bounds)

    torch.testing.assert_close(ratio("token", "truncate", cap=2.0), f64([2.0, 0.5, 0.25]))
    torch.testing.assert_close(ratio("token", "truncate", cap=2.0, floor=0.3), f64([2.0, 0.5, 0.3]))
    torch.testing.assert_close(ratio("token", "mask", cap=2.0), f64([0.0, 0.5, 0.25]))
    torch.testing.assert_close(ratio("token", "mask", cap=2.0, floor=0.3), f64([0.0, 0.5, 0.0]))
    torch.testing.assert_close(ratio("sequence", "truncate", cap=1.2), f64([1.2, 1.2, 0.25]))  # 3 * 0.5 = 1.5
    torch.testing.assert_close(ratio("sequence", "mask", cap=1.2), f64([0.0, 0.0, 0.25]))
    assert not ratio("token", "mask", cap=2.0).requires_grad
    same = rollout_importance_ratio(rollout, rollout, lengths, mask, level="token", mode="mask", cap=1.0, floor=1.0)
    assert same.tolist() == [1, 1, 1], "the bounds themselves are within"


def test_value_loss_by_hand():
    values = f64([1.0, 3.0, 1.5]).requires_grad_()
    # clip_range 0.2 around 1: clipped values 1.0, 1.2, 1.2. Returns 2, 2, 0.
    # Unclipped errors 1, 1, 2.25; clipped 1, 0.64, 1.44: the larger are 1, 1, 2.25 (token 2 is NOT saved by its clip).
    loss, stats = value_loss(values, f64([1.0, 1.0, 1.0]), f64([2.0, 2.0, 0.0]), f64([1 / 3] * 3), clip_range=0.2)
    assert loss.item() == pytest.approx(0.5 * (1 + 1 + 2.25) / 3)
    assert stats["value/clip_ratio"].item() == 0
    # Moving towards its return by more than the range, up or down: the clipped errors (1.2 - 3)^2 and (0.8 - 0.2)^2 are
    # the larger ones, without gradient.
    values = f64([2.5, 0.5]).requires_grad_()
    loss, stats = value_loss(values, f64([1.0, 1.0]), f64([3.0, 0.2]), f64([0.5, 0.25]), clip_range=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.5 * 1.8**2 + 0.25 * 0.6**2))
    assert (values.grad.tolist(), stats["value/clip_ratio"].item()) == ([0, 0], 0.75)


def test_entropy_bonus_by_hand():
    entropy = f64([1.0, 2.0]).requires_grad_()
    loss = entropy_bonus(entropy, f64([0.25, 0.75]), coef=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(-0.1 * (0.25 * 1 + 0.75 * 2))
    torch.testing.assert_close(entropy.grad, f64([-0.025, -0.075]))


def test_errors_say_what_would_work():
    def loss(loss_type, **options):
        one = f64([[-1.0]])
        return policy_loss(
            one, one, f64([1.0]), one != 0, loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.2, **options
        )

    with pytest.raises(ValueError, match="loss_type='ppo' is unknown; use grpo, bnpo, dr_grpo, dapo, cispo, rloo"):
        loss("ppo")
    with pytest.raises(ValueError, match="importance_sampling_level='word' is unknown; use token, sequence"):
        loss("dapo", importance_sampling_level="word")
    with pytest.raises(ValueError, match="leave importance_sampling_level at 'token'"):
        loss("rloo", importance_sampling_level="sequence")
    with pytest.raises(ValueError, match=r"beta=0.1 needs ref_logprobs"):
        loss("dapo", beta=0.1)
    with pytest.raises(ValueError, match="max_completion_length, which is None; give it in tokens"):
        token_weights(torch.tensor([1]), loss_type="dr_grpo")
    flat = (f64([-1.0]), f64([-1.0]), torch.tensor([1]), torch.tensor([True]))
    with pytest.raises(ValueError, match="level='word' is unknown; use token or sequence"):
        rollout_importance_ratio(*flat, level="word", mode="mask", cap=2.0)
    with pytest.raises(ValueError, match="mode='clip' is unknown; use truncate or mask"):
        rollout_importance_ratio(*flat, level="token", mode="clip", cap=2.0)
