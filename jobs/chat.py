"""`rlhf chat`: talk to a model in the terminal, through the engine that samples rollouts. Without Ray."""

import contextlib
import os
import readline  # noqa: F401  (lets ``input`` edit the line and recall earlier ones)
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from actors.connect import has_local_gpu
from actors.rollouts.engine import WorkerSpec
from actors.rollouts.vllm_engine import VllmEngine
from actors.rollouts.vllm_settings import worker_env
from rlhf.config import Config, DataConfig, ModelConfig, RolloutConfig, require
from rlhf.data.chat import Chat, render_chat
from rlhf.models.loading import load_tokenizer
from rlhf.planning.shapes import read_model_config
from rlhf.planning.topology import Device

CONTEXT_TOKENS = 8192  # at most, of a whole conversation
CPU_CACHE_MIB = 1024
PROMPT = "> "
HELP = "/reset begins anew, /quit or Ctrl-D ends"

Stream = Callable[[list[int]], Iterator[list[int]]]
"""From a prompt's tokens to those of its completion, as they come."""


def chat(model_path: str, run: Config | None, *, temperature: float | None, max_tokens: int) -> None:
    """Answers until the user leaves, with the sampling and the system prompt of the ``run`` that trained the model.

    ``max_tokens``: of an answer. Raises ConfigError if the model has no chat template.
    """
    model = replace(run.model, path=model_path) if run else ModelConfig(path=model_path)
    tokenizer = load_tokenizer(model)
    require(
        tokenizer.chat_template is not None,
        f"{model_path}: its tokenizer has no chat template, so there is no chat; use an instruct model",
    )
    device: Device = "gpu" if has_local_gpu() and (run is None or run.placement.device != "cpu") else "cpu"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    os.environ |= worker_env(device) | hidden  # before vLLM is imported
    warnings.simplefilter("ignore")  # vLLM's own imports
    spec = make_spec(model, run.rollout if run else RolloutConfig(), device, temperature, max_tokens)
    print(f"loading {model_path} ...", flush=True)
    engine = VllmEngine(spec)
    try:
        talk(engine.stream, tokenizer, run.data if run else DataConfig(train=""), spec.max_model_tokens)
    finally:
        engine.llm.engine_core.shutdown()


def make_spec(
    model: ModelConfig, rollout: RolloutConfig, device: Device, temperature: float | None, max_tokens: int
) -> WorkerSpec:
    """An engine for one conversation, in which no two answers to the same words need be equal."""
    limit = (read_model_config(model.path) or {}).get("max_position_embeddings") or CONTEXT_TOKENS
    config = replace(
        rollout,
        temperature=rollout.temperature if temperature is None else temperature,
        max_completion_tokens=max_tokens,
        ignore_eos=False,
        seed_requests=False,
        max_num_seqs=1,
        cpu_kv_cache_mib=CPU_CACHE_MIB,
    )
    return WorkerSpec(
        config=config,
        model_path=model.path,
        trust_remote_code=model.trust_remote_code,
        max_model_tokens=min(limit, CONTEXT_TOKENS),
        device=device,
        colocated=False,
        workers_on_gpu=1,
        logprobs=False,
        seed=int.from_bytes(os.urandom(4), "big"),
        dtype=model.dtype,
    )


def talk(stream: Stream, tokenizer: PreTrainedTokenizerBase, data: DataConfig, max_model_tokens: int) -> None:
    """Reads lines and prints answers as they come, until /quit or the end of the input."""
    print(HELP)
    start: Chat = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    messages = list(start)
    while (line := read_line()) not in (None, "/quit"):
        if line == "/reset":
            messages = list(start)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            text = render_chat(
                tokenizer, asked, date=data.date, add_generation_prompt=True, kwargs=data.chat_template_kwargs
            )
            prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(prompt) >= max_model_tokens:
                print(f"(that makes {len(prompt)} tokens, and the model takes {max_model_tokens}; /reset begins anew)")
                continue
            messages = [*asked, {"role": "assistant", "content": show(stream(prompt), tokenizer)}]


def read_line() -> str | None:
    """What the user types; None at the end of the input."""
    with contextlib.suppress(EOFError):
        return input(PROMPT).strip()
    print()
    return None


def show(tokens: Iterator[list[int]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Prints an answer as it comes, and returns all of it."""
    ids: list[int] = []
    shown = ""
    for new in tokens:
        ids += new
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        if not text.endswith("\ufffd"):  # the rest of the character is still to come
            print(text[len(shown) :], end="", flush=True)
            shown = text
    whole = str(tokenizer.decode(ids, skip_special_tokens=True))
    print(whole[len(shown) :])
    return whole
