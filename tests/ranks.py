"""Warm ranks: processes with DeepSpeed imported and a process group between them, in which tests run scripts.

Importing takes longer than most scripts, so a session's tests share the processes.
"""

import contextlib
import gc
import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

SCRIPT_S = 280.0


class Ranks:
    """``num_ranks`` processes that run the same script side by side."""

    def __init__(self, num_ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._processes, self._pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, num_ranks, port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, script: str, *argv: str | Path) -> None:
        """Runs a script with ``sys.argv[1:]`` on every rank. Raises AssertionError with what one of them raised.

        After that the others may wait for it, so all are closed.
        """
        for pipe in self._pipes:
            pipe.send((script, [str(argument) for argument in argv]))
        waiting = list(self._pipes)
        try:
            while waiting:
                ready = wait(waiting, timeout=SCRIPT_S)
                assert ready, f"{len(waiting)} rank(s) still run after {SCRIPT_S:g} s"
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    error = pipe.recv()
                    assert error is None, error
                    waiting.remove(pipe)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._processes

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()


def serve(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    """One rank: joins the others on the CPU, then runs scripts until the other end of the pipe is closed."""
    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "DS_LOG_LEVEL": "error"},
    }
    import torch
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    import rlhf.models.packed  # noqa: F401
    from rlhf.training.setup import init_distributed

    torch.set_num_threads(1)
    init_distributed(torch.device("cpu"), 60)
    with contextlib.suppress(EOFError):
        while True:
            gc.collect()
            gc.freeze()  # DeepSpeed collects garbage at every turn, which takes long with this much imported
            script, argv = pipe.recv()
            unset_hf_deepspeed_config()  # of the last script's ZeRO-3 engines
            pipe.send(_error_of(script, argv))


def _error_of(script: str, argv: list[str]) -> str | None:
    sys.argv = ["", *argv]
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except Exception:
        return traceback.format_exc()
    return None
