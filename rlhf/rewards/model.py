"""A reward model: a scalar for each completion, from its text."""

from collections.abc import Sequence

import torch
from transformers import AutoTokenizer

from rlhf.batch import Rollout, last_token_batch
from rlhf.data.chat import answer_tokens, truncate_tail
from rlhf.errors import ConfigError, RewardError
from rlhf.models.packed import ScalarModel
from rlhf.models.scorer import FrozenScorer
from rlhf.rewards.functions import Completion
from rlhf.user_code import described


class RewardModel:
    """Scores text: it has a tokenizer and a chat template of its own, so the policy's tokens mean nothing to it."""

    def __init__(
        self,
        path: str,
        model: ScalarModel,
        *,
        max_tokens: int,
        token_budget: int,
        device: torch.device,
        date: str | None = None,
        compiled: bool = False,
        probe_key: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """``path``: where its tokenizer is; ``max_tokens``: per text; ``date``: see ``render_chat``; ``compiled``,
        ``probe_key``: see FrozenScorer."""
        self._path = path
        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        self._date = date
        self._max_tokens = min(max_tokens, token_budget - 1)  # last_token_batch appends one
        self._scorer = FrozenScorer(
            model, token_budget=token_budget, device=device, compiled=compiled, probe_key=probe_key
        )

    def score(
        self, groups: Sequence[Sequence[Rollout]], completions: Sequence[Sequence[Completion]]
    ) -> list[list[float]]:
        """By group, one score per rollout."""
        pairs = zip(groups, completions, strict=True)
        return self.score_tokens([list(map(self._tokenise, group, of_group)) for group, of_group in pairs])

    def score_tokens(self, groups: Sequence[Sequence[list[int]]]) -> list[list[float]]:
        """By group, the model's scalar at the last token of each sequence. Raises RewardError unless all are finite."""
        scores = self._scorer.score([last_token_batch(group) for group in groups])
        for found in scores:
            if not found.isfinite().all():
                raise RewardError(
                    f"reward.model.path={self._path}: it gave {found[~found.isfinite()][0].item()} for a completion; "
                    "look for NaN in its weights, or set model.dtype=float32"
                )
        return [found.tolist() for found in scores]

    def _tokenise(self, rollout: Rollout, completion: Completion) -> list[int]:
        prompt = rollout.prompt
        if prompt.messages is not None and self.tokenizer.chat_template is None:
            raise ConfigError(
                "reward.model.path: the prompts are chats, but its tokenizer has no chat template; add one"
            )
        whole = prompt.text if prompt.messages is None else prompt.messages
        try:
            tokens = answer_tokens(self.tokenizer, whole, completion, date=self._date)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message["role"]) for message in completion if isinstance(message, dict))
            raise RewardError(
                f"reward.model.path={self._path}: its chat template cannot render what followed prompt {prompt.id} "
                f"({roles or 'an answer'}): {described(error)}; use a model whose template can"
            ) from error
        return truncate_tail(tokens, self._max_tokens)
