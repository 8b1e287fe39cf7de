"""Starts processes of our own program, `python -m tasks …`, which does everything that needs torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from orchestrator.common.provenance import SOURCE_ROOT
from tasks.spec.source_digest import is_clone

# -P: a `model.py` or `tasks.py` in the current folder must not be imported instead of ours.
PROGRAM = (sys.executable, "-P", "-m", "tasks")
# NVML and Ray number the GPUs of a host by their place on the bus. CUDA does so with this variable
# only, and otherwise by speed.
GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def import_path(others: str | None = None) -> str:
    """Return a PYTHONPATH with our packages first, wherever the process is started.

    Args:
        others: what comes after them; by default this process's own PYTHONPATH.
    """
    if others is None:
        others = os.environ.get("PYTHONPATH")
    # A PYTHONPATH that has our packages already would name them twice in every command.
    names = [str(SOURCE_ROOT)]
    if others:
        names += others.split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(names))


def search_path(folders: Sequence[str], variable: str | None = None) -> list[str]:
    """Return the folders in which `python -m tasks` looks for a user's modules, in this order.

    Args:
        folders: those with the user's models, which come last.
        variable: the PYTHONPATH of that process; by default that of this one.
    """
    if variable is None:
        variable = os.environ.get("PYTHONPATH", "")
    # With -P, that process does not look in the current folder first.
    only_here = ("", os.getcwd())
    names = [*filter(None, variable.split(os.pathsep))]
    names += [name for name in sys.path if name not in only_here]
    names = [name for name in names if not is_clone(name)]
    return list(dict.fromkeys([*names, *folders]))


class ProcessNotStarted(OSError):
    """An error of the system that is about processes, and not about the files of an attempt."""


@contextmanager
def lifeline() -> Iterator[int]:
    """Yield the end of a pipe for a process that must end with the block or with this process."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def start_process(
    words: Sequence[str], environment: Mapping[str, str], output: int, passed: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start `python -m tasks` with these arguments in a new session. Raises ProcessNotStarted.

    Args:
        output: the file descriptor of its stdout and stderr.
        passed: file descriptors that it inherits.
    """
    try:
        return subprocess.Popen(
            [*PROGRAM, *words],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            # A terminal's Ctrl-C must not reach cells: the driver decides what happens to them.
            start_new_session=True,
        )
    except OSError as error:
        raise ProcessNotStarted(error.errno, error.strerror) from error
