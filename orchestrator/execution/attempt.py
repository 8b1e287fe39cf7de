"""One attempt: a child process, watched until it ends, and how it ended. No Ray here: a scheduler calls `execute`."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from orchestrator.execution import nsys
from orchestrator.execution import oom_killer as kernel
from orchestrator.execution.child_log import free_middle, remove_middle, tail
from orchestrator.execution.child_process import CHILD_STARTER, Child
from orchestrator.execution.fork_server import ForkServerLost, ForkServerTemplate
from orchestrator.execution.measuring_process import PROGRAM, import_path
from tasks.process.journal import FinalStatus, JournalContents, read_journal
from tasks.process.phase_file import read_phase
from tasks.spec.attempt import (
    ATTEMPT_FILE,
    BEFORE_ITS_TASK,
    JOURNAL_FILE,
    LOG_FILE,
    PHASE_FILE,
    PREPARATION_S,
    RERUN_FILE,
    Attempt,
)
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

_TICK_S = 0.2
_LOG_TAIL_BYTES = 4000
_GIB = 1024**3
_NO_THREAD = "libgomp: Thread creation failed: Resource temporarily unavailable"  # its last words, and then it exits

# Freed memory is kept by the process instead of being given back and faulted in again, page by page, at each step:
# without these a CPU step takes up to three times as long, and most of that is the kernel's work.
CPU_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(64 * _GIB),
    "MALLOC_TOP_PAD_": str(64 * 1024**2),
}


@dataclass(frozen=True)
class ProcessExit:
    """How the child's process ended, as its parent saw it. timed_out: what it was not after how long."""

    code: int
    wall_s: float
    timed_out: tuple[str, float] | None = None
    over_memory_bytes: int | None = None
    kernel_oom_kills: int = 0
    kernel_log: tuple[str, ...] = ()
    log_left_out_bytes: int = 0


def execute(attempt: Attempt, environment: Mapping[str, str] | None = None) -> Outcome:
    """Measures one cell in a process of its own and says how that ended, whatever happened.

    environment: variables of the child beyond this process's own, such as its share of the cores.
    """
    attempt = _in_environment(attempt, environment or {})
    attempt.path.mkdir(parents=True, exist_ok=True)
    (attempt.path / ATTEMPT_FILE).write_text(attempt.to_json())
    write_rerun_script(attempt)
    variables = child_environment(attempt)
    CHILD_STARTER.prepare(attempt, variables)
    started_at, began = time.time(), time.monotonic()
    try:
        return nsys.with_kernels(build_outcome(attempt, _watch(attempt, variables), started_at))
    except ForkServerLost as error:
        CHILD_STARTER.close()
        wall_s = time.monotonic() - began
        return recover(attempt) or lost_outcome(
            attempt, f"the process it was forked from went away: {error}", wall_s
        )
    finally:
        if _is_cold(attempt):
            shutil.rmtree(_own_cache(attempt), ignore_errors=True)


def prepare(attempt: Attempt, environment: Mapping[str, str]) -> None:
    """Has the process ready that attempts like this one are forked from. Leaves nothing in a folder."""
    attempt = _in_environment(attempt, environment)
    CHILD_STARTER.prepare(attempt, child_environment(attempt))


def start_fork_template(
    folder: Path, attempt: Attempt, environment: Mapping[str, str], mark: Mapping[str, str]
) -> ForkServerTemplate:
    """Of the processes that attempts like this one are forked from. mark: what its environment says of whose it is."""
    attempt = _in_environment(attempt, environment)
    params = attempt.cell.params
    return ForkServerTemplate(
        folder, params.device, child_environment(attempt), params.compiled, mark
    )


def _in_environment(attempt: Attempt, environment: Mapping[str, str]) -> Attempt:
    return replace(
        attempt, settings=replace(attempt.settings, env={**environment, **attempt.settings.env})
    )


