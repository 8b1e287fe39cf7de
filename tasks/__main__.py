"""The measuring process: `python -m tasks ATTEMPT.json` measures one cell and writes its journal.

Without `--journal` the journal is printed, which is how a cell is measured again by hand. With one
of the other options the process does what the orchestrator needs torch for: it answers what this
host can measure on, or it forks the processes that do (see `tasks/process/fork_server.py`).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from tasks.process.cpu_affinity import pin_to_cores, prefer_for_oom_kill, reset_niceness
from tasks.process.flight_record import answer_signal, record_flight
from tasks.process.journal import FinalStatus, Journal
from tasks.process.lifeline import die_with_parent
from tasks.process.minder import STACK_SIGNAL
from tasks.process.phase_file import Progress
from tasks.spec.attempt import (
    FLIGHT_FILE,
    PHASE_FILE,
    Attempt,
    StartMethod,
    rank_file,
    read_attempt,
)
from tasks.spec.messages import error_text, message_of
from tasks.spec.registry import all_tasks
from tasks.spec.source_digest import is_clone
from tasks.spec.status import Status
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    from tasks.harness.stage import Session


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.lifeline is not None:
        die_with_parent(options.lifeline)
    faulthandler.enable()
    if options.probe:
        _print_probe()
    elif options.dispatch_rates:
        _print_dispatch_rates(options.dispatch_rates)
    elif options.compute:
        _check_host(options.compute, options.profiled, options.write_test)
    elif options.fork_server is not None:
        _run_fork_server(options.fork_server, options.device)
    else:
        rank = int(os.environ.get("RANK", "0"))  # of torchrun or of the minder
        measure(options.attempt, options.journal, rank, start_method="spawn")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tasks", description=__doc__)
    add = parser.add_argument
    add("attempt", nargs="?", help="attempt.json of a results folder")
    add("--journal", help="append the journal to this file instead of printing it")
    add("--lifeline", type=int, help="file descriptor; at its end-of-file this process is killed")
    add("--fork-server", type=int, help="file descriptor of a socket: fork children on request")
    add("--device", help="with --fork-server: the device of the children")
    add("--probe", action="store_true", help="print what this host can measure on, as JSON")
    add(
        "--dispatch-rates",
        type=float,
        metavar="SECONDS",
        help="print how many small operations a ms this CPU starts, again and again, as JSON",
    )
    add("--compute", metavar="DEVICE", help="check that this device computes")
    add("--write-test", metavar="FOLDER", help="with --compute: check that files can be written")
    add("--profiled", action="store_true", help="with --compute: check that the profiler works")
    options = parser.parse_args(arguments)
    # A file descriptor may be 0, so these are compared with None.
    given = (options.fork_server, options.attempt)
    if not (options.probe or options.dispatch_rates or options.compute) and given == (None, None):
        parser.error("name an attempt.json")
    return options


def _print_probe() -> None:
    from tasks.process.environment import probe

    reset_niceness()
    print(json.dumps(probe()))


def _print_dispatch_rates(seconds: float) -> None:
    from tasks.process.cpu_speed import dispatch_rates

    reset_niceness()
    print(json.dumps(dispatch_rates(seconds)))


def _check_host(device: str, profiled: bool, folder: str | None) -> None:
    """Raise whatever is wrong with the device, the profiler or the folder."""
    from tasks.process.fork_server import check_device, check_writable

    check_device(device)
    if profiled:
        from tasks.instruments.kernel_time import require_kernels

        require_kernels(partial(check_device, device))
    if folder is not None:
        check_writable(folder)


def _run_fork_server(descriptor: int, device: str) -> NoReturn:
    from tasks.process.fork_server import run_fork_server

    run_fork_server(socket.socket(fileno=descriptor), device, measure_forked)


def measure_forked(attempt_file: str, journal_file: str, rank: int) -> NoReturn:
    """Measure one cell in a forked process, or this rank of it."""
    measure(attempt_file, journal_file, rank, start_method="fork")


def measure(
    attempt_file: str, journal_file: str | None, rank: int, start_method: StartMethod
) -> NoReturn:
    """Measure one cell in this process, or this rank of it, then end the process.

    journal_file: that of rank 0; None prints it. start_method: how this process began; it is
        recorded as a fact.
    """
    file = Path(attempt_file).absolute()
    # The run may have been moved since the file was written.
    attempt = replace(read_attempt(file.read_text()), folder=str(file.parent))
    here = Rank(attempt, rank if attempt.cell.params.ranks > 1 else 0, journal_file is None)
    prefer_for_oom_kill()
    with here.journal(journal_file).open("a", encoding="utf-8") as stream:
        status = _measure(here, stream, start_method)
    # The journal is on disk. Leaving through the interpreter would take half a second, in which
    # torch or a driver could still crash and turn a success into a failure.
    sys.stdout.flush()
    # Other ranks would wait for this one.
    os._exit(int(attempt.cell.params.ranks > 1 and status is not Status.OK))


@dataclass(frozen=True)
class Rank:
    """This process as one of those that measure a cell.

    rank: 0 if it is the only one. by_hand: people read what it prints, and nothing watches it.
    """

    attempt: Attempt
    rank: int
    by_hand: bool

    def file(self, name: str) -> Path:
        return rank_file(self.attempt.path / name, self.rank)

    def journal(self, of_first: str | None) -> Path:
        """Return the journal of this rank, where rank 0 has the given one or prints it."""
        if of_first is None:
            return Path(os.devnull if self.rank else "/dev/stdout")
        return rank_file(Path(of_first), self.rank)

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The cores of this rank: its share of the attempt's, which are in the order of its GPUs."""
        cores, ranks = self.attempt.settings.cores, self.attempt.cell.params.ranks
        if not cores or len(cores) < ranks:
            return cores
        share = len(cores) // ranks
        return cores[self.rank * share : (self.rank + 1) * share]

    def answer_limits(self) -> None:
        """Have the minder's signal show where this process hangs, and end it."""
        if self.by_hand:
            return
        if self.attempt.cell.params.ranks > 1:
            answer_signal(STACK_SIGNAL, self.file(FLIGHT_FILE))
        else:
            # Not faulthandler.dump_traceback_later: it reads the stack of a thread that runs, which
            # may crash a process that is well. `chain`: the signal then ends this process, so that
            # nothing is measured after its limit.
            faulthandler.register(STACK_SIGNAL, file=2, chain=True)


