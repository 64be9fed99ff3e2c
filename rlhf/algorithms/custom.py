"""The user's own advantage estimator and loss: loaded by path, called with typed inputs, their results checked.

``algorithm.advantage`` names an ``estimator(inputs: AdvantageInputs, **kwargs) -> Tensor``, ``algorithm.loss`` a
``loss(inputs: LossInputs, **kwargs) -> Tensor | tuple[Tensor, dict[str, Tensor]]``.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf.algorithms.advantages import AdvantageInputs, Estimator
from rlhf.algorithms.losses import LossInputs, Stats, TokenLoss
from rlhf.config import AlgorithmConfig
from rlhf.errors import AlgorithmError, ConfigError
from rlhf.user_code import defined_at, described, load_function, place_in


def custom_estimator(config: AlgorithmConfig) -> Estimator | None:
    """The estimator that ``algorithm.advantage`` names, with its results checked; None if it names none.

    Raises ConfigError if it cannot be loaded or called. The estimator raises AlgorithmError.
    """
    if config.advantage is None:
        return None
    function = CustomFunction.load("advantage", config.advantage, config.advantage_kwargs)

    def estimator(inputs: AdvantageInputs) -> Tensor:
        per = {"completion": len(inputs.completion_lengths), "token": len(inputs.versions)}
        return function.checked(function(inputs), per).float()

    return estimator


def custom_loss(config: AlgorithmConfig) -> TokenLoss | None:
    """The loss that ``algorithm.loss`` names, with its results checked; None if it names none.

    Its stats are named ``loss/<name>``. Raises as ``custom_estimator`` does.
    """
    if config.loss is None:
        return None
    function = CustomFunction.load("loss", config.loss, config.loss_kwargs)

    def token_loss(inputs: LossInputs) -> tuple[Tensor, Stats]:
        returned, per = function(inputs), {"token": len(inputs.logprobs)}
        loss, stats = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        loss = function.checked(loss, per)
        function.require(
            loss.requires_grad or not inputs.logprobs.requires_grad,
            "returned a loss without gradient; compute it from inputs.logprobs or inputs.ratio",
        )
        return loss, function.checked_stats(stats, per)

    return token_loss


@dataclass(frozen=True)
class CustomFunction:
    """A user's function. ``setting``: key and path in the configuration, for errors."""

    setting: str
    call: Callable[..., Any]
    kwargs: Mapping[str, Any]

    @classmethod
    def load(cls, name: str, path: str, kwargs: Mapping[str, Any]) -> "CustomFunction":
        """What ``algorithm.<name>=path`` names. Raises ConfigError if it does not load, or does not accept ``inputs``
        and the kwargs."""
        setting = f"algorithm.{name}={path}"
        function = cls(setting, load_function(path, setting), kwargs)
        try:
            inspect.signature(function.call).bind(None, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{function} cannot be called with {', '.join(['inputs', *kwargs])} ({error}); write it as "
                f"{name}(inputs, **kwargs), and set its other arguments in algorithm.{name}_kwargs"
            ) from error
        return function

    def __call__(self, inputs: AdvantageInputs | LossInputs) -> Any:
        """Its result. Raises AlgorithmError if it raises."""
        try:
            return self.call(inputs, **self.kwargs)
        except Exception as error:
            file, _ = defined_at(self.call)
            raise AlgorithmError(f"{self} raised {described(error)}{place_in(file, error)}") from error

    def checked(self, returned: Any, per: Mapping[str, int]) -> Tensor:
        """A float tensor with one value per completion or token. ``per``: how many of each there are.

        Raises AlgorithmError.
        """
        shapes = " or ".join(f"[{count}], one per {unit}" for unit, count in per.items())
        fits = isinstance(returned, Tensor) and returned.is_floating_point() and _counts(returned, per)
        self.require(fits, f"returned {_shown(returned)}; return a float tensor {shapes}")
        return returned

    def checked_stats(self, stats: Any, per: Mapping[str, int]) -> Stats:
        """Tensors of numbers or bools by name, one value per token. Raises AlgorithmError."""
        self.require(isinstance(stats, dict), f"returned {_shown(stats)} as its stats; return a dict of tensors")
        for name, stat in stats.items():
            wanted = f"return a tensor [{per['token']}], one per token"
            fits = isinstance(stat, Tensor) and _counts(stat, per)
            self.require(fits, f"returned {_shown(stat)} as stat {name!r}; {wanted}")
            averaged = not str(name).endswith("_max")  # of those, the engine keeps the maximum
            self.require(averaged, f"returned a stat {name!r}, but stats are averaged over tokens; rename it")
        return {f"loss/{name}": stat for name, stat in stats.items()}

    def require(self, condition: bool, complaint: str) -> None:
        if not condition:
            raise AlgorithmError(f"{self} {complaint}")

    def __str__(self) -> str:
        return self.setting


def _counts(tensor: Tensor, per: Mapping[str, int]) -> bool:
    return tensor.shape in [(count,) for count in per.values()]


def _shown(value: Any) -> str:
    """'float32 [2, 3]', or 'a list' for what is not a tensor."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
