"""vLLM's executors as rollout workers use them.

We name the class instead of leaving the choice to vLLM, which within a placement group would choose its Ray executor
and request resources that the worker already holds. The class is pickled with the arguments of every process of the
engine: each imports this module first, and from then on ends with the process that started it and can be asked for its
stacks.
"""

import multiprocessing

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rlhf.processes import end_with_parent
from rlhf.stacks import answer_signals


class OneProcess(UniProcExecutor):
    """One GPU: the engine's process is its worker."""


class TensorParallel(MultiprocExecutor):
    """A process for each GPU, on this node."""


if (parent := multiprocessing.parent_process()) is not None:  # one of vLLM's own processes, not the worker itself
    assert parent.pid is not None
    end_with_parent(parent.pid)
    answer_signals()
