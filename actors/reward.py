"""Ray actor that runs reward functions, outside the learner and the driver."""

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.group import RankActor
from rlhf.batch import Rollout
from rlhf.config import Config
from rlhf.rewards import RewardFunctions, load_reward_functions


class RewardActor(RankActor):
    """Runs all reward functions on its share of the rollouts."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        self._decoder = AutoTokenizer.from_pretrained(self._config.model.path)
        self._functions = RewardFunctions(
            load_reward_functions(self._config.reward.functions), timeout_s=self._config.reward.function_timeout_s
        )

    def score(self, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
        texts = decode(self._decoder, rollouts)
        return self._functions.score([r.prompt for r in rollouts], texts, [r.token_ids for r in rollouts])


def decode(tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[Rollout]) -> list[str]:
    """The completions' text, without special tokens."""
    return tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
