"""The cores, the niceness and the OOM score of a measuring process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def pin_to_cores(cores: Sequence[int] | None) -> dict[str, str | None]:
    """Restrict this process and its later children to these cores. Call it before threads start.

    Return the fact to record: the cores as text, or None if the process is not pinned.
    """
    pinned = None
    if cores and hasattr(os, "sched_setaffinity"):
        # A cell that is measured again by hand may run on a host without these cores.
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
            pinned = spans(sorted(os.sched_getaffinity(0)))
    return {"pinned_cores": pinned}


def reset_niceness() -> None:
    """Return this process to niceness 0 where that is allowed."""
    # Ray starts its workers at niceness 15 (RAY_worker_niceness), and children inherit it: steps
    # then wait for every other process of the host.
    if os.nice(0) > 0:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)


def prefer_for_oom_kill() -> None:
    """Make this process the first that the kernel kills when the host runs out of memory."""
    # Otherwise the kernel might kill the supervisor, or a cell that runs at the same time.
    with suppress(OSError):  # exists on Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")


def spans(cores: Sequence[int]) -> str:
    """Return ascending core numbers in the kernel's notation: `0-3,8`."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    texts = []
    for low, high in zip(starts, ends, strict=True):
        texts.append(f"{low}" if low == high else f"{low}-{high}")
    return ",".join(texts)