def child_environment(attempt: Attempt) -> dict[str, str]:
    """What must be set before torch is imported. The config's own variables win, but where a cell wants a cold cache, and where
    they would have another program measure."""
    own = dict(attempt.settings.env)
    variables = {
        "PYTHONPATH": import_path(own.pop("PYTHONPATH", None)),
        "KINETO_LOG_LEVEL": "99",
        "TORCHINDUCTOR_CACHE_DIR": str(attempt.path.parent.parent.parent / "cache" / "inductor"),
    }
    on_cpu = CPU_ALLOCATOR if attempt.cell.params.device == "cpu" else {}
    return {**variables, **on_cpu, **own, **(_cold_caches(attempt) if _is_cold(attempt) else {})}


def _own_cache(attempt: Attempt) -> Path:
    """Of a cell that compiles as if for the first time: for this attempt alone, and removed behind it."""
    return attempt.path / "cache"


def _cold_caches(attempt: Attempt) -> dict[str, str]:
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(_own_cache(attempt) / "inductor"),
        "TRITON_CACHE_DIR": str(_own_cache(attempt) / "triton"),
    }


def _is_cold(attempt: Attempt) -> bool:
    return attempt.cell.params.values().get("compile_cache") == "cold"


def rerun_command(attempt: Attempt) -> str:
    """The command that measures the same cell again, in the open."""
    variables = child_environment(attempt)
    return shlex.join(
        [
            "env",
            *(f"{name}={value}" for name, value in variables.items()),
            *PROGRAM,
            str(attempt.path / ATTEMPT_FILE),
        ]
    )


def write_rerun_script(attempt: Attempt) -> None:
    """Write the command that measures the cell again into the attempt's folder, for people."""
    (attempt.path / RERUN_FILE).write_text(f"{rerun_command(attempt)}\n")


def recover(attempt: Attempt) -> Outcome | None:
    """The outcome of an attempt whose driver died before it could keep it; None if it never came to an end."""
    account = read_journal(attempt.path / JOURNAL_FILE)
    if account.final is None:
        return None
    ended = ProcessExit(
        0, account.wall_s, log_left_out_bytes=remove_middle(attempt.path / LOG_FILE)
    )
    return nsys.with_kernels(build_outcome(attempt, ended, account.started_at))


def build_outcome(attempt: Attempt, ended: ProcessExit, started_at: float) -> Outcome:
    """The child's own word where it left one; its parent's reading of how it died where it did not."""
    account = read_journal(attempt.path / JOURNAL_FILE)
    ending = account.final or _post_mortem(attempt, ended)
    if ending.status is Status.OK and not account.samples:
        ending = FinalStatus(
            Status.FAILED,
            {"message": "it ended well, yet measured nothing: no instrument gave a sample"},
        )
    evidence = dict(ending.evidence)
    if ending.status not in (Status.OK, Status.SKIPPED):
        evidence["log_tail"] = tail(attempt.path / LOG_FILE, _LOG_TAIL_BYTES)
        evidence |= {"kernel_log": list(ended.kernel_log)} if ended.kernel_log else {}
    facts = {**account.facts, **_seconds(account, ended)}
    facts |= {"log_left_out_bytes": ended.log_left_out_bytes} if ended.log_left_out_bytes else {}
    return Outcome(
        attempt=attempt,
        status=ending.status,
        stage="" if ending.status is Status.OK else account.stage,
        phase="" if ending.status is Status.OK else read_phase(attempt.path / PHASE_FILE),
        evidence=evidence,
        facts=facts,
        samples=account.samples,
        started_at=started_at,
        wall_s=ended.wall_s,
        kernels=account.kernels,
        allocations=account.allocations,
        live=account.live,
    )


def _seconds(account: JournalContents, ended: ProcessExit) -> dict[str, Any]:
    """What the attempt took, by stage, and as `process` how its process came and went. One that left no last word was in its last
    stage until its end."""
    if not account.stage:
        return {}
    rest_s, rest = (
        ended.wall_s - sum(account.stage_s.values()),
        "process" if account.final else account.stage,
    )
    return {"stage_s": {**account.stage_s, rest: account.stage_s.get(rest, 0.0) + rest_s}}


def lost_outcome(attempt: Attempt, reason: str, wall_s: float) -> Outcome:
    """For an attempt of which nobody can tell any more how it ended."""
    return Outcome(
        attempt, Status.LOST, "", "", {"message": reason}, {}, (), time.time() - wall_s, wall_s
    )


