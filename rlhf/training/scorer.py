"""Models that only score: the reference policy, and a reward model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.batch import Rollout, TrainBatch, merge_scores
from rlhf.data.chat import drop_second_bos, render_chat
from rlhf.errors import ConfigError, RewardError
from rlhf.models.inputs import packed_inputs
from rlhf.models.packed import PackedModel, PolicyModel, ScalarModel
from rlhf.models.probe import check_packing
from rlhf.packing import plan_micro_batches, prompt_units, worth_sharing


class FrozenScorer:
    """Runs a model over packed batches, without gradients."""

    def __init__(
        self,
        model: PackedModel,
        *,
        token_budget: int,
        device: torch.device,
        compiled: bool = False,
        probe_key: str | None = None,
    ) -> None:
        """``compiled``: fuse the decoder layers, on a GPU (a CPU would take minutes to gain nothing). ``probe_key``:
        check first that packing gives the model's own numbers, and call the model so where it does not (ConfigError).
        """
        self.model = model.to(device).eval().requires_grad_(False)
        if probe_key is not None:
            check_packing(self.model, self.model, device, key=probe_key)
        if compiled and device.type == "cuda":
            self.model.compile_layers()
        self._token_budget, self._device = token_budget, device

    @torch.no_grad()
    def score(self, batches: Sequence[TrainBatch]) -> list[Tensor]:
        """For each batch float32 [N]: log-probabilities of its completion tokens, or scalar scores, on the CPU.

        No micro-batch holds sequences of two batches, so a batch's scores do not depend on what it comes with.
        """
        parts = [self._forward(batch) for batch in batches]  # no .cpu() before the last forward is under way
        return [merge_scores(b, [(i, s.cpu()) for i, s in p]) for b, p in zip(batches, parts, strict=True)]

    def _forward(self, batch: TrainBatch) -> list[tuple[list[int], Tensor]]:
        """(sequence indices, scores of their completion tokens) of every micro-batch."""
        share_prompts, budget = worth_sharing(batch), self._token_budget
        units = prompt_units(batch, share_prompts=share_prompts, num_ranks=1, token_budget=budget)
        hidden_size = self.model.lm.config.hidden_size
        (plan,) = plan_micro_batches(units, num_ranks=1, token_budget=budget, hidden_size=hidden_size)
        parts = []
        for indices in plan:
            output = self.model(packed_inputs(batch.select(indices), self._device, share_prompts=share_prompts))
            parts.append((indices, output[0] if isinstance(self.model, PolicyModel) else output))
        return parts


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
    ) -> None:
        """``path``: where its tokenizer is; ``max_tokens``: per text; ``date``: see ``render_chat``; the last two: see
        FrozenScorer."""
        self._path = path
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._date = date
        self._max_tokens = min(max_tokens, token_budget - 1)  # last_token_batch appends one
        self._scorer = FrozenScorer(
            model, token_budget=token_budget, device=device, compiled=compiled, probe_key=probe_key
        )

    def score(self, groups: Sequence[Sequence[Rollout]], texts: Sequence[Sequence[str]]) -> list[list[float]]:
        """By group, one score per rollout; ``texts`` are the completions."""
        pairs = zip(groups, texts, strict=True)
        return self.score_tokens([list(map(self._tokenise, group, completions)) for group, completions in pairs])

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

    def _tokenise(self, rollout: Rollout, text: str) -> list[int]:
        prompt = rollout.prompt
        if prompt.messages is not None and self.tokenizer.chat_template is None:
            raise ConfigError(
                "reward.model.path: the prompts are chats, but its tokenizer has no chat template; add one"
            )
        whole = prompt.text if prompt.messages is None else prompt.messages
        return truncate_tail(answer_tokens(self.tokenizer, whole, text, date=self._date), self._max_tokens)


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]], answer: str, *, date: str | None = None
) -> list[int]:
    """What a reward model reads of a prompt, plain or a chat, and an answer to it: the same in training as in use.

    A chat needs a tokenizer with a chat template; ``date``: see ``render_chat``.
    """
    if isinstance(prompt, str):
        return list(drop_second_bos(tokenizer(prompt + answer, verbose=False)["input_ids"], tokenizer))  # type: ignore[arg-type]
    text = render_chat(tokenizer, [*prompt, {"role": "assistant", "content": answer}], date=date)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]


def truncate_tail(ids: Any, max_tokens: int) -> list[int]:
    """The last ``max_tokens`` ids: the end of a conversation is what is judged."""
    return list(ids)[-max_tokens:]


def last_token_batch(sequences: Sequence[list[int]]) -> TrainBatch:
    """Packs whole sequences so that a ScalarModel's one score per sequence is read at its last token.

    A scalar is read at the position BEFORE each completion token, so each sequence gets one token appended whose own
    content is never looked at.
    """
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.long)
    ones = torch.ones_like(lengths)
    return TrainBatch(
        tokens=torch.tensor([t for s in sequences for t in (*s, s[-1])], dtype=torch.long),
        prompt_lengths=lengths,
        completion_lengths=ones,
        truncated=torch.zeros(len(sequences), dtype=torch.bool),
        versions=torch.zeros(len(sequences), dtype=torch.int32),
    )
