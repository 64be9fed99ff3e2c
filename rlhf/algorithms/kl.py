"""The KL divergence to the reference: per-token estimators, the term in the loss, and the controller of its weight.

Estimators are functions of ``log_ratio = logprobs - ref_logprobs`` at tokens sampled from the policy; each estimates
KL(policy || reference) in nats. Source: Schulman 2020, Approximating KL Divergence.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_RELATIVE_KL_ERROR = 0.2  # Ziegler et al. 2019, section 2.2


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log(pi / ref)``: unbiased, high variance, may be negative. Takes and returns float tensors of one shape."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log(pi / ref)^2 / 2``: biased, low variance, never negative. Takes and returns float tensors of one shape."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``ref / pi - 1 - log(ref / pi)``: unbiased and never negative. Takes and returns float tensors of one shape."""
    log_inverse_ratio = ref_logprobs - logprobs
    return torch.expm1(log_inverse_ratio) - log_inverse_ratio


_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def per_token_kl(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLEstimator) -> Tensor:
    """The estimator of that name: what PPO subtracts, times beta, from each token's reward.

    Takes and returns float tensors of one shape. Raises ValueError for an unknown estimator.
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(f"estimator={estimator!r} is unknown; use {', '.join(_ESTIMATORS)}")
    return _ESTIMATORS[estimator](logprobs, ref_logprobs)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, importance_ratio: Tensor | None = None) -> Tensor:
    """The KL term of a loss: ``k3``, times ``pi / pi_old`` if given.

    Tokens are drawn from pi_old, so only the product is an unbiased estimate of KL(pi || ref) and, since the ratio
    carries gradient, of its gradient. Bare k3 follows the gradient of KL(ref || pi) even on-policy.
    DeepSeek-V3.2 2025, section 3.1, equation 7; without the ratio: GRPO, arXiv 2402.03300, equation 4.

    Takes and returns float tensors of one shape.
    """
    kl = k3(logprobs, ref_logprobs)
    return kl if importance_ratio is None else kl * importance_ratio


class KLController(Protocol):
    """Sets ``beta``, the weight of the KL, from the measured KL. Checkpointed with the run."""

    @property
    def beta(self) -> float: ...

    def update(self, kl: float, num_samples: int) -> None:
        """``kl``: mean over sequences of the summed per-token KL, in nats; ``num_samples``: sequences it came from."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """``beta`` never changes; it belongs to the configuration, so checkpoints do not store it."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def update(self, kl: float, num_samples: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class AdaptiveKLController:
    """Proportional control of ``log beta`` towards a target KL. Ziegler et al. 2019, arXiv 1909.08593, section 2.2.

        error = clip(kl / target - 1, -0.2, 0.2)
        beta <- beta * (1 + error * num_samples / horizon)

    ``target`` in nats per sequence; ``horizon`` in sequences. Raises ValueError unless both are positive.
    """

    def __init__(self, beta: float, *, target: float, horizon: int) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target={target} and horizon={horizon} must be positive; use for example 6.0 and 10000")
        self.beta = beta
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_KL_ERROR), MAX_RELATIVE_KL_ERROR)
        self.beta *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.beta = state["beta"]
