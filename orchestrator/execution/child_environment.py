"""Environment variables of the measuring process, and the command that measures a cell again."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from orchestrator.common.units import MIB
from orchestrator.execution.program import GPU_ORDER, PROGRAM, import_path
from tasks.spec.attempt import ATTEMPT_FILE, RERUN_FILE, Attempt
from tasks.spec.messages import assignments

# glibc returns freed memory to the kernel, which then zeroes every page again in the next step.
# With these variables and a padding of 256 MiB, the forward pass, the backward pass and the
# optimizer of a training step on the CPU took 705, 1441 and 464 ms; without them, 2703, 3706 and
# 900 ms.
CPU_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024 * MIB),
    "MALLOC_TOP_PAD_": str(64 * MIB),
}

# A variable with the folder of compiled code that several runs share. Each run has its own otherwise.
SHARED_CACHE = "SWEEP_COMPILER_CACHE"


def child_environment(attempt: Attempt) -> dict[str, str]:
    """Return the variables that must be set before the measuring process imports torch.

    Variables of the config win, except that a cell with a cold compile cache always gets its own
    cache, and that our packages always come first in PYTHONPATH.
    """
    configured = dict(attempt.settings.env)
    compiled = attempt.path.parents[2] / "cache" / "inductor"
    variables = {
        "PYTHONPATH": import_path(configured.pop("PYTHONPATH", None)),
        # Kineto prints its progress to stderr otherwise.
        "KINETO_LOG_LEVEL": "99",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get(SHARED_CACHE, str(compiled)),
        **GPU_ORDER,
    }
    if attempt.cell.params.device == "cpu":
        variables |= CPU_ALLOCATOR
    variables |= configured
    if cache := cold_cache(attempt):
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
        variables["TRITON_CACHE_DIR"] = str(cache / "triton")
    return variables


def cold_cache(attempt: Attempt) -> Path | None:
    """Return the compile cache of a cell that compiles as if for the first time, to remove later."""
    is_cold = attempt.cell.params.values().get("compile_cache") == "cold"
    return attempt.path / "cache" if is_cold else None


def write_rerun_script(attempt: Attempt) -> None:
    """Write into the attempt's folder a command that measures the cell again, for people.

    It prints to the terminal.
    """
    variables = assignments(child_environment(attempt))
    program: tuple[str, ...] = PROGRAM
    ranks = attempt.cell.params.ranks
    if ranks > 1:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        program = (*PROGRAM[:-2], *torchrun, *PROGRAM[-2:])
    command = shlex.join(["env", *variables, *program, str(attempt.path / ATTEMPT_FILE)])
    (attempt.path / RERUN_FILE).write_text(f"{command}\n")
