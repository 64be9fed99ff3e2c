"""A whole model in one place, which no rank of ours ever holds."""

import torch.distributed as dist
from torch import Tensor

from rlhf.models.packed import PackedModel
from rlhf.training.weights import named_weights


def gathered_state_dict(model: PackedModel) -> dict[str, Tensor] | None:
    """Every parameter once, by Hugging Face name, on rank 0; None elsewhere. Collective."""
    state = {name: weight.gather().clone() for name, weight in named_weights(model).items()}
    return state if dist.get_rank() == 0 else None
