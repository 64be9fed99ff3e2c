"""The user's own advantage estimator and loss: they take the built-in ones' place, and a mistake is one line."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.algorithms import check_algorithm, make_algorithm
from rlhf.batch import TrainBatch
from rlhf.config import AlgorithmConfig
from rlhf.errors import AlgorithmError, ConfigError, RlhfError
from rlhf.shares import PolicyPlanner
from rlhf.training.learner import PolicyLearner

NO_ENGINE: Any = None  # what is computed here needs none

MODULE = """
import torch
from rlhf.algorithms.advantages import leave_one_out

constant = 3

def others(inputs):
    return leave_one_out(inputs.rewards, inputs.group_size)

def later_tokens_less(inputs, *, decay=0.5):
    return torch.cat([r * decay ** torch.arange(n) for r, n in zip(inputs.rewards, inputs.completion_lengths)])

def a_list(inputs):
    return [0.0] * 4

def integers(inputs):
    return torch.zeros(4, dtype=torch.long)

def too_short(inputs):
    return torch.zeros(3)

def two_dimensional(inputs):
    return torch.zeros(4, 1)

def doubles(inputs):
    return torch.ones(4, dtype=torch.float64)

def raises(inputs):
    return inputs.rewards / inputs.nothing

def needs(inputs, temperature):
    return inputs.rewards

def nothing():
    return 0

def reinforce(inputs, scale=1.0):
    loss = -scale * inputs.advantages * inputs.logprobs
    return loss, {"advantage": inputs.advantages, "positive": inputs.advantages > 0}

def bare(inputs):
    return -inputs.advantages * inputs.logprobs

def surrogate(inputs):
    return -torch.min(inputs.ratio * inputs.advantages, inputs.ratio.clamp(0.8, 1.2) * inputs.advantages)

def summed(inputs):
    return bare(inputs).sum()

def detached(inputs):
    return bare(inputs).detach()

def odd_stat(inputs):
    return bare(inputs), {"entropy": torch.zeros(2)}

def float_stat(inputs):
    return bare(inputs), {"entropy": 1.0}

def largest(inputs):
    return bare(inputs), {"ratio_max": inputs.ratio}

def no_stats(inputs):
    return bare(inputs), [inputs.ratio]

def calls_what_raises(inputs):
    return raises(inputs)
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return path


def config(name: str = "grpo", **changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, prompts_per_step=2, group_size=2, **changes)  # type: ignore[arg-type]


def batch(**tensors: torch.Tensor) -> TrainBatch:
    """Completions of 2, 1, 3 and 1 tokens; two groups."""
    return TrainBatch(
        tokens=torch.zeros(11, dtype=torch.long),
        prompt_lengths=torch.ones(4, dtype=torch.long),
        completion_lengths=torch.tensor([2, 1, 3, 1]),
        truncated=torch.tensor([False, False, True, False]),
        versions=torch.zeros(7, dtype=torch.int32),
        rewards=torch.tensor([1.0, 3.0, 0.0, 4.0]),
    ).with_(**tensors)


# ---- advantages


def advantages(of: TrainBatch, settings: AlgorithmConfig) -> tuple[list[float], dict[str, float]]:
    done, metrics = make_algorithm(settings).assign_advantages(of)
    assert done.advantages is not None and done.advantages.dtype == torch.float32
    return done.advantages.tolist(), metrics


def test_an_estimator_that_is_rloo_s_gives_rloo_s_advantages(module: Path) -> None:
    own = f"{module}:others"
    assert advantages(batch(), config(advantage=own)) == advantages(batch(), config("rloo"))
    assert advantages(batch(), config(advantage=own))[0] == [-2, -2, 2, -4, -4, -4, 4]
    kl = {"old_logprobs": torch.full((7,), -1.0), "ref_logprobs": torch.full((7,), -2.0)}
    clipped: dict[str, Any] = {"beta": 0.5, "reward_clip": 2.0}
    expected = advantages(batch(**kl), config("rloo", **clipped))
    assert advantages(batch(**kl), config("rloo", advantage=own, **clipped)) == expected, "clip and KL come before"


def test_an_estimator_may_give_each_token_its_own_advantage(module: Path) -> None:
    settings = config(advantage=f"{module}:later_tokens_less", advantage_kwargs={"decay": 0.1})
    values, metrics = advantages(batch(), settings)
    assert values == pytest.approx([1, 0.1, 3, 0, 0, 0, 4])
    assert metrics["advantages/abs_mean"] == pytest.approx(8.1 / 7)
    values, metrics = advantages(batch(rewards=torch.tensor([math.nan, 3.0, 0.0, 4.0])), settings)
    assert values == [0, 0, 3, 0, 0, 0, 4], "a completion without reward has no part"
    assert metrics["advantages/abs_mean"] == pytest.approx(7 / 5)


