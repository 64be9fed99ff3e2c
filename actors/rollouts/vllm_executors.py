"""vLLM's executors as rollout workers use them.

Named by class, never left to vLLM: within a placement group it would take its Ray executor, which looks for resources
that the worker's own bundle holds already. And the class goes to every process of an engine, pickled with its
arguments, so that each imports this module before anything else and from then on ends with whoever started it.
"""

import multiprocessing

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rlhf.processes import end_with_parent


class OneProcess(UniProcExecutor):
    """One GPU: the engine's process is its worker."""


class TensorParallel(MultiprocExecutor):
    """A process for each GPU, on this node."""


if (parent := multiprocessing.parent_process()) is not None:  # one of vLLM's own processes, not the worker itself
    assert parent.pid is not None
    end_with_parent(parent.pid)
