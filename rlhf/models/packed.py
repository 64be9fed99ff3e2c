"""Models over packed sequences: a policy that scores its tokens, and a scalar model.

A packed forward takes all tokens of a micro-batch as one row ``[1, T]`` without padding. Attention never crosses a
sequence border, and positions restart there.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.errors import ConfigError
from rlhf.models.attention import PACKED_ATTENTION
from rlhf.models.families import LogitShape
from rlhf.models.heads import LogprobHead, ScalarHead
from rlhf.models.inputs import PackedInputs, WholeSequence

OWN_ADAPTER = "default"  # PEFT's name for the adapters of the model to which the layers belong
LODGER = "lodger"  # and for those of a model that stands on them


class PackedModel(nn.Module):
    """A Hugging Face model run over packed sequences."""

    def __init__(self, lm: PreTrainedModel, original: dict[str, Any] | None = None) -> None:
        """``original``: values of ``lm.config`` before it was adjusted for training (``rlhf.models.families``)."""
        super().__init__()
        self.lm, self._original = lm, original or {}
        # A [r, in], B [out, r] and alpha / r, by the full name of the weight to which their product is added
        self.adapters: dict[str, tuple[nn.Parameter, nn.Parameter, float]] = {}
        self.adapter_name = OWN_ADAPTER  # PEFT's
        self.owns_base = True

    def stand_on(self, owner: "PackedModel") -> None:
        """Replaces the layers by those of ``owner``, whose frozen weights are then this model's, too. Each of the two
        has adapters of its own on them."""
        assert type(self.backbone) is type(owner.backbone), "both heads are of one family"
        setattr(self.lm, self.lm.base_model_prefix, owner.backbone)
        self.adapter_name, self.owns_base = LODGER, False

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Same as the base class, without the adapters that another model has on the same layers."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            adapter = re.search(r"\.lora_\w+\.(\w+)\.", name)
            if adapter is None or adapter[1] == self.adapter_name:
                yield name, parameter

    @property
    def backbone(self) -> nn.Module:
        """The model below its head."""
        return getattr(self.lm, self.lm.base_model_prefix)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, whatever their family calls them."""
        lists = [module for module in self.backbone.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len)

    def checkpoint_layers(self, count: int) -> None:
        """Has the first ``count`` decoder layers recompute their activations in the backward pass (Chen et al. 2016,
        arXiv 1604.06174). The backward pass comes to them last, when the others have freed theirs."""
        self.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kept: Any = self.layers[count:]
        for layer in kept:
            layer.gradient_checkpointing = False

    def compile_layers(self) -> None:
        """Fuses the element-wise work of each decoder layer. ZeRO-3's hooks stay outside of what is compiled."""
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Switches to transformers' own eager attention: the model takes a WholeSequence and returns its own logits."""
        self.lm.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.lm.set_attn_implementation(PACKED_ATTENTION)

    def _own_logits(self, sequence: WholeSequence) -> Tensor:
        """float ``[1, L, V]`` from a causal LM, ``[1, 1]`` from a classifier."""
        return self.lm(input_ids=sequence.tokens[None], use_cache=False).logits

    @contextmanager
    def original_config(self) -> Iterator[None]:
        """Restores ``lm.config`` as loaded, for saving."""
        adjusted = {name: getattr(self.lm.config, name) for name in self._original}
        vars(self.lm.config).update(self._original)
        try:
            yield
        finally:
            vars(self.lm.config).update(adjusted)

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """The last hidden states, ``[T, H]``."""
        output = self.backbone(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            cu_seq_lens_q=inputs.borders,
            cu_seq_lens_k=inputs.key_borders,
            max_length_q=inputs.max_length,
            max_length_k=inputs.max_keys,
            attended=inputs.attended,
        )
        return output.last_hidden_state[0]


class PolicyModel(PackedModel):
    """Scores completion tokens with their log-probabilities under the sampling temperature."""

    def __init__(
        self, lm: PreTrainedModel, *, temperature: float, chunk_tokens: int, original: dict[str, Any] | None = None
    ) -> None:
        super().__init__(lm, original)
        self.temperature, self.chunk_tokens = temperature, chunk_tokens
        self.logit_shape = LogitShape.of(lm.config)
        head = lm.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ConfigError(
                f"model.path: the LM head of {type(lm).__name__} is a {type(head).__name__}; models with a linear one "
                "are supported (docs/models.md)"
            )
        head.__class__ = LogprobHead

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Same as the base class, with the LM head's plain logits."""
        head = self.lm.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        head.__class__ = nn.Linear
        try:
            with super().as_loaded():
                yield
        finally:
            head.__class__ = LogprobHead

    def forward(self, inputs: PackedInputs | WholeSequence) -> tuple[Tensor, Tensor] | Tensor:
        """(log-probabilities, entropy) of the completion tokens, float32 ``[N]``, nats; or the LM's own logits."""
        if isinstance(inputs, WholeSequence):
            return self._own_logits(inputs)
        hidden = self.hidden(inputs)[inputs.predictors]
        head = self.lm.get_output_embeddings()
        assert isinstance(head, LogprobHead)
        return head(hidden, inputs.targets, self.logit_shape, self.temperature, self.chunk_tokens)


class ScalarModel(PackedModel):
    """A sequence-classification model with one label: the critic, and the reward model in training."""

    def __init__(self, lm: PreTrainedModel, original: dict[str, Any] | None = None) -> None:
        super().__init__(lm, original)
        head = getattr(lm, "score", None)
        if type(head) is not nn.Linear:
            raise ConfigError(f"{type(lm).__name__} has no linear score head; use a model of another family")
        head.__class__ = ScalarHead

    def forward(self, inputs: PackedInputs | WholeSequence) -> Tensor:
        """float32 ``[N]``: the score at the position that predicts each completion token; or the model's own.

        For a critic, this is the value of the state in which the token is chosen.
        """
        if isinstance(inputs, WholeSequence):
            return self._own_logits(inputs)
        head = self.lm.score
        assert isinstance(head, ScalarHead)
        return head(self.hidden(inputs)[inputs.predictors])[:, 0]
