"""A process in which vLLM loads what `rlhf export` wrote, and prints the log-probabilities of a prompt under each.

Its argument is JSON: the ``base`` of the adapter, the directory ``out`` that holds ``merged`` and ``adapter``, and the
``prompt``'s tokens.
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

PARAMS = SamplingParams(max_tokens=1, prompt_logprobs=0)
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "max_model_len": 64,
    "max_num_seqs": 2,
}


def logprobs(llm: LLM, prompt: list[int], adapter: str | None = None) -> list[float]:
    request = LoRARequest("policy", 1, adapter) if adapter else None
    (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS, lora_request=request, use_tqdm=False)
    assert output.prompt_logprobs is not None
    told = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return [position[token].logprob for token, position in told if position]


def main(base: str, out: str, prompt: list[int]) -> None:
    merged = LLM(f"{out}/merged", **SMALL)
    adapters = LLM(base, enable_lora=True, max_lora_rank=16, **SMALL)
    found = {
        "merged": logprobs(merged, prompt),
        "adapter": logprobs(adapters, prompt, f"{out}/adapter"),
        "base": logprobs(adapters, prompt),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
