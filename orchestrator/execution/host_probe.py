"""Asks a short-lived process what this host can measure, and whether it can measure at all.

The driver and the supervisors import no torch and use no GPU, so that a broken installation or a
hung GPU ends a probe and not the sweep.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from orchestrator.common.errors import LIMIT_REMEDIES, PlatformError
from orchestrator.common.limits import limit_error
from orchestrator.execution.fork_client import ForkServer, ForkServerLost
from orchestrator.execution.program import GPU_ORDER, PROGRAM, import_path, lifeline
from orchestrator.hardware.host import HostInfo
from tasks.process.fork_server import READ_LATE
from tasks.spec.attempt import PREPARATION_S
from tasks.spec.axes import select
from tasks.spec.messages import error_text

TIMEOUT_S = 120
_OF_TORCH = ("TORCH", "PYTORCH", "CUDA", "TRITON", "OMP", "MKL", "KMP", "LD_PRELOAD")
# Kineto only logs that CUPTI refused to work. No function of torch reports it.
_CUPTI_ERROR = re.compile(r"failed with error (CUPTI_ERROR_\w+)")


def gpu_failure(gpu: str) -> str | None:
    """Return why a new process cannot compute on this GPU, or None if it can.

    Args:
        gpu: its name as in CUDA_VISIBLE_DEVICES.
    """
    return _failure(["--compute", "cuda"], {"CUDA_VISIBLE_DEVICES": gpu})


def profiler_failure() -> str | None:
    """Return why the profiler sees no kernels of the GPU, or None if it sees them.

    Where CUPTI named an error, that is the reason.
    """
    return _failure(["--compute", "cuda", "--profiled"], {})


def host_failure(folder: Path) -> str | None:
    """Return why a new process cannot do what every cell does, or None if it can.

    It imports torch and writes next to this folder. It has two tries: one process may have been
    killed for want of memory, or may be late because other cells start.
    """
    words = ["--compute", "cpu", "--write-test", str(folder.parent)]
    if _failure(words, {}) is None:
        return None
    return _failure(words, {})


def _failure(words: Sequence[str], variables: Mapping[str, str]) -> str | None:
    try:
        done = _run(words, variables)
    except subprocess.TimeoutExpired:
        return f"nothing is computed on it in {TIMEOUT_S} s"
    except OSError as error:
        return f"no process could be started: {error.strerror}"
    if done.returncode == 0:
        return None
    cupti_error = _CUPTI_ERROR.search(done.stderr)
    if cupti_error:
        return cupti_error[1]
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def probe_here(server: ForkServer | None = None) -> HostInfo:
    """Return what this host can measure on. Raises PlatformError if torch does not work.

    server: a fork server of this host, so that torch is not imported for the probe alone.
    """
    if server is not None:
        # If it fails, the new process reports what is wrong.
        with (
            suppress(ForkServerLost, OSError),
            closing(server.ask("probe", select(os.environ, READ_LATE))) as probing,
        ):
            return HostInfo.from_probe(dict(probing.receive(PREPARATION_S)))
    return HostInfo.from_probe(_run_for_json(["--probe"]))


def dispatch_rates(seconds: float) -> Sequence[float]:
    """Return how many small operations per ms this host dispatches, measured repeatedly.

    Raises PlatformError.
    """
    rates: list[float] = _run_for_json(["--dispatch-rates", str(seconds)])
    return rates


def _run_for_json(words: Sequence[str]) -> Any:
    try:
        done = _run(words, {})
        done.check_returncode()
        # torch may print warnings before the answer.
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        message = f"torch was not imported here within {TIMEOUT_S} s"
        raise PlatformError(message, "See `sweep doctor`, or run again") from error
    except OSError as error:
        message = f"no process could be started here: {error.strerror}"
        remedy = LIMIT_REMEDIES.get(error.errno or 0, "See `ulimit -a`")
        raise PlatformError(message, remedy) from error
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        output = getattr(error, "stderr", None) or error_text(error)
        if at_limit := limit_error(output):
            raise PlatformError(at_limit.message, at_limit.remedy) from error
        raise _refusal_of_torch(output.strip().splitlines()) from error


def _refusal_of_torch(output: Sequence[str]) -> PlatformError:
    """Return the error of an import of torch that failed. output: what it printed."""
    # Torch refuses some values of its variables, and lists others after the line that says so.
    for name, value in os.environ.items():
        if name.startswith(_OF_TORCH) and any(name in line for line in output):
            reason = next((line for line in output if value in line), output[-1])
            message = f"torch does not work here with {name}={value}: {reason}"
            return PlatformError(message, f"Unset {name}, or correct it")
    return PlatformError(f"torch does not work here: {output[-1]}", "See `sweep doctor`")


def _run(words: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    with lifeline() as end:
        return subprocess.run(
            [*PROGRAM, *words, "--lifeline", str(end)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, **GPU_ORDER, "PYTHONPATH": import_path(), **variables},
            pass_fds=[end],
            start_new_session=True,
        )