def _measure(here: Rank, stream: TextIO, start_method: StartMethod) -> Status:
    journal, attempt = Journal(stream), here.attempt
    journal.stage("start")
    reset_niceness()
    journal.facts({"start_method": start_method, **pin_to_cores(here.cores)})
    here.answer_limits()
    # Appended, so that a user's file does not hide a package that this program imports.
    sys.path.extend(attempt.settings.import_paths)
    evidence: dict[str, object] = {}
    try:
        _run_stages(here, journal, evidence)
        final = FinalStatus(Status.OK)
    except BaseException as error:  # also SystemExit of a user's model: it is this cell's result
        final = _final_status(attempt, error, evidence)
        if attempt.cell.params.ranks > 1:
            record_flight(here.file(FLIGHT_FILE))
    journal.end(final)
    return final.status


def _run_stages(here: Rank, journal: Journal, evidence: dict[str, object]) -> None:
    """Build the cell and run each stage of the chosen instruments. Journal each when it ends.

    evidence: filled by instruments with what they know about an error that ends a stage.
    """
    from tasks.harness.group import Group, join_group
    from tasks.harness.precision import require_precision
    from tasks.harness.process_settings import read_settings
    from tasks.harness.stage import Session
    from tasks.harness.stage_checks import StageChecks
    from tasks.harness.workload import StaticResult, Workload
    from tasks.instruments import stages_of
    from tasks.process.environment import fingerprint, read_environment

    attempt, params = here.attempt, here.attempt.cell.params
    task = all_tasks()[attempt.cell.task]
    progress = Progress(None if here.by_hand else here.file(PHASE_FILE))
    environment = read_environment()
    journal.facts(environment)
    group = Group()
    if params.ranks > 1:
        journal.stage("rendezvous")
        group, met = join_group(params, progress)
        journal.facts(met)
    journal.stage("build")
    settings = read_settings()
    built = task.build(params)
    facts = {**built.device.facts(), **built.facts}
    journal.facts({**facts, "fingerprint": fingerprint({**environment, **facts})})
    if isinstance(built, StaticResult):
        journal.rows("samples", built.samples)
        return
    assert isinstance(built, Workload)
    journal.facts({"tokens": built.tokens, "flops": built.flops})
    require_precision(params)
    # Artifacts are those of the first rank.
    folder = None if here.by_hand or here.rank else attempt.path
    session = Session(
        built,
        params,
        progress,
        group,
        beaten_ms=attempt.settings.beaten_ms,
        folder=folder,
        evidence=evidence,
    )
    checks = StageChecks(session, settings)
    is_warm = False
    for stage in stages_of(attempt.settings.instruments):
        group.wait_for_all(f"the begin of {stage.name}")
        if is_warm:
            group.limit_collectives(attempt.settings.collective_timeout_s)
        journal.stage(stage.name)
        try:
            _journal_samples(stage.run(session), journal)
            checks.check(stage.name)
        except Exception as error:
            for explain in session.on_error:
                explain(error)
            raise
        finally:
            _journal_rows(session, journal)
        is_warm = is_warm or stage.name == "warm-up"
    group.wait_for_all("the end")
    group.leave()


