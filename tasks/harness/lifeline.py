"""A measuring process must not outlive what started it, however that died."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(pipe: int) -> None:
    """Ends this process's group when `pipe`, whose other end only the parent holds, reads end-of-file.

    The thread covers grandchildren and every way the parent can die; the kernel's death signal covers a process that
    is stopped or stuck in C and runs no thread. The one alone is not enough: the signal reaches this process only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_await_end_of_file, args=(pipe,), daemon=True, name="lifeline").start()


def _await_end_of_file(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)
