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


def add_adapters(model: PackedModel, config: LoraConfig, *, key: str) -> None:
    """Freezes the model and gives each target an adapter that adds nothing yet; a scalar head is trained whole.
    Adapters of another model on the same layers stay as they are, but are switched off: see ``use_own_adapters``.

    Raises ConfigError, naming ``key``, if a target is not there or not linear.
    """
    targets = ALL_LINEAR if ALL_LINEAR in config.target_modules else list(config.target_modules)
    head = ["score"] if isinstance(model, ScalarModel) else None
    settings = peft_config(config, target_modules=targets, exclude_modules=head)
    try:
        inject_adapter_in_model(settings, model.lm, adapter_name=model.adapter_name)
    except ValueError as error:
        raise ConfigError(f"{key}.target_modules={config.target_modules}: {str(error).splitlines()[0]}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and model.adapter_name in module.r:
            layer: Any = module
            base = layer.get_base_layer()
            require(
                type(base) in (nn.Linear, Nf4Linear),
                f"{key}.target_modules: {name} is a {type(base).__name__}, not linear",
            )
            dtype = base.dense_dtype if isinstance(base, Nf4Linear) else base.weight.dtype
            a, b = (side[model.adapter_name].to(dtype).weight for side in (layer.lora_A, layer.lora_B))
            model.adapters[f"{name}.base_layer.weight"] = a, b, layer.scaling[model.adapter_name]
    if isinstance(model, ScalarModel):
        model.lm.score.requires_grad_(True)
    model.register_state_dict_post_hook(_drop_frozen)


def peft_config(config: LoraConfig, **rest: Any) -> PeftConfig:
    """PEFT's configuration; ``rest`` in its own terms."""
    return PeftConfig(r=config.r, lora_alpha=config.alpha, lora_dropout=config.dropout, **rest)


def _drop_frozen(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Frozen weights are not saved: under none of their names, of which DeepSpeed knows the first. Neither are adapters
    of another model."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, _ in nn.Module.named_parameters(model, remove_duplicate=False):
        if name not in trained:
            state.pop(prefix + name, None)


def use_own_adapters(model: PackedModel) -> None:
    """From now on its layers compute with its adapters, and not with those of another model that shares them.

    PEFT's own switch does more: it says anew which weights are trained.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            layer._active_adapter = model.adapter_name


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
