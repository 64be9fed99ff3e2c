"""Writes checkpoints while training goes on: their tensors are copied to host memory, from where a thread writes them.

DeepSpeed decides what is saved and reads it back; only how the files come to be is ours.
"""

import io
import os
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from torch import Tensor

from rlhf.checkpoint import FileSum, Written, sync_file
from rlhf.training.host_memory import HostMemory, view_like


class StagedFile(NamedTuple):
    """What one file will hold, out of reach of later steps."""

    path: str
    pickled: bytes  # all but the tensors
    tensors: list[Tensor]  # on the host


class StagedWriter(TorchCheckpointEngine):
    """The checkpoint engine of a DeepSpeed engine: ``save_checkpoint`` returns when everything is copied.

    The host memory is used again for every checkpoint, so the next one waits until this one is written.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._memory = HostMemory(device)
        self._staged: list[StagedFile] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._reserved: Future[None] | None = None
        self._written: Future[Written] | None = None

    @property
    def reserved(self) -> bool:
        return self._reserved is not None

    def reserve(self, num_bytes: int) -> None:
        """Begins to take the host memory that a checkpoint will need, so that the first one is as quick as others."""
        assert not self.reserved, "once"
        self._reserved = self._thread.submit(self._memory.reserve, num_bytes)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begins a checkpoint, as soon as the one before is written."""
        if self._reserved is not None:
            self._reserved.result()  # waits
        if self._written is not None:
            self._written.exception()  # waits
        self._written, self._staged = None, []
        self._memory.clear()

    def save(self, state_dict: Any, path: str) -> None:
        """Copies what the file will hold. Tensors that share memory share its copy."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(state_dict)
        copies: dict[int, Tensor] = {}
        for tensor in pickler.tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = self._memory.copy(storage)
        tensors = [view_like(tensor, copies[tensor.untyped_storage().data_ptr()]) for tensor in pickler.tensors]
        self._staged.append(StagedFile(path, file.getvalue(), tensors))

    def commit(self, info: CheckpointCommitInfo) -> Literal[True]:
        """Begins to write the files."""
        self._written = self._thread.submit(_write, self._staged)
        self._staged = []
        return True

    def finish(self, *, wait: bool) -> Written | None:
        """What was written since the last ``commit``; None if it still is being written and the caller does not wait.

        Raises what the writing raised.
        """
        assert self._written is not None, "nothing was saved"
        return self._written.result() if wait or self._written.done() else None


def _write(files: Sequence[StagedFile]) -> Written:
    began_s, sums = time.perf_counter(), {}
    for staged in files:
        state_dict = _Unpickler(staged).load()
        # by Python's file: given a path, torch.save takes the GIL for every few bytes
        with open(staged.path, "wb") as file:
            summed = _Summed(file)
            torch.save(state_dict, cast(BinaryIO, summed))
            file.flush()
            os.fsync(file.fileno())
        sums[staged.path] = summed.sum
    for directory in {Path(staged.path).parent for staged in files}:
        sync_file(directory)
    return Written(time.perf_counter() - began_s, sums)


class _Summed:
    """A file to write to that sums up what passes: reading it again would take as long as writing it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sum = file, FileSum(0, 0)

    def write(self, data: Any) -> int:
        self.sum = self.sum.add(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors, which it collects and replaces by their numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, staged: StagedFile) -> None:
        super().__init__(io.BytesIO(staged.pickled))
        self._tensors = staged.tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]
