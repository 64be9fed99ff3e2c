"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) on the linear layers of a packed model.

PEFT puts them in place; the weights below stay as they were loaded. Everybody else is given the product: a layer's
weight with its adapter added, ``W + alpha / r * B A``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from rlhf.config import ALL_LINEAR, LoraConfig, require
from rlhf.errors import ConfigError
from rlhf.models.nf4 import Nf4Linear
from rlhf.models.packed import PackedModel, ScalarModel

ADAPTER = "default"  # PEFT's name for the only one


def add_adapters(model: PackedModel, config: LoraConfig, *, key: str) -> None:
    """Freezes the model and gives each target an adapter that adds nothing yet; a scalar head is trained whole.

    Raises ConfigError, naming ``key``, if a target is not there or not linear.
    """
    targets = ALL_LINEAR if ALL_LINEAR in config.target_modules else list(config.target_modules)
    head = ["score"] if isinstance(model, ScalarModel) else None
    settings = peft_config(config, target_modules=targets, exclude_modules=head)
    try:
        inject_adapter_in_model(settings, model.lm, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"{key}.target_modules={config.target_modules}: {str(error).splitlines()[0]}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            base = layer.get_base_layer()
            require(
                type(base) in (nn.Linear, Nf4Linear),
                f"{key}.target_modules: {name} is a {type(base).__name__}, not linear",
            )
            dtype = base.dense_dtype if isinstance(base, Nf4Linear) else base.weight.dtype
            a, b = (side[ADAPTER].to(dtype).weight for side in (layer.lora_A, layer.lora_B))
            model.adapters[f"{name}.base_layer.weight"] = a, b, layer.scaling[ADAPTER]
    if isinstance(model, ScalarModel):
        model.lm.score.requires_grad_(True)
    model.register_state_dict_post_hook(_drop_frozen)


def peft_config(config: LoraConfig, **rest: Any) -> PeftConfig:
    """PEFT's configuration; ``rest`` in its own terms."""
    return PeftConfig(r=config.r, lora_alpha=config.alpha, lora_dropout=config.dropout, **rest)


def _drop_frozen(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Frozen weights are not saved: under none of their names, of which DeepSpeed knows the first."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)


@contextmanager
def without_adapters(model: PackedModel) -> Iterator[None]:
    """The model as it was loaded, bit for bit, while the body runs.

    PEFT's own switch does more: it says anew which weights are trained.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers, "there are adapters to do without"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
