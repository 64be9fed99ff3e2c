"""Ray actor that runs reward functions, outside the learner and the driver."""

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.group import RankActor
from rlhf.batch import Rollout
from rlhf.config import Config
from rlhf.rewards import RewardFunctions, Scoring, load_reward_functions
from rlhf.roles import Scores


class RewardActor(RankActor):
    """Runs all reward functions on its share of the groups, sync ones in a process beside it.

    Threaded: calls overlap where functions are async.
    """

    concurrent_calls = 64

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        self._decoder = AutoTokenizer.from_pretrained(self._config.model.path)
        self._functions = RewardFunctions(
            load_reward_functions(self._config.reward.functions),
            timeout_s=self._config.reward.function_timeout_s,
            start_timeout_s=self._config.timeouts.start_s,
        )
        self._functions.start()

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[Scores]:
        under_way = [self._submit(group) for group in groups]
        return [scoring.result() for scoring in under_way]

    def _submit(self, group: Sequence[Rollout]) -> Scoring:
        texts = decode(self._decoder, group) if self._functions.needs_text else None
        return self._functions.submit([r.prompt for r in group], texts, [r.token_ids for r in group])


def decode(tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[Rollout]) -> list[str]:
    """The completions' text, without special tokens."""
    return tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
