"""A measuring process must not outlive what started it, however that died."""

from __future__ import annotations

import os
import signal

_MOST_DESCRIPTORS = 1024


def die_with_parent(pipe: int) -> None:
    """Ends this process's group when `pipe`, whose other end only the parent holds, reads end-of-file.

    A process of its own watches: unlike a thread it needs no interpreter lock and runs on while this one is stopped or
    stuck in C, and unlike the kernel's death signal it takes along whatever this one has started. To be called before
    there are threads.
    """
    if os.fork() == 0:
        os.closerange(
            0, pipe
        )  # or whoever is at their other ends would take this one for the process it watches
        os.closerange(pipe + 1, _MOST_DESCRIPTORS)
        while os.read(pipe, 1):
            pass
        os.killpg(0, signal.SIGKILL)
    os.close(pipe)
