"""The measuring process: `python -m tasks ATTEMPT.json` measures one cell and writes its journal.

Without `--journal` the journal goes to the terminal: that is how a cell is re-run by hand.
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
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tasks.process.cpu_affinity import come_first, go_first, pin
from tasks.process.journal import FinalStatus
from tasks.process.lifeline import die_with_parent
from tasks.spec.attempt import PHASE_FILE, PREPARATION_S, Attempt, StartMethod
from tasks.spec.status import Status

_STACK_BEFORE_TIMEOUT = 0.9


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.lifeline is not None:
        die_with_parent(options.lifeline)
    faulthandler.enable()
    if options.probe:
        from tasks.process.environment import probe

        come_first()
        print(json.dumps(probe()))
    elif options.paces:
        from tasks.process.cpu_speed import paces

        come_first()
        print(json.dumps(paces(options.paces)))
    elif options.compute:
        from tasks.process.fork_server import compute, write_into

        compute(options.compute)
        if options.watched:
            from tasks.instruments.kernel_time import require_kernels

            require_kernels(partial(compute, options.compute))
        if options.into is not None:
            write_into(options.into)
    elif options.serve is not None:
        from tasks.process.fork_server import serve

        serve(
            socket.socket(fileno=options.serve),
            options.device,
            partial(measure, start_method="fork"),
        )
    elif options.beget is not None:
        from tasks.process.fork_server import Preparation, beget

        preparation = Preparation(options.compiled)
        beget(
            socket.socket(fileno=options.beget),
            options.device,
            preparation,
            partial(measure, start_method="fork"),
        )
    else:
        measure(options.attempt, options.journal, start_method="spawn")


def measure(attempt_file: str, journal_file: str | None, start_method: StartMethod) -> NoReturn:
    """Measures one cell in this process, and ends it. start_method: how the process began, for the record."""
    attempt = Attempt.from_json(Path(attempt_file).read_text())
    go_first()
    with Path(journal_file or "/dev/stdout").open("a", encoding="utf-8") as stream:
        _measure(attempt, stream, start_method, by_hand=journal_file is None)
    # The journal is on disk: a clean exit would cost half a second and could only go wrong.
    sys.stdout.flush()
    os._exit(0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tasks", description=__doc__)
    parser.add_argument("attempt", nargs="?", help="attempt.json of a results folder")
    parser.add_argument("--journal", help="append the journal to this file instead of printing it")
    parser.add_argument(
        "--lifeline", type=int, help="file descriptor whose end-of-file ends this process"
    )
    parser.add_argument(
        "--serve",
        type=int,
        help="file descriptor of a socket on which to be asked for forked children",
    )
    parser.add_argument(
        "--beget",
        type=int,
        help="file descriptor of a socket at which to be asked for those that serve",
    )
    parser.add_argument(
        "--device", help="with --serve and --beget: what the children will compute on"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="with --beget: whether the first of them will compile",
    )
    parser.add_argument(
        "--probe", action="store_true", help="print what this machine can measure on, as JSON"
    )
    parser.add_argument(
        "--paces",
        type=float,
        metavar="SECONDS",
        help="print how fast this host is again and again, as JSON",
    )
    parser.add_argument("--compute", metavar="DEVICE", help="find out whether this device computes")
    parser.add_argument(
        "--into", metavar="FOLDER", help="with --compute: and whether a file can be written there"
    )
    parser.add_argument(
        "--watched",
        action="store_true",
        help="with --compute: and whether the profiler sees its kernels",
    )
    options = parser.parse_args(arguments)
    given = (options.serve, options.beget, options.attempt)  # a file descriptor may be 0
    if not (options.probe or options.paces or options.compute) and given == (None, None, None):
        parser.error("name an attempt.json")
    return options


def _measure(attempt: Attempt, stream: Any, start_method: StartMethod, by_hand: bool) -> None:
    from tasks.process.journal import Journal
    from tasks.process.phase_file import Progress

    journal = Journal(stream)
    journal.stage("start")
    come_first()
    journal.facts({"start_method": start_method, **pin(attempt.settings.cores)})
    if not by_hand:
        faulthandler.dump_traceback_later(PREPARATION_S * _STACK_BEFORE_TIMEOUT)
    sys.path.extend(
        attempt.settings.import_paths
    )  # behind our own packages: a `model.py` beside a config is common
    evidence: dict[str, Any] = {}
    try:
        _run_stages(
            attempt,
            journal,
            Progress(None if by_hand else attempt.path / PHASE_FILE),
            by_hand,
            evidence,
        )
    except BaseException as error:  # whatever it is, it is this cell's result
        journal.end(_describe(attempt, error, evidence))
    else:
        journal.end(FinalStatus(Status.OK))


def _run_stages(
    attempt: Attempt, journal: Any, progress: Any, by_hand: bool, evidence: dict[str, Any]
) -> None:
    """Environment, build, then each stage of the chosen instruments, journalled as it is done.

    evidence: where instruments say what they know of an error that ends one.
    """
    from tasks.harness.compilation import require_compiled
    from tasks.harness.precision import require_precision
    from tasks.harness.stage import Session
    from tasks.harness.workload import Finding
    from tasks.instruments import stages_of
    from tasks.process.environment import fingerprint, read_environment
    from tasks.spec.registry import all_tasks

    task, params = all_tasks()[attempt.cell.task], attempt.cell.params
    environment = read_environment()
    journal.facts(environment)
    journal.stage("build")
    if not by_hand:
        faulthandler.dump_traceback_later(attempt.settings.timeout_s * _STACK_BEFORE_TIMEOUT)
    built = task.build(params)
    facts = {**built.device.facts(), **built.facts}
    journal.facts({**facts, "fingerprint": fingerprint({**environment, **facts})})
    if isinstance(built, Finding):
        journal.samples(built.samples)
        return
    journal.facts({"tokens": built.tokens, "flops": built.flops})
    require_precision(params)
    session = Session(
        built, params, progress, folder=None if by_hand else attempt.path, evidence=evidence
    )
    for stage in stages_of(attempt.settings.instruments):
        journal.stage(stage.name)
        try:
            _take(stage.run(session), journal)
            require_precision(params)
            if built.compiled and session.steps:
                require_compiled()
        except Exception as error:
            for ask in session.on_error:
                ask(error)
            raise
        finally:
            _hand_over(session, journal)


def _hand_over(session: Any, journal: Any) -> None:
    """Journals what a stage left besides its samples."""
    for write, left in (
        (journal.facts, session.facts),
        (journal.kernels, session.kernels),
        (journal.allocations, session.allocations),
        (journal.live, session.live),
    ):
        if left:
            write(left)
            left.clear()


def _take(samples: Iterable[Any], journal: Any) -> None:
    """Journals a stage's samples when it ends, also where it ends in an error half-way."""
    taken: list[Any] = []
    try:
        for sample in samples:
            taken.append(sample)
    finally:
        journal.samples(taken)


