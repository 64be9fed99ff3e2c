"""KL estimators, the KL term of a loss, and the controllers of its weight."""

import math

import pytest
import torch

from rlhf.algorithms.kl import AdaptiveKLController, FixedKLController, k1, k2, k3, kl_penalty, per_token_kl

# One token, probability 1/2 under the policy and 1/4 under the reference: log(pi / ref) = log 2.
LOGPROBS = torch.tensor([math.log(1 / 2)], dtype=torch.float64)
REF_LOGPROBS = torch.tensor([math.log(1 / 4)], dtype=torch.float64)


def test_estimators_by_hand():
    assert k1(LOGPROBS, REF_LOGPROBS).item() == pytest.approx(math.log(2))
    assert k2(LOGPROBS, REF_LOGPROBS).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(LOGPROBS, REF_LOGPROBS).item() == pytest.approx(1 / 2 - 1 + math.log(2))


@pytest.mark.parametrize(("estimator", "function"), [("k1", k1), ("k2", k2), ("k3", k3)])
def test_estimator_by_name(estimator, function):
    assert torch.equal(
        per_token_kl(LOGPROBS, REF_LOGPROBS, estimator=estimator),
        function(LOGPROBS, REF_LOGPROBS),
    )


def test_unknown_estimator_names_the_known_ones():
    with pytest.raises(ValueError, match="'k4' is unknown; use k1, k2, k3"):
        per_token_kl(LOGPROBS, REF_LOGPROBS, estimator="k4")


def kl_and_gradient(policy_logits, ref_logprobs, old_logprobs, *, corrected):
    """Exact expectation under the old policy, over the whole vocabulary, of the penalty; and its gradient."""
    logits = policy_logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    ratio = (logprobs - old_logprobs).exp() if corrected else None
    expectation = (old_logprobs.exp() * kl_penalty(logprobs, ref_logprobs, ratio)).sum()
    expectation.backward()
    return expectation.detach(), logits.grad


def test_corrected_penalty_is_unbiased_off_policy_in_value_and_gradient():
    torch.manual_seed(0)
    policy_logits = torch.randn(5, dtype=torch.float64)
    ref_logprobs, old_logprobs = torch.randn(2, 5, dtype=torch.float64).log_softmax(1)
    logits = policy_logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    true_kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    true_kl.backward()

    kl, gradient = kl_and_gradient(policy_logits, ref_logprobs, old_logprobs, corrected=True)
    torch.testing.assert_close(kl, true_kl.detach())
    torch.testing.assert_close(gradient, logits.grad)

    on_policy = policy_logits.log_softmax(0)
    kl, gradient = kl_and_gradient(policy_logits, ref_logprobs, on_policy, corrected=False)
    torch.testing.assert_close(kl, true_kl.detach())
    # Bare k3 on-policy: value right, gradient that of KL(ref || pi), which is pi - ref in the logits.
    torch.testing.assert_close(gradient, on_policy.exp() - ref_logprobs.exp())


def test_adaptive_controller_by_hand():
    controller = AdaptiveKLController(0.1, target=4.0, horizon=1000)
    controller.update(kl=4.4, num_samples=100)  # error 4.4 / 4 - 1 = 0.1
    assert controller.beta == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    controller = AdaptiveKLController(0.1, target=4.0, horizon=1000)
    controller.update(kl=40.0, num_samples=100)  # error 9, clipped to 0.2
    assert controller.beta == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    controller = AdaptiveKLController(0.1, target=4.0, horizon=1000)
    controller.update(kl=-1.0, num_samples=100)  # k1 may be negative; error -1.25, clipped to -0.2
    assert controller.beta == pytest.approx(0.1 * (1 - 0.2 * 100 / 1000))


def test_adaptive_controller_resumes_where_it_was():
    controller = AdaptiveKLController(0.1, target=4.0, horizon=1000)
    controller.update(kl=8.0, num_samples=64)
    resumed = AdaptiveKLController(0.1, target=4.0, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.beta == controller.beta != 0.1


def test_fixed_controller_never_moves():
    controller = FixedKLController(0.1)
    controller.update(kl=100.0, num_samples=64)
    controller.load_state_dict(controller.state_dict())
    assert controller.beta == 0.1


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 100), (6.0, 0)])
def test_controller_refuses_what_cannot_work(target, horizon):
    with pytest.raises(ValueError, match="must be positive"):
        AdaptiveKLController(0.1, target=target, horizon=horizon)
    AdaptiveKLController(0.1, target=target + 0.5, horizon=horizon + 1)