def _watch(attempt: Attempt, variables: Mapping[str, str]) -> ProcessExit:
    """Raises ForkServerLost."""
    settings, began = attempt.settings, time.monotonic()
    over, log = None, attempt.path / LOG_FILE
    left_out, limit = 0, _Limit(attempt)
    with kernel.OomKillerWatch() as watch:
        with _child_of(attempt, variables) as child:
            while not child.ended(_TICK_S):
                timed_out = limit.passed()
                over = _over_memory(child.pid, settings.host_memory_gib)
                left_out += free_middle(log)
                if timed_out or over:
                    break
            else:
                timed_out, over = None, None
        wall, kills, said = time.monotonic() - began, watch.oom_kills(), watch.said()
    return ProcessExit(
        child.exit_code(), wall, timed_out, over, kills, said, left_out + remove_middle(log)
    )


class _Limit:
    """An attempt's time is its own from when its task begins. Its process has a limit of its own to come so far."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._since = time.monotonic()
        self._has_begun = False

    def passed(self) -> tuple[str, float] | None:
        """What the attempt was to be before which of them."""
        if (
            not self._has_begun
            and read_journal(self._attempt.path / JOURNAL_FILE).stage not in BEFORE_ITS_TASK
        ):
            self._has_begun, self._since = True, time.monotonic()
        what = (
            ("done", self._attempt.settings.timeout_s)
            if self._has_begun
            else ("ready to begin", PREPARATION_S)
        )
        return what if time.monotonic() - self._since > what[1] else None


@contextmanager
def _child_of(attempt: Attempt, variables: Mapping[str, str]) -> Iterator[Child]:
    """The child, at the end of a lifeline: when we let that go, or die, it ends, and with it whatever it started."""
    theirs, ours = os.pipe()
    try:
        try:
            child = CHILD_STARTER.start(attempt, variables, theirs)
        finally:
            os.close(theirs)
        try:
            yield child
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.exit_code()
    finally:
        os.close(ours)


def _post_mortem(attempt: Attempt, ended: ProcessExit) -> FinalStatus:
    """What killed a child that left no last word."""
    if ended.timed_out:
        what, limit = ended.timed_out
        return FinalStatus(
            Status.TIMEOUT, {"message": f"not {what} after {limit:g} s", "timeout_s": limit}
        )
    if ended.over_memory_bytes is not None:
        message = f"its resident set passed host_memory_gib: {attempt.settings.host_memory_gib}"
        return FinalStatus(
            Status.HOST_OOM, {"message": message, "rss_bytes": ended.over_memory_bytes}
        )
    if ended.code < 0:
        name = _signal_name(-ended.code)
        if name == "SIGKILL" and ended.kernel_oom_kills:
            message = "killed by the kernel for want of host memory"
            return FinalStatus(
                Status.HOST_OOM,
                {"message": message, "signal": name, "oom_kills": ended.kernel_oom_kills},
            )
        return FinalStatus(Status.CRASHED, {"message": f"killed by {name}", "signal": name})
    if attempt.cell.params.caps_host and _NO_THREAD in tail(
        attempt.path / LOG_FILE, _LOG_TAIL_BYTES
    ):
        return FinalStatus(
            Status.OOM,
            {"message": f"{_NO_THREAD}: its stack is within the cap", "exit_code": ended.code},
        )
    return FinalStatus(
        Status.CRASHED,
        {"message": f"exited with code {ended.code} without a word", "exit_code": ended.code},
    )


def _signal_name(number: int) -> str:
    """Those for real time have none of their own, and two of those are the C library's."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return (
            f"SIGRTMIN+{number - signal.SIGRTMIN}"
            if number > signal.SIGRTMIN
            else f"signal {number}"
        )


def _over_memory(pid: int, limit_gib: float | None) -> int | None:
    """The child's resident set where it is over the limit. It is the largest of all that it started, or that started it."""
    if limit_gib is None:
        return None
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        held = max(one.memory_info().rss for one in (process, *process.children(recursive=True)))
        return held if held > limit_gib * _GIB else None
    return None
