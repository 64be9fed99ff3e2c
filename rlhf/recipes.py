"""Recipes: YAML and ``key=value`` in, a validated configuration out.

``load_config`` merges, in this order: the defaults in ``rlhf.config``, the file named by the recipe's ``extends:`` key
(recursively), the recipe, and the command line's ``key=value`` pairs.
"""

from collections.abc import Iterator, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from rlhf.aliases import ALIASES
from rlhf.config import Config, kind_key, require
from rlhf.errors import ConfigError
from rlhf.planning.known_models import known_model
from rlhf.planning.shapes import read_model_config
from rlhf.reward_config import RewardTrainingConfig

S = TypeVar("S")

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # installed, or a checkout

# What OmegaConf raises for values that do not fit the schema; TypeError for a list where a mapping belongs.
MERGE_ERRORS = (OmegaConfBaseException, TypeError)


def _read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> DictConfig:
    """Reads a recipe, merged over the file it extends, if any."""
    if path in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in seen)}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        config = OmegaConf.load(path)
    except Exception as error:  # OmegaConf re-exports no common base of YAML's errors
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: must hold keys and values at its top level")
    parent = config.pop("extends", None)
    if parent is None:
        return config
    merged = OmegaConf.merge(_read_yaml((path.parent / str(parent)).resolve(), (*seen, path)), config)
    assert isinstance(merged, DictConfig)
    return merged


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come along, by name."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.yaml")) if file.stem != "base"}


def find_recipe(recipe: str | Path) -> Path:
    """A file, or one that comes along by its name, such as grpo_smollm2. Raises ConfigError with all names."""
    path, shipped = Path(recipe), shipped_recipes()
    if path.is_file() or path.name != str(recipe) or path.suffix:
        return path
    require(
        path.name in shipped,
        f"--config {recipe}: neither a file nor a recipe that comes along; those are {', '.join(shipped)}",
    )
    return shipped[path.name]


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[S] = Config) -> S:  # type: ignore[assignment]
    """Merges defaults, the recipe at ``path`` and ``key=value`` overrides into a validated ``schema``.

    Raises ConfigError with one line naming the key or file, what is wrong and what would work.
    """
    recipe = _read_yaml(Path(path).resolve())
    return _build(schema, recipe, *(_read_override(override) for override in overrides))


def _read_override(override: str) -> DictConfig:
    if "=" not in override:
        raise ConfigError(f"{override!r} is not key=value; write it like rollout.num_workers=2")
    try:
        return OmegaConf.from_dotlist([override])
    except Exception as error:  # as in _read_yaml
        raise ConfigError(f"{override!r}: the value is not valid YAML; close its brackets, or quote it") from error


def _build(schema: type[S], *layers: DictConfig) -> S:
    merged = _merge(_defaults(schema), layers)
    _require_bools(merged, layers)
    try:
        config = OmegaConf.to_object(merged)
    except ConfigError:
        raise
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: no value given, and there is no default") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, schema)
    return config


@cache
def _defaults(schema: type) -> DictConfig:
    """A schema with its defaults, which merging copies; building it takes longer than everything else."""
    return OmegaConf.structured(schema)


def _merge(base: DictConfig, layers: Sequence[DictConfig]) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, *layers)
    except MERGE_ERRORS as error:
        key = str(getattr(error, "full_key", None))
        if not any(key.split(".")[0] in layer for layer in layers):  # no key, or one relative to a list's member
            key = _refused_key(base, layers)
        # for members of tuples, OmegaConf leaves its placeholders in
        reason = str(error).splitlines()[0].replace("'$VALUE' of type '$VALUE_TYPE' ", "")
        instead = _key_instead(key, reason, base, layers) if isinstance(error, ConfigKeyError) else None
        raise ConfigError(instead or f"{key}: {reason}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _key_instead(unknown: str, reason: str, base: DictConfig, layers: Sequence[DictConfig]) -> str | None:
    """One line on the key that is meant by one that starts with ``unknown``; None: OmegaConf's ``reason`` says more."""
    known = [".".join(path) for path, _ in _leaves(OmegaConf.to_container(base))]
    paths = [".".join(path) for layer in layers for path, _ in _leaves(OmegaConf.to_container(layer))]
    given = next((path for path in paths if f"{path}.".startswith(f"{unknown}.")), unknown)
    names = given.split(".")
    if alias := ALIASES.get(given) or ALIASES.get(names[-1]):
        key = alias.key.replace("learner.", "critic.", 1) if names[0] == "critic" else alias.key
        meaning = f" ({alias.meaning})" if alias.meaning else ""
        return f"{given}: no such key; use {key}{meaning}" if key in known else None
    if "Did you mean" in reason:
        return None
    for ending in (".".join(names[start:]) for start in range(len(names))):  # the right name in a wrong section
        if found := [key for key in known if f".{key}".endswith(f".{ending}")]:
            return f"{given}: no such key; use {' or '.join(found)}" if len(found) <= 3 else None
    return None


def _refused_key(base: DictConfig, layers: Sequence[DictConfig]) -> str:
    """The first key that the schema rejects, for errors that do not name it."""
    for layer in layers:
        for path, value in _leaves(OmegaConf.to_container(layer)):
            try:
                OmegaConf.merge(base, reduce(lambda inner, name: {name: inner}, reversed(path), value))
            except MERGE_ERRORS:
                return ".".join(path)
    return "config"


def _require_bools(merged: DictConfig, layers: Sequence[DictConfig]) -> None:
    """Rejects numbers other than 0 and 1 for booleans: OmegaConf reads rollout.logprobs=5 as true."""
    for layer in layers:
        for path, value in _leaves(OmegaConf.to_container(layer)):
            key = ".".join(path)
            if type(value) is int and value not in (0, 1):
                require(not isinstance(OmegaConf.select(merged, key), bool), f"{key}={value} must be true or false")


def _leaves(part: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested mappings that are not mappings themselves, each with its path of names."""
    if not isinstance(part, dict):
        yield path, part
        return
    for name, value in part.items():
        yield from _leaves(value, (*path, str(name)))


def to_yaml(config: Config | RewardTrainingConfig) -> str:
    """The whole configuration, defaults included, as YAML that ``load_config`` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def validate_model(config: Config) -> None:
    """Checks what needs the model's shape: tensor parallelism and context length. Raises ConfigError.

    A hub model without its ``config.json`` in the cache is checked only as far as its name tells; loading its tokenizer
    puts it there.
    """
    shape = read_model_config(config.model.path) or known_model(config.model.path)
    if shape is None:
        return
    heads = shape.get("num_attention_heads")
    if heads is not None:
        kv_heads = shape.get("num_key_value_heads") or heads
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        for kind, (settings, _) in config.rollout.kinds().items():
            require(
                settings.tensor_parallel_size in fits,
                f"{kind_key(kind)}.tensor_parallel_size={settings.tensor_parallel_size} does not fit "
                f"num_attention_heads={heads} and num_key_value_heads={kv_heads}; use {', '.join(map(str, fits))}",
            )
    limit = shape.get("max_position_embeddings")
    require(
        limit is None or config.max_sequence_tokens <= limit,
        f"{config.longest_sequence} exceeds the model's max_position_embeddings={limit}; lower one of them",
    )