def _journal_samples(samples: Iterable[Sample], journal: Journal) -> None:
    """Write a stage's samples when it ends, also those before an error."""
    taken: list[Sample] = []
    try:
        for sample in samples:
            taken.append(sample)
    finally:
        journal.rows("samples", taken)


def _journal_rows(session: Session, journal: Journal) -> None:
    """Write what a stage left in the session in addition to its samples."""
    if session.facts:
        journal.facts(session.facts)
        session.facts.clear()
    for table in ("kernels", "allocations", "live"):
        rows = getattr(session, table)
        if rows:
            journal.rows(table, rows)
            rows.clear()


def _final_status(
    attempt: Attempt, error: BaseException, evidence: Mapping[str, object]
) -> FinalStatus:
    from tasks.harness.device import Skip
    from tasks.harness.error_kinds import (
        asked_bytes,
        is_device_oom,
        is_host_oom,
        is_thread_limit,
        is_unsupported,
    )

    if isinstance(error, Skip) or is_unsupported(error):
        return FinalStatus(Status.SKIPPED, {"reason": message_of(error)})
    found: dict[str, object] = {
        "exception": type(error).__qualname__,
        "message": error_text(error),
        "traceback": "".join(traceback.format_exception(error)),
        **evidence,
    }
    is_capped = attempt.cell.params.caps_host
    on_device = is_device_oom(error)
    # Under a cap on the CPU's memory, a thread that gets no stack is out of memory, too.
    on_host = is_host_oom(error) or (is_capped and is_thread_limit(error))
    if not on_device and not on_host:
        return FinalStatus(Status.FAILED, found)
    status = Status.OOM if on_device or is_capped else Status.HOST_OOM
    memory = {"asked_bytes": asked_bytes(error), **_memory_at_death(attempt)}
    return FinalStatus(status, {**found, **memory})


def _memory_at_death(attempt: Attempt) -> dict[str, object]:
    from tasks.harness.device import GIB, open_device

    params = attempt.cell.params
    limit: dict[str, int] = {}
    if params.memory_limit_gib is not None:
        limit = {"limit_bytes": int(params.memory_limit_gib * GIB)}
    try:
        return {**open_device(params.device).memory_evidence(), **limit}
    except Exception as broken:  # a device that fails now must not hide the first error
        return {"memory_evidence": f"unreadable: {error_text(broken)}", **limit}


def _hide_clone() -> None:
    """Import this program's packages, and then find no other module in its clone."""
    import_module("model")
    sys.path[:] = [folder for folder in sys.path if not is_clone(folder)]


if __name__ == "__main__":
    _hide_clone()
    main()
