"""What a host can measure on, and whether it can, asked of a short-lived process: this one must neither import torch nor touch
a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.common.errors import PlatformError
from orchestrator.execution.measuring_process import PROGRAM, import_path, lifeline
from orchestrator.hardware.host import HostInfo

TIMEOUT_S = 120
_REFUSED = re.compile(
    r"failed with error (CUPTI_ERROR_\w+)"
)  # so says Kineto in the log, which no program is told


def gpu_failure(gpu: str) -> str | None:
    """What a fresh process has to say that cannot compute on this GPU, by its name in CUDA_VISIBLE_DEVICES; None where it can."""
    return _why_not(["--compute", "cuda"], {"CUDA_VISIBLE_DEVICES": gpu})


def profiler_failure() -> str | None:
    """What a fresh process has to say in which the profiler sees nothing of what the GPU does: CUPTI's own error, where it named
    one. None where it sees its kernels."""
    return _why_not(["--compute", "cuda", "--profiled"], {})


def host_failure(folder: Path) -> str | None:
    """What a fresh process has to say that cannot do what every cell does: have torch, and write beside this folder.

    Twice: one alone may have been killed for want of memory, or be late beside others.
    """
    words = ["--compute", "cpu", "--write-test", str(folder.parent)]
    return _why_not(words, {}) and _why_not(words, {})


def _why_not(words: Sequence[str], variables: Mapping[str, str]) -> str | None:
    try:
        done = _ask(words, variables)
    except subprocess.TimeoutExpired:
        return f"nothing is computed on it in {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    refused = _REFUSED.search(done.stderr)
    return (
        refused[1]
        if refused
        else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    )


def probe_here() -> HostInfo:
    """Probe this host. Raises PlatformError where torch itself does not work."""
    return HostInfo.from_probe(_told(["--probe"]))


def dispatch_rates(seconds: float) -> Sequence[float]:
    """How many small operations a ms this host hands to torch, read again and again for so long. Raises PlatformError."""
    read: list[float] = _told(["--dispatch-rates", str(seconds)])
    return read


def _told(words: Sequence[str]) -> Any:
    try:
        done = _ask(words, {})
        done.check_returncode()
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise PlatformError(
            f"torch was not imported here within {TIMEOUT_S} s", "See `sweep doctor`, or run again"
        ) from error
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise PlatformError(
            f"torch does not work here: {said.strip().splitlines()[-1]}", "See `sweep doctor`"
        ) from error


def _ask(words: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What a process of ours says, which ends with this one. Raises TimeoutExpired."""
    environment = {**os.environ, "PYTHONPATH": import_path(), **variables}
    with lifeline() as end:
        return subprocess.run(
            [*PROGRAM, *words, "--lifeline", str(end)],
            capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, pass_fds=[end], start_new_session=True,
        )  # fmt: skip
