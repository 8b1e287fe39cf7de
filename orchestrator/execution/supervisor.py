"""Who stands by where a cell is measured, at the GPU that it was given: in a process of Ray's, or in the driver. No Ray here."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from orchestrator.execution.attempt import execute, lost_outcome, prepare, start_fork_template
from orchestrator.execution.attempt_archive import (
    in_local_folder,
    pack,
    shares_folder,
)
from orchestrator.execution.child_process import is_forked
from orchestrator.execution.events import AttemptStarted, DeviceLost, Event
from orchestrator.execution.fork_server import ForkServerTemplate
from orchestrator.execution.host_probe import gpu_failure, host_failure
from orchestrator.hardware.cpu_affinity import cores_for
from orchestrator.hardware.nvml import GpuHealthWatch, gpu_uuids, may_be_broken
from orchestrator.hardware.visible_gpus import VISIBLE_GPUS, split_gpu_names
from tasks.spec.attempt import BEFORE_ITS_TASK, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

_MOST_COMPILERS = 32  # threads, as torch itself would have it: told, since a prepared parent may use more cores than its children
Gpus = Mapping[str, Mapping[str, str]]  # of each host, UUID by visible name


def supervise(attempt: Attempt, cpus: int, gpus: Gpus, mark: str | None = None) -> Iterator[Event]:
    """Says that it has begun, then measures in a child process. mark: to be seen in the folder if that is the driver's; None
    where it is.
    """
    gpu, host = _gpu_of(attempt), socket.gethostname()
    yield AttemptStarted(attempt, host, gpu, time.monotonic())
    here = gpus.get(host, {})
    try:
        local = (
            attempt if mark is None or shares_folder(attempt, mark) else in_local_folder(attempt)
        )
    except OSError as error:
        yield _on_a_host_that_measures(_unwritable(attempt, error, 0.0))
        return
    event = measure(local, cpus, _cores_of(gpu, here), gpu, here)
    if local is not attempt:
        yield pack(local, attempt)
    yield _as_of(event, attempt)
    if isinstance(event, DeviceLost) and event.gpu:
        threading.Event().wait()  # for the driver's end: Ray takes it, and what else the cell had, for GPUs that are at work


def prepare_place(attempt: Attempt, cpus: int, gpus: Gpus) -> None:
    """In the process in which the next attempts are likely to be supervised."""
    gpu, here = _gpu_of(attempt), gpus.get(socket.gethostname(), {})
    prepare(*_placed(attempt, cpus, _cores_of(gpu, here)))


def start_template(
    attempt: Attempt, folder: Path, cpu_cells: int, mark: Mapping[str, str]
) -> ForkServerTemplate | None:
    """Has a process import on this host what attempts like this one need, before it is known where they will be measured.

    It is for places as they are expected to be: one that turns out otherwise does without. None where a fresh process is wanted.
    """
    if not is_forked(attempt):
        return None
    params, gpus = attempt.cell.params, gpu_uuids()
    if params.device == "cuda" and not gpus:
        return None
    names = list(gpus)[: params.gpu_count]
    cpus = cores_here() * len(names) // len(gpus) if names else cores_here() // cpu_cells
    attempt, variables = _placed(attempt, max(1, cpus), _cores_of(",".join(names), gpus))
    with suppress(OSError):  # each place can do without
        return start_fork_template(folder, attempt, variables, mark)
    return None


def _as_of(event: Outcome | DeviceLost, attempt: Attempt) -> Outcome | DeviceLost:
    if isinstance(event, DeviceLost):
        outcome, ended = (
            replace(one, attempt=attempt) for one in (event.lost_outcome, event.own_outcome)
        )
        return replace(event, lost_outcome=outcome, own_outcome=ended)
    return replace(event, attempt=attempt)


def _gpu_of(attempt: Attempt) -> str:
    visible = {**os.environ, **attempt.settings.env}.get(VISIBLE_GPUS, "")
    return visible if attempt.cell.params.device == "cuda" else ""


def _cores_of(gpu: str, gpus: Mapping[str, str]) -> tuple[int, ...] | None:
    """Of all GPUs that a cell has; None for all that there are."""
    shares = [cores_for(name, gpus) for name in split_gpu_names(gpu)]
    return (
        tuple(sorted({core for share in shares for core in share or ()}))
        if shares and all(shares)
        else None
    )


def measure(
    attempt: Attempt, count: int, cores: tuple[int, ...] | None, gpu: str, gpus: Mapping[str, str]
) -> Outcome | DeviceLost:
    """gpu: the one, or those, that the cell comes to, if it is for any. Asks after them where the cell ends badly, and after the
    host where it ends before its task began."""
    names = (
        [name for name in split_gpu_names(gpu) if name in gpus]
        if attempt.cell.params.device == "cuda"
        else []
    )
    watches = {name: GpuHealthWatch(gpus[name]) for name in names}
    outcome = execute_or_lose(attempt, count, cores)
    if len(names) > 1:
        outcome = replace(
            outcome, facts={**outcome.facts, "gpu_uuids": [gpus[name] for name in names]}
        )
    last_word = str(outcome.evidence.get("message", ""))
    for name, watch in watches.items() if outcome.status.is_retried else ():
        fault = watch.fault(last_word) or (gpu_failure(name) if may_be_broken(last_word) else None)
        if fault is not None:
            gpu = f"GPU {name} ({gpus[name]}) of {socket.gethostname()}: {fault}"
            return _fallen(
                outcome,
                name,
                gpu,
                {"message": f"its GPU went away: {gpu}", "nvml": fault, "gpu_uuid": gpus[name]},
            )
    return _on_a_host_that_measures(outcome)


def _on_a_host_that_measures(outcome: Outcome) -> Outcome | DeviceLost:
    """Or not: a fresh process tries what every cell needs, where one ended before its task began, or for want of space."""
    said = str(outcome.evidence.get("message", ""))
    began = outcome.stage not in BEFORE_ITS_TASK and os.strerror(errno.ENOSPC) not in said
    if not outcome.status.is_retried or began:
        return outcome
    fault = host_failure(outcome.attempt.path)
    if fault is None:
        return outcome
    host = f"host {socket.gethostname()}: {fault}"
    return _fallen(
        outcome,
        "",
        host,
        {"message": f"nothing is measured on its host: {host}", "host_fault": fault},
    )


def _fallen(outcome: Outcome, name: str, place: str, evidence: Mapping[str, str]) -> DeviceLost:
    said = {
        "cell_ended_as": str(outcome.status),
        "cell_said": str(outcome.evidence.get("message", "")),
    }
    facts = {
        **outcome.facts,
        "host": socket.gethostname(),
    }  # by which its name is known where the row is published
    lost_there = replace(
        outcome, status=Status.LOST, evidence={**outcome.evidence, **said, **evidence}, facts=facts
    )
    return DeviceLost(lost_there, outcome, place, name)


def only_on(gpu: str, attempt: Attempt) -> Attempt:
    """The attempt at a place where it sees no other GPU than this, or these."""
    return replace(
        attempt,
        settings=replace(attempt.settings, env={**attempt.settings.env, VISIBLE_GPUS: gpu}),
    )


def execute_or_lose(attempt: Attempt, count: int, cores: tuple[int, ...] | None = None) -> Outcome:
    """Measures a cell on so many cores, or on these. That a disk takes no attempt, or that we fail, is not the cell's fault."""
    began = time.monotonic()
    attempt, variables = _placed(attempt, count, cores)
    try:
        return execute(attempt, variables)
    except OSError as error:
        return _unwritable(attempt, error, time.monotonic() - began)
    except Exception as error:
        return lost_outcome(attempt, f"its supervisor failed: {error!r}", time.monotonic() - began)


def _unwritable(attempt: Attempt, error: OSError, wall_s: float) -> Outcome:
    return lost_outcome(attempt, f"its folder cannot be written: {error}", wall_s)


def _placed(
    attempt: Attempt, count: int, cores: tuple[int, ...] | None
) -> tuple[Attempt, dict[str, str]]:
    """The attempt on these cores, or on so many, and what its child's environment says of them."""
    if not cores:
        return attempt, {"OMP_NUM_THREADS": str(count)}
    variables = {
        "OMP_NUM_THREADS": str(len(cores)),
        "TORCHINDUCTOR_COMPILE_THREADS": str(min(len(cores), _MOST_COMPILERS)),
    }
    return replace(attempt, settings=replace(attempt.settings, cores=cores)), variables


def cores_here() -> int:
    return (
        len(psutil.Process().cpu_affinity() or [])
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count() or 1
    )
