"""Loads models for packed training: complete, of a supported family, with our own attention; others are refused."""

from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf.config import ModelConfig
from rlhf.errors import ConfigError
from rlhf.models.attention import PACKED_ATTENTION
from rlhf.models.families import Adjusted, load_model_config
from rlhf.models.packed import PackedModel, PolicyModel, ScalarModel
from rlhf.paths import check_model_directory


def load_policy(
    path: str,
    *,
    dtype: torch.dtype,
    temperature: float,
    chunk_tokens: int,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
    key: str = "model.path",
    empty: bool = False,
) -> PolicyModel:
    """A causal LM for packed scoring of sequences of up to ``max_tokens`` (None: the model's limit).

    ``empty``: without its weights, on the meta device.
    Raises ConfigError, naming ``key``, if the family is not supported or the directory lacks part of the LM.
    """
    adjusted = load_model_config(path, key=key, max_tokens=max_tokens, trust_remote_code=trust_remote_code)
    lm, missing = _load(AutoModelForCausalLM, path, adjusted, dtype, key, trust_remote_code, empty)
    saved_as = [name for name in adjusted.config.architectures or () if "Classification" in name]
    if missing or saved_as:
        what = f"a {saved_as[0]}" if saved_as else "not whole"
        lacks = f", it lacks {', '.join(missing[:3])}" if missing else ""
        raise ConfigError(f"{key}={path}: {what}{lacks}; a policy has to be a causal language model")
    return PolicyModel(lm, temperature=temperature, chunk_tokens=chunk_tokens, original=adjusted.original)


def load_scalar(
    path: str,
    *,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    fresh_head: Literal["refused", "zero", "random"] = "refused",
    trust_remote_code: bool = False,
    key: str = "model.path",
    empty: bool = False,
) -> ScalarModel:
    """A one-label sequence classifier; ``empty`` as in ``load_policy``.

    ``fresh_head``: the head for a directory without one, for example a causal LM's. ``zero``: a head that returns 0
    everywhere, as an untrained critic should: random values would only add noise to the first advantages
    (Huang et al. 2024, arXiv 2403.17031; OpenAI's lm-human-preferences). Raises ConfigError like ``load_policy``.
    """
    adjusted = load_model_config(path, key=key, max_tokens=max_tokens, trust_remote_code=trust_remote_code)
    adjusted.config.num_labels = 1
    lm, missing = _load(AutoModelForSequenceClassification, path, adjusted, dtype, key, trust_remote_code, empty)
    head_missing = [name for name in missing if name.startswith("score.")]
    if set(missing) - set(head_missing) or (head_missing and fresh_head == "refused"):
        raise ConfigError(
            f"{key}={path}: not a whole sequence classifier, it lacks {', '.join(missing[:3])}; `rlhf train-reward` "
            "makes one from a language model"
        )
    model = ScalarModel(lm, adjusted.original)
    if head_missing and fresh_head == "zero":
        for name, parameter in lm.named_parameters():
            if name in head_missing:
                getattr(parameter, "ds_tensor", parameter).data.zero_()  # under ZeRO-3 this rank holds a shard
    return model


def lodge_scalar(
    owner: PackedModel,
    path: str,
    *,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> ScalarModel:
    """A sequence classifier on the layers of ``owner``, which was loaded from ``path``, with a head that returns 0."""
    model = load_scalar(
        path,
        dtype=dtype,
        max_tokens=max_tokens,
        fresh_head="zero",
        trust_remote_code=trust_remote_code,
        empty=True,
    )
    model.stand_on(owner)
    head: Any = model.lm.score
    head.to_empty(device=next(owner.parameters()).device)
    for parameter in head.parameters():
        parameter.data.zero_()
    return model


def _load(
    auto: Any, path: str, adjusted: Adjusted, dtype: torch.dtype, key: str, trust_remote_code: bool, empty: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the parameters that its directory lacks."""
    irreplaceable = ConfigError(
        f"{key}={path}: the attention of {adjusted.config.model_type} models cannot be replaced, so sequences cannot "
        "be packed; use a model of another family (docs/models.md)"
    )
    try:
        lm, loading = auto.from_pretrained(
            path,
            config=adjusted.config,
            dtype=dtype,
            attn_implementation=PACKED_ATTENTION,
            trust_remote_code=trust_remote_code,
            device_map="meta" if empty else None,
            output_loading_info=True,
        )
    except KeyError as error:
        if error.args == (PACKED_ATTENTION,):  # the model looks it up in its own table of implementations
            raise irreplaceable from error
        raise
    if not lm._can_set_attn_implementation():
        raise irreplaceable
    return lm, sorted(loading["missing_keys"])


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ConfigError naming model.path."""
    check_model_directory(model.path, "model.path")
    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={model.path}: no tokenizer can be loaded from there ({str(error).splitlines()[0]}); give a "
            "Hugging Face directory, or a hub id that this machine can reach"
        ) from error


def stop_ids(model: ModelConfig) -> list[int]:
    """The tokens with which its generation configuration says that a reply ends; none if it has no such file."""
    try:
        found = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:
        return []
    return list(found) if isinstance(found, list) else [] if found is None else [found]
