"""Check that Python starts with the environment variables of a config.

A variable such as PYTHONHOME ends every measuring process before its first line of code, so it is
reported before the first cell.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from orchestrator.execution.exit_diagnosis import last_words
from orchestrator.execution.program import PROGRAM, import_path
from tasks.spec.axes import leave_out

# Only the interpreter and the dynamic linker read these so early.
_PREFIXES = ("PYTHON", "LD_", "DYLD_")
_STARTED = "started"
_TIMEOUT_S = 60.0


def startup_problem(env: Mapping[str, str]) -> tuple[str | None, str] | None:
    """Return the variable with which no measuring process starts, and its last output.

    The variable is None if leaving out one of them does not help. None if a process starts.
    """
    names = [name for name in env if name.startswith(_PREFIXES)]
    problem = _problem(env) if names else None
    if problem is None:
        return None
    for name in names:
        if _problem(leave_out(env, {name})) is None:
            return name, problem
    return None, problem


def _problem(env: Mapping[str, str]) -> str | None:
    """Return what keeps the program of a measuring process from being imported, or None."""
    variables = {**os.environ, **env, "PYTHONPATH": import_path(env.get("PYTHONPATH"))}
    # A variable of the linker can also end the process with code 0.
    code = f"import tasks.__main__; print({_STARTED!r})"
    try:
        ended = subprocess.run(
            [*PROGRAM[:2], "-c", code],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # not known: the cells will tell
    if ended.stdout.split()[-1:] == [_STARTED.encode()]:
        return None
    return (
        last_words(ended.stderr.decode(errors="replace")) or f"its exit code is {ended.returncode}"
    )
