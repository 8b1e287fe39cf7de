"""Turns the end of a measuring process into an outcome.

A process that finishes writes its status as the last line of its journal. For a process that died
first, the status follows from what its parent saw: the limit it exceeded, the signal, the kernel's
out-of-memory killer, or the exit code.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from orchestrator.execution import nsys
from orchestrator.execution.rank_group import (
    blame,
    find_cause,
    group_samples,
    rank_rows,
    skew_facts,
)
from tasks.process.journal import FinalStatus, JournalContents, read_journal
from tasks.process.log_file import tail
from tasks.process.minder import RankExits
from tasks.process.phase_file import read_phase
from tasks.spec.attempt import JOURNAL_FILE, LOG_FILE, PHASE_FILE, Attempt, rank_file
from tasks.spec.messages import escape_controls, shorten
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

_LOG_TAIL_BYTES = 4000
_LONGEST_LINE = 120  # characters
# GNU OpenMP prints this and exits with code 1 if a thread's stack does not fit below RLIMIT_AS.
_NO_THREAD = "libgomp: Thread creation failed: Resource temporarily unavailable"


@dataclass(frozen=True)
class ProcessExit:
    """The end of the measuring processes, as their minder and the kernel report it.

    Args:
        kernel_log: lines of the kernel about memory and GPUs.
    """

    ranks: RankExits
    wall_s: float
    kernel_oom_kills: int = 0
    kernel_log: tuple[str, ...] = ()


def build_outcome(attempt: Attempt, ended: ProcessExit, started_at: float) -> Outcome:
    """Return the outcome that the journals report, or the one that the end of a process implies."""
    count = attempt.cell.params.ranks
    journals = [read_journal(rank_file(attempt.path / JOURNAL_FILE, rank)) for rank in range(count)]
    rank = find_cause(journals, ended.ranks) if count > 1 else 0
    final = journals[rank].final or _diagnose(attempt, ended, rank)
    if final.status is Status.OK and not journals[rank].samples:
        message = "it ended well, yet measured nothing: no instrument gave a sample"
        final = FinalStatus(Status.FAILED, {"message": message})
    if count > 1 and final.status is not Status.OK:
        rank, final = blame(attempt, rank, final, ended.wall_s)
    evidence = dict(final.evidence)
    if final.status not in (Status.OK, Status.SKIPPED):
        evidence["log_tail"] = tail(rank_file(attempt.path / LOG_FILE, rank), _LOG_TAIL_BYTES)
        if ended.kernel_log:
            evidence["kernel_log"] = list(ended.kernel_log)
    stage = phase = ""
    if final.status is not Status.OK:
        stage = journals[rank].stage
        phase = read_phase(rank_file(attempt.path / PHASE_FILE, rank))
    first = journals[0]
    outcome = Outcome(
        attempt=attempt,
        status=final.status,
        stage=stage,
        phase=phase,
        evidence=evidence,
        facts=_facts(first, ended) | (skew_facts(journals) if count > 1 else {}),
        samples=group_samples([one.samples for one in journals]),
        started_at=started_at,
        wall_s=ended.wall_s,
        kernels=first.kernels,
        allocations=first.allocations,
        live=first.live,
        ranks=rank_rows(journals) if count > 1 else (),
    )
    is_traced = nsys.INSTRUMENT in attempt.settings.instruments
    return nsys.with_kernels(outcome) if is_traced else outcome


def lost_outcome(attempt: Attempt, reason: str, wall_s: float) -> Outcome:
    """Return the outcome of an attempt whose end nobody saw."""
    started_at = time.time() - wall_s
    # A path in it may have bytes that are not UTF-8, which no table holds.
    evidence = {"message": escape_controls(reason)}
    return Outcome(attempt, Status.LOST, "", "", evidence, {}, (), started_at, wall_s)


def _facts(journal: JournalContents, ended: ProcessExit) -> dict[str, object]:
    facts = dict(journal.facts)
    if journal.stage:
        # The rest is what starting and ending the process took. A process without a final line was
        # in its last stage until its end.
        rest = "process" if journal.final else journal.stage
        rest_s = ended.wall_s - sum(journal.stage_s.values())
        facts["stage_s"] = {**journal.stage_s, rest: journal.stage_s.get(rest, 0.0) + rest_s}
    if ended.ranks.log_left_out_bytes:
        facts["log_left_out_bytes"] = ended.ranks.log_left_out_bytes
    return facts


def _diagnose(attempt: Attempt, ended: ProcessExit, rank: int) -> FinalStatus:
    ranks, code = ended.ranks, ended.ranks.codes[rank]
    if ranks.missing:
        names = ", ".join(map(str, ranks.missing))
        message = f"rank {names} did not arrive at {ranks.place} within {ranks.limit_s:g} s"
        return FinalStatus(Status.TIMEOUT, {"message": message, "collective": ranks.place})
    if ranks.late:
        message = f"not {ranks.late} after {ranks.limit_s:g} s"
        return FinalStatus(Status.TIMEOUT, {"message": message, "timeout_s": ranks.limit_s})
    if ranks.over_memory_bytes is not None:
        message = f"its resident set passed host_memory_gib: {attempt.settings.host_memory_gib}"
        evidence = {"message": message, "rss_bytes": ranks.over_memory_bytes}
        return FinalStatus(Status.HOST_OOM, evidence)
    if code < 0:
        return _killed(signal_name(-code), ended.kernel_oom_kills)
    log_end = tail(rank_file(attempt.path / LOG_FILE, rank), _LOG_TAIL_BYTES)
    if attempt.cell.params.caps_host and _NO_THREAD in log_end:
        message = f"{_NO_THREAD}: its stack is within the cap"
        return FinalStatus(Status.OOM, {"message": message, "exit_code": code})
    words = last_words(log_end)
    end = f"; its last output: {words}" if words else " without a word"
    message = f"exited with code {code}{end}"
    return FinalStatus(Status.CRASHED, {"message": message, "exit_code": code})


def last_words(output: str) -> str:
    """Return the line of a process's output that explains its end best, or an empty text."""
    lines = [line for line in output.splitlines() if line.strip()]
    # The interpreter prints the state of its threads after the reason.
    fatal = [line for line in lines if line.startswith("Fatal Python error: ")]
    return shorten((fatal or lines or [""])[-1].strip(), _LONGEST_LINE)


def _killed(name: str, oom_kills: int) -> FinalStatus:
    # The kernel's out-of-memory killer and anybody else send the same SIGKILL.
    if name == "SIGKILL" and oom_kills:
        message = "killed by the kernel for want of host memory"
        evidence = {"message": message, "signal": name, "oom_kills": oom_kills}
        return FinalStatus(Status.HOST_OOM, evidence)
    return FinalStatus(Status.CRASHED, {"message": f"killed by {name}", "signal": name})


def signal_name(number: int) -> str:
    """Return a signal's name. Real-time signals have no names in Python.

    The C library uses the first two of them itself, so they are below SIGRTMIN.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        if number > signal.SIGRTMIN:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"