def test_doubles_become_floats(module: Path) -> None:
    assert advantages(batch(), config(advantage=f"{module}:doubles"))[0] == [1.0] * 7


def test_ppo_keeps_its_own_advantages(module: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig(name="ppo", advantage=f"{module}:others")
    assert str(caught.value) == (
        f"algorithm.advantage={module}:others cannot replace the advantages of algorithm.name=ppo, which come from GAE "
        "together with the critic's returns; unset it, or use algorithm.name=grpo"
    )


# ---- the loss


def loss_of(settings: AlgorithmConfig, of: TrainBatch) -> tuple[torch.Tensor, dict[str, float], list[float]]:
    """Loss, stats and gradient by log-probability of one optimiser step on one micro-batch."""
    learner = PolicyLearner(NO_ENGINE, settings, seed=0, max_completion_tokens=4)
    planner = PolicyPlanner(
        num_ranks=1, token_budget=64, hidden_size=8, config=settings, seed=0, max_completion_tokens=4
    )
    share = planner.plan_update(of, 0).share(0)
    (step,) = share.steps
    (micro_batch,) = share.micro_batches(step)
    assert micro_batch is not None
    logprobs = torch.linspace(-1.6, -1.0, of.num_completion_tokens).requires_grad_()
    loss, stats = learner._loss((logprobs, torch.ones_like(logprobs)), micro_batch, step.num_tokens, 0)
    return loss, {n: x.item() for n, x in stats.items()}, torch.autograd.grad(loss, logprobs)[0].tolist()


def two_sequences() -> TrainBatch:
    """Completions of 1 and 3 tokens, with advantages 2 and -1."""
    return batch().select([1, 2]).with_(advantages=torch.tensor([2.0, -1.0, -1.0, -1.0]))


def test_reinforce_by_hand(module: Path) -> None:
    own = {"loss": f"{module}:reinforce", "loss_kwargs": {"scale": 10.0}}
    loss, stats, gradient = loss_of(config(**own), two_sequences())
    # log-probabilities -1.6, -1.4, -1.2, -1.0; each token weighs 1 / 4
    assert loss.item() == pytest.approx(-10 * (2 * -1.6 + 1.4 + 1.2 + 1.0) / 4)
    assert gradient == pytest.approx([-5, 2.5, 2.5, 2.5])
    assert stats["loss/advantage"] == pytest.approx((2 - 3) / 4)
    assert stats["loss/positive"] == pytest.approx(1 / 4)
    assert stats["ratio"] == pytest.approx(1) and not [name for name in stats if name.startswith("clip_ratio")]
    # a mean over each sequence, then over sequences
    _, stats, gradient = loss_of(config(loss_type="grpo", **own), two_sequences())
    assert gradient == pytest.approx([-10, 10 / 6, 10 / 6, 10 / 6])
    assert stats["loss/advantage"] == pytest.approx((2 - 3) / 4), "stats are means over tokens whatever the weights"


def test_masks_kl_and_correction_apply_to_the_user_s_loss(module: Path) -> None:
    masked = config(loss=f"{module}:bare", mask_truncated_completions=True)
    assert loss_of(masked, two_sequences())[2] == pytest.approx([-2, 0, 0, 0]), "the second was truncated"
    kept = two_sequences().with_(entropy_mask=torch.tensor([False, True, True, True]))
    assert loss_of(config(loss=f"{module}:bare"), kept)[2] == pytest.approx([0, 1 / 4, 1 / 4, 1 / 4])
    old = torch.linspace(-1.6, -1.0, 4)
    sampled = two_sequences().with_(old_logprobs=old, rollout_logprobs=old - torch.tensor([math.log(4), 0, 0, 0]))
    corrected = config(loss=f"{module}:bare", rollout_correction="token_truncate", rollout_correction_cap=2.0)
    assert loss_of(corrected, sampled)[2] == pytest.approx([-1, 1 / 4, 1 / 4, 1 / 4]), "the ratio of 4 is cut to 2"
    referred = two_sequences().with_(ref_logprobs=torch.zeros(4))
    loss, stats, _ = loss_of(config(loss=f"{module}:bare", beta=0.5), referred)
    assert loss.item() == pytest.approx(loss_of(config(loss=f"{module}:bare"), referred)[0].item() + 0.5 * stats["kl"])


def test_the_clipped_surrogate_as_the_user_s_own_is_the_built_in_one(module: Path) -> None:
    old = torch.tensor([-2.0, -1.0, -1.2, -1.1])
    for level in ("token", "sequence"):
        of, shared = two_sequences().with_(old_logprobs=old), {"importance_sampling_level": level}
        own, built_in = loss_of(config(loss=f"{module}:surrogate", **shared), of), loss_of(config(**shared), of)
        assert own[0].item() == built_in[0].item() and own[2] == built_in[2]
        assert own[1] == {name: x for name, x in built_in[1].items() if not name.startswith("clip_ratio")}


def test_an_own_loss_does_not_have_to_mind_the_clip_s_bounds(module: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.epsilon_high=0\.2 must be above 1 with loss_type=cispo"):
        config(loss_type="cispo")
    config(loss_type="cispo", loss=f"{module}:bare")


# ---- mistakes


def message_of(error_type: type[RlhfError], act: Callable[[], object]) -> str:
    with pytest.raises(error_type) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # Ray carries it between processes
    return message


@pytest.mark.parametrize("name", ["advantage", "loss"])
@pytest.mark.parametrize(
    ("path", "kwargs", "expected"),
    [
        ("others", {}, "names no module; use package.module.function, or path/to/file.py:function"),
        (
            "no.where",
            {},
            "no module 'no'; install it, add its directory to PYTHONPATH, or use path/to/file.py:function",
        ),
        ("absent.py:f", {}, "absent.py on "),
        ("{mine}:absent", {}, "the module has no 'absent'; its callables are a_list, bare, "),
        ("{mine}:constant", {}, "is a int, not callable; name a function"),
        ("{mine}:nothing", {}, "cannot be called with inputs (too many positional arguments); write it as "),
        (
            "{mine}:others",
            {"x": 1},
            "cannot be called with inputs, x (got an unexpected keyword argument 'x'); write it",
        ),
        ("{mine}:others", {"inputs": 1}, "(multiple values for argument 'inputs')"),
        (
            "{mine}:needs",
            {},
            "(missing a required argument: 'temperature'); write it as {name}(inputs, **kwargs), and set",
        ),
    ],
)
def test_what_cannot_be_loaded_or_called_is_known_at_once(
    module: Path, name: str, path: str, kwargs: dict[str, Any], expected: str
) -> None:
    path = path.format(mine=module)
    settings = config(**{name: path, f"{name}_kwargs": kwargs})
    message = message_of(ConfigError, lambda: check_algorithm(settings))
    assert message.startswith(f"algorithm.{name}={path}")
    assert expected.format(name=name) in message


def test_what_can_be_called_passes(module: Path) -> None:
    check_algorithm(config())
    check_algorithm(config(advantage=f"{module}:needs", advantage_kwargs={"temperature": 1}, loss=f"{module}:bare"))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("a_list", "returned a list; return a float tensor [4], one per completion or [7], one per token"),
        ("integers", "returned int64 [4]; return a float tensor [4], one per completion or [7], one per token"),
        ("too_short", "returned float32 [3]; return a float tensor [4], one per completion or [7], one per token"),
        ("two_dimensional", "returned float32 [4, 1]; return"),
        ("raises", "raised AttributeError: 'AdvantageInputs' object has no attribute 'nothing' (at mine.py:29)"),
        (
            "calls_what_raises",
            "raised AttributeError: 'AdvantageInputs' object has no attribute 'nothing' (at mine.py:29)",
        ),
    ],
)
def test_what_an_estimator_must_not_return(module: Path, function: str, expected: str) -> None:
    algorithm = make_algorithm(config(advantage=f"{module}:{function}"))
    message = message_of(AlgorithmError, lambda: algorithm.assign_advantages(batch()))
    assert message.startswith(f"algorithm.advantage={module}:{function} {expected}")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("summed", "returned float32 []; return a float tensor [4], one per token"),
        ("detached", "returned a loss without gradient; compute it from inputs.logprobs or inputs.ratio"),
        ("odd_stat", "returned float32 [2] as stat 'entropy'; return a tensor [4], one per token"),
        ("float_stat", "returned a float as stat 'entropy'; return a tensor [4], one per token"),
        ("largest", "returned a stat 'ratio_max', but stats are averaged over tokens; rename it"),
        ("no_stats", "returned a list as its stats; return a dict of tensors"),
        ("raises", "raised AttributeError: 'LossInputs' object has no attribute 'rewards' (at mine.py:29)"),
    ],
)
def test_what_a_loss_must_not_return(module: Path, function: str, expected: str) -> None:
    message = message_of(AlgorithmError, lambda: loss_of(config(loss=f"{module}:{function}"), two_sequences()))
    assert message == f"algorithm.loss={module}:{function} {expected}"
