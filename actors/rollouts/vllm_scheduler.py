"""vLLM's scheduler, but with a completion's log-probabilities handed out together when it ends.

vLLM sends each token's log-probability at once, as three small arrays of its own for every request at every step. With
hundreds of requests that takes longer than the model. Here they stay where they are sampled; the last output of a
request carries all of them, in a field for arrays that vLLM passes on untouched.
"""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

SCHEDULER = "actors.rollouts.vllm_scheduler.scheduler"


def keeping_logprobs(vllm_config: Any) -> type[Any]:
    """The scheduler's class that vLLM would have taken, keeping log-probabilities until a request ends.

    Not for stop strings, which are found in the process that detokenizes: it ends a request itself.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base: Any = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler

    class KeepingScheduler(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # by request; an aborted one's go with it
            self._kept: WeakKeyDictionary[Any, list[float]] = WeakKeyDictionary()

        def update_from_output(self, scheduled: Any, sampled: Any) -> Any:
            logprobs, sampled.logprobs = sampled.logprobs, None
            if logprobs is None:
                return super().update_from_output(scheduled, sampled)
            requests = dict(self.requests)  # those that end are gone from it afterwards
            outputs = super().update_from_output(scheduled, sampled)
            of_sampled = logprobs.logprobs[:, 0].tolist()
            first = logprobs.cu_num_generated_tokens or range(len(of_sampled))
            for of_client in outputs.values():
                for output in of_client.outputs:
                    request = requests[output.request_id]
                    if request.sampling_params.num_logprobs is None:
                        continue
                    start = first[sampled.req_id_to_index[output.request_id]]
                    kept = self._kept.setdefault(request, [])
                    kept += of_sampled[start : start + len(output.new_token_ids)]
                    if output.finish_reason is not None:
                        output.routed_experts = np.array(kept, np.float32)
            return outputs

    return KeepingScheduler


def scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """What vLLM calls to make its scheduler."""
    return keeping_logprobs(vllm_config)(vllm_config, **kwargs)
