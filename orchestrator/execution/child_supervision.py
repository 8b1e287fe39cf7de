"""Executes one attempt: starts a measuring process, enforces its limits, and returns its outcome.

It runs wherever the scheduler supervises the attempt: in a Ray worker or in the driver.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from orchestrator.execution import nsys
from orchestrator.execution.child_environment import (
    child_environment,
    remove_cold_cache,
    write_rerun_script,
)
from orchestrator.execution.child_log import free_middle, remove_middle
from orchestrator.execution.child_process import CHILD_STARTER, Child
from orchestrator.execution.exit_diagnosis import ProcessExit, build_outcome, lost_outcome
from orchestrator.execution.fork_client import ForkServerLost, ForkServerTemplate
from orchestrator.execution.limits import Timeout, bytes_over_limit
from orchestrator.execution.measuring_process import lifeline
from orchestrator.execution.oom_killer import OomKillerWatch
from tasks.process.journal import read_journal
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, Attempt
from tasks.spec.outcome import Outcome

# How late an exceeded limit may be noticed. The measuring process is not polled more often, because
# looking at it takes time on a core that may be its own.
_TICK_S = 0.2


def execute(attempt: Attempt, environment: Mapping[str, str] | None = None) -> Outcome:
    """Measure one cell in a separate process and return its outcome, whatever happens to it.

    Args:
        environment: more variables for the measuring process, such as its number of threads.
    """
    attempt = _with_environment(attempt, environment or {})
    attempt.path.mkdir(parents=True, exist_ok=True)
    (attempt.path / ATTEMPT_FILE).write_text(attempt.to_json())
    write_rerun_script(attempt)
    variables = child_environment(attempt)
    CHILD_STARTER.prepare(attempt, variables)
    started_at, began = time.time(), time.monotonic()
    try:
        ended = _supervise_child(attempt, variables)
        return nsys.with_kernels(build_outcome(attempt, ended, started_at))
    except ForkServerLost as error:
        CHILD_STARTER.close()
        wall_s = time.monotonic() - began
        reason = f"the process it was forked from went away: {error}"
        return recover(attempt) or lost_outcome(attempt, reason, wall_s)
    finally:
        remove_cold_cache(attempt)


def prepare(attempt: Attempt, environment: Mapping[str, str]) -> None:
    """Start the fork server for attempts like this one. Nothing is written to a folder."""
    CHILD_STARTER.prepare(attempt, child_environment(_with_environment(attempt, environment)))


def begin_to_prepare(attempt: Attempt, environment: Mapping[str, str]) -> None:
    """Start what `prepare` waits for."""
    own = child_environment(_with_environment(attempt, environment))
    CHILD_STARTER.begin_to_prepare(attempt, own)


def start_fork_template(
    folder: Path, attempt: Attempt, environment: Mapping[str, str], tag: Mapping[str, str]
) -> ForkServerTemplate:
    """Start the template of the fork servers for attempts like this one.

    Args:
        folder: where its socket lies.
        tag: variables that identify the sweep it belongs to.
    """
    params = attempt.cell.params
    variables = child_environment(_with_environment(attempt, environment))
    return ForkServerTemplate(folder, params.device, variables, params.compiled, tag)


def _with_environment(attempt: Attempt, environment: Mapping[str, str]) -> Attempt:
    env = {**environment, **attempt.settings.env}
    return replace(attempt, settings=replace(attempt.settings, env=env))


def recover(attempt: Attempt) -> Outcome | None:
    """Return the outcome of an attempt that ended after its driver had died, or None.

    The last line of the journal is the commit point: an attempt that wrote it is a result, even if
    the driver was killed before it could store the row.
    """
    journal = read_journal(attempt.path / JOURNAL_FILE)
    if journal.final is None:
        return None
    left_out = remove_middle(attempt.path / LOG_FILE)
    ended = ProcessExit(code=0, wall_s=journal.wall_s, log_left_out_bytes=left_out)
    return nsys.with_kernels(build_outcome(attempt, ended, journal.started_at))


def _supervise_child(attempt: Attempt, variables: Mapping[str, str]) -> ProcessExit:
    began = time.monotonic()
    log, limit = attempt.path / LOG_FILE, Timeout(attempt)
    timed_out, over_memory, left_out = None, None, 0
    with OomKillerWatch() as watch:
        with _child_of(attempt, variables) as child:
            while not child.ended(_TICK_S):
                timed_out = limit.exceeded()
                over_memory = bytes_over_limit(child.pid, attempt.settings.host_memory_gib)
                left_out += free_middle(log)
                if timed_out or over_memory:
                    break
        wall_s, oom_kills, kernel_log = time.monotonic() - began, watch.oom_kills(), watch.lines()
    return ProcessExit(
        code=child.exit_code(),
        wall_s=wall_s,
        timed_out=timed_out,
        over_memory_bytes=over_memory,
        kernel_oom_kills=oom_kills,
        kernel_log=kernel_log,
        log_left_out_bytes=left_out + remove_middle(log),
    )


@contextmanager
def _child_of(attempt: Attempt, variables: Mapping[str, str]) -> Iterator[Child]:
    # The child also dies when this process does: it holds the other end of the lifeline.
    with lifeline() as end:
        child = CHILD_STARTER.start(attempt, variables, end)
        try:
            yield child
        finally:
            # macOS raises PermissionError for a group of zombies.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.exit_code()