def _describe(attempt: Attempt, error: BaseException, known: Mapping[str, Any]) -> FinalStatus:
    from tasks.harness.device import (
        Skip,
        asked_bytes,
        backend_refused,
        device_refused,
        host_refused,
        message_of,
        thread_refused,
    )

    if isinstance(error, Skip) or backend_refused(error):
        return FinalStatus(Status.SKIPPED, {"reason": message_of(error)})
    evidence: dict[str, Any] = {
        "exception": type(error).__qualname__,
        "message": message_of(error),
        "traceback": "".join(traceback.format_exception(error)),
        **known,
    }
    capped = attempt.cell.params.caps_host
    if not (device_refused(error) or host_refused(error) or (capped and thread_refused(error))):
        return FinalStatus(Status.FAILED, evidence)
    status = Status.OOM if device_refused(error) or capped else Status.HOST_OOM
    return FinalStatus(
        status, {**evidence, "asked_bytes": asked_bytes(error), **_memory_at_death(attempt)}
    )


def _memory_at_death(attempt: Attempt) -> dict[str, Any]:
    from tasks.harness.device import GIB, open_device

    params = attempt.cell.params
    limit = (
        {}
        if params.memory_limit_gib is None
        else {"limit_bytes": int(params.memory_limit_gib * GIB)}
    )
    try:
        return {**open_device(params.device).memory_evidence(), **limit}
    except (
        Exception
    ) as broken:  # a device that cannot be asked any more must not hide the first error
        return {"memory_evidence": f"unreadable: {broken}", **limit}


if __name__ == "__main__":
    main()
