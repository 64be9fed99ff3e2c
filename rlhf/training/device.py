"""The one device of a process that learns or scores, and the dtype of models there."""

import os

import torch


def local_rank_device() -> torch.device:
    """The one device this process may use: its single visible GPU, or the CPU."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        visible = torch.cuda.device_count()
        assert visible == 1, f"a rank must see exactly one GPU, this one sees {visible}"
        return torch.device("cuda", 0)
    return torch.device("cpu")


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Has this process run out of memory beyond ``gib`` of its GPU, which it may share with other processes."""
    if gib is not None and (total := device_bytes(device)):
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)


def device_bytes(device: torch.device) -> int:
    """Memory of a GPU; 0 for the CPU, which has no memory plan."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' is bfloat16 on GPU and float32 on CPU, where bfloat16 is emulated nine times slower."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)
