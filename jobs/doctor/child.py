"""What the doctor tries in a process of its own, which can be killed: `python -m jobs.doctor.child TASK ...`.

The last line of its output is the result as JSON.
"""

import importlib
import json
import os
import sys
import time
from datetime import timedelta

from rlhf.errors import one_line
from rlhf.processes import end_with_parent

NUMBERS = 16 << 20  # of an all-reduce: 64 MiB


def imports(*modules: str) -> dict[str, str]:
    """The error of each import, by module; an empty one where it works."""
    errors = {}
    for module in modules:
        name, _, attribute = module.partition(":")
        try:
            found = importlib.import_module(name)
            if attribute:
                getattr(found, attribute)
            errors[name] = ""
        except Exception as error:  # whatever a broken installation raises
            errors[name] = one_line(error)
    return errors


def torch_sees() -> dict[str, object]:
    """What torch was built for, and how many GPUs it can use."""
    import torch

    return {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}


def all_reduce(backend: str, rank: str, world: str, host: str, port: str, timeout_s: str) -> float:
    """Seconds of the second all-reduce of 64 MiB between ``world`` ranks, on GPU 0 of this process if with NCCL."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    dist.init_process_group(
        backend,
        init_method=f"tcp://{host}:{port}",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=float(timeout_s)),
    )
    taken_s = 0.0
    for _ in range(2):
        numbers = torch.full((NUMBERS,), int(rank) + 1.0, device=device)
        begun = time.monotonic()
        dist.all_reduce(numbers)
        low, high = numbers.min().item(), numbers.max().item()  # waits for the device
        taken_s = time.monotonic() - begun
        right = int(world) * (int(world) + 1) / 2
        if (low, high) != (right, right):
            raise RuntimeError(f"the sum of 1 to {world} came out as {low:g} to {high:g}")
    dist.destroy_process_group()
    return taken_s


TASKS = {"imports": imports, "torch_sees": torch_sees, "all_reduce": all_reduce}

if __name__ == "__main__":
    end_with_parent(os.getppid())
    try:
        answer = {"result": TASKS[sys.argv[1]](*sys.argv[2:])}
    except Exception as error:  # its text is the answer
        answer = {"error": f"{type(error).__name__}: {one_line(error)}"}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # libraries that were interrupted may hang at exit
