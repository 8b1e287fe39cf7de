"""Where a measuring process runs among the others of its host, before whom, and who goes first where memory ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def pin(cores: Sequence[int] | None) -> dict[str, Any]:
    """Keeps this process, and what it will start, to these cores. To be called before there are threads.

    Gives what the row says: the cores, or null where it may use all, or where these are not here, as by hand on another host.
    """
    pinned = None
    if cores and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
            pinned = spans(sorted(os.sched_getaffinity(0)))
    return {"pinned_cores": pinned}


def come_first() -> None:
    """Takes back what makes this process wait for others, where that is allowed. Ray's workers are at niceness 15 by default."""
    if os.nice(0) > 0:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)


def go_first() -> None:
    """Where the host's memory ends, this process is what the kernel kills, and not what watches over it or waits beside it."""
    with suppress(OSError):  # Linux alone knows such a thing
        Path("/proc/self/oom_score_adj").write_text("1000")


def spans(cores: Sequence[int]) -> str:
    """Ascending cores as the kernel writes them: `0-3,8`."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(
        f"{low}-{high}" if low != high else f"{low}" for low, high in zip(starts, ends, strict=True)
    )
