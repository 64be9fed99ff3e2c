"""Ragged completions from models that never end by themselves: a vLLM scheduler that gives each request its own length.

Random weights hardly ever sample the end of sequence, so lengths have to be imposed. A logits processor could force the
end, but vLLM would then hand it every token of every sequence at each step, which costs more than what is measured. The
scheduler sees a request once, when it arrives, and compares its length with its limit anyway: nothing is added to a
step. vLLM takes it by name (engine argument ``scheduler_cls``), whether we or a peer start the engine.
"""

import math
import re
from itertools import count
from random import Random
from typing import Any

from actors.rollouts.vllm_scheduler import keeping_logprobs

SCHEDULER = "benchmarks.lengths.ragged_scheduler"
MEDIAN_SHARE = 330 / 1024  # of the longest allowed
SPREAD = 0.7  # standard deviation of the logarithm


def ragged_length(index: int, longest: int) -> int:
    """Tokens of an engine's request number ``index``: lognormal around MEDIAN_SHARE of ``longest``, at most that."""
    drawn = Random(index).lognormvariate(math.log(MEDIAN_SHARE * longest), SPREAD)
    return min(longest, max(1, round(drawn)))


def named_index(request_id: str, group_size: int) -> int | None:
    """The number of a request that our pool named GROUP.SAMPLE (vLLM appends to that); None for other names."""
    named = re.match(r"(\d+)\.(\d+)\b", request_id)
    return int(named[1]) * group_size + int(named[2]) if named else None


def ragged_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """The scheduler that would have been built, but with each request's ``max_tokens`` shortened to its drawn length.

    Requests are numbered as they arrive. In our pool, whose engines share a step's requests, the number follows from
    the request's name, GROUP.SAMPLE, and the engine argument ``additional_config={group: N}``. So both sides
    sample the same lengths in every step.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    group = (vllm_config.additional_config or {}).get("group")
    theirs: Any = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    base = theirs if group is None else keeping_logprobs(vllm_config)

    class RaggedScheduler(base):
        def add_request(self, request: Any) -> None:
            named = None if group is None else named_index(request.request_id, group)
            request.max_tokens = ragged_length(next(numbers) if named is None else named, request.max_tokens)
            super().add_request(request)

    numbers = count()
    return RaggedScheduler(vllm_config, **kwargs)
