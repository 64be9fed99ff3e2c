"""Processes that end with the one that started them."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Ends this process when the one that started it (process id ``parent``) ends for any reason (Linux).

    To the kernel, the parent is the THREAD that started it: keep that thread alive as long as its process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
