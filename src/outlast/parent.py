"""A child that never outlives its parent, however the parent ends.

Imports no torch.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends.

    The signal is tied to the *thread* that made this process: make it from a main thread.

    Args:
        parent: process id of the parent, from before this process was made. If it is gone already, this
            process ends here: the kernel tells only of deaths that are still to come.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)
