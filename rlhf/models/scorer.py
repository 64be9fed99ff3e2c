"""A model that only scores: the reference policy, or a reward model's scalar."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.batch import TrainBatch, merge_scores
from rlhf.models.inputs import packed_inputs
from rlhf.models.packed import PackedModel, PolicyModel
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
        check first that packing preserves the model's own numbers; the ConfigError names the model by this key.
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

        No micro-batch holds sequences of two batches, so a batch's scores do not depend on the others.
        """
        parts = [self._forward(batch) for batch in batches]  # no .cpu() before the last forward is queued
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
