"""From prompts to the rollouts of one training step, with DAPO's dynamic sampling where it is asked for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rlhf.algorithms.grpo import zero_variance_groups
from rlhf.batch import Prompt, Rollout
from rlhf.config import AlgorithmConfig
from rlhf.data import PromptStream
from rlhf.rewards import combine
from rlhf.roles import Pending, Reward, Rollouts, Scores

Group = list[Rollout]


@dataclass(frozen=True)
class Done:
    """Scores that were needed before anyone waited for them."""

    scores: Scores

    def result(self) -> Scores:
        return self.scores


def in_order(groups: Iterable[Group], prompts: Sequence[Prompt]) -> list[Rollout]:
    """Flattens finished groups into prompt order; every prompt must have come back exactly once."""
    by_prompt = {group[0].prompt.id: group for group in groups}
    assert by_prompt.keys() == {p.id for p in prompts}, "the pool lost or repeated a prompt"
    return [rollout for p in prompts for rollout in by_prompt[p.id]]


def sample_groups(
    prompts: PromptStream, rollouts: Rollouts, reward: Reward, config: AlgorithmConfig
) -> tuple[list[Rollout], Pending[Scores]]:
    """``prompts_per_step`` groups and their rewards.

    With ``dynamic_sampling_max_tries`` groups whose rewards are all equal are replaced by groups of new prompts, for at
    most so many further rounds (DAPO: arXiv 2503.14476, section 3.2); what is still missing then is filled with the
    last equal ones, so that the batch always has its exact size.
    """
    if config.dynamic_sampling_max_tries == 0:
        taken = prompts.take(config.prompts_per_step)
        sampled = in_order(rollouts.generate(taken, group_size=config.group_size), taken)
        return sampled, reward.score(sampled)
    kept, spare = _Scored(), _Scored()
    for _ in range(1 + config.dynamic_sampling_max_tries):
        taken = prompts.take(config.prompts_per_step - kept.num_groups(config.group_size))
        sampled = in_order(rollouts.generate(taken, group_size=config.group_size), taken)
        scores = reward.score(sampled).result()
        equal = zero_variance_groups(combine(scores, reward.weights()), config.group_size)
        same = equal.repeat_interleave(config.group_size)
        kept.add(sampled, scores, ~same)
        spare.add(sampled, scores, same)
        if kept.num_groups(config.group_size) == config.prompts_per_step:
            break
    missing = config.num_sequences - len(kept.rollouts)
    if missing:
        kept.add(spare.rollouts[-missing:], {n: s[-missing:] for n, s in spare.scores.items()}, torch.ones(missing) > 0)
    return kept.rollouts, Done(kept.scores)


class _Scored:
    """Rollouts with their scores."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.scores: Scores = {}

    def num_groups(self, group_size: int) -> int:
        return len(self.rollouts) // group_size

    def add(self, rollouts: Sequence[Rollout], scores: Scores, mask: torch.Tensor) -> None:
        """Takes over the rollouts where ``mask`` bool [S] is True."""
        chosen = mask.nonzero(as_tuple=True)[0].tolist()
        self.rollouts += [rollouts[i] for i in chosen]
        for name, values in scores.items():
            self.scores.setdefault(name, []).extend(values[i] for i in chosen)
