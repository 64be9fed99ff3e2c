"""Ray actor that runs reward functions, outside the learner and the driver."""

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.group import RankActor
from rlhf.batch import Rollout
from rlhf.config import Config
from rlhf.rewards import RewardFunctions, load_reward_functions
from rlhf.roles import Scores


class RewardActor(RankActor):
    """Runs all reward functions on its share of the groups."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        self._decoder = AutoTokenizer.from_pretrained(self._config.model.path)
        self._functions = RewardFunctions(
            load_reward_functions(self._config.reward.functions), timeout_s=self._config.reward.function_timeout_s
        )

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[Scores]:
        texts = decode(self._decoder, groups) if self._functions.read_text else [None] * len(groups)
        return [
            self._functions.score([r.prompt for r in group], completions, [r.token_ids for r in group])
            for group, completions in zip(groups, texts, strict=True)
        ]


def decode(tokenizer: PreTrainedTokenizerBase, groups: Sequence[Sequence[Rollout]]) -> list[list[str]]:
    """The completions' text by group, without special tokens."""
    return [tokenizer.batch_decode([r.token_ids for r in group], skip_special_tokens=True) for group in groups]
