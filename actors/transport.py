"""How bytes cross from the learner's processes to vLLM's: NCCL broadcast and CUDA IPC, from either end."""

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor


def join_broadcast_group(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> Any:
    """An NCCL process group of the learner's rank 0 and every rollout worker process; rank 0 hosts the store."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, wait_for_workers=False)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), rank, world_size, options)


def broadcast(group: Any, data: Tensor) -> None:
    """From rank 0 to all, in the current stream's order."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([data], options).wait()


def ipc_handle(data: Tensor) -> tuple[str, bytes]:
    """(GPU UUID, pickled handle) of a CUDA tensor, for a process that shares the GPU."""
    _, args = reduce_tensor(data)
    return str(torch.cuda.get_device_properties(data.device).uuid), pickle.dumps(args)


def open_ipc_handle(handles: dict[str, bytes], device: torch.device) -> Tensor:
    """The tensor behind the handle for this GPU."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    assert uuid in handles, f"no learner rank shares GPU {uuid} with this worker"
    args = list(pickle.loads(handles[uuid]))
    args[6] = device.index  # the sender's device index means nothing in this process
    return rebuild_cuda_tensor(*args)
