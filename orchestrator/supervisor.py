"""Who stands by where a cell is measured, at the GPU that it was given: in a process of Ray's, or in the driver. No Ray here."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import psutil

from orchestrator.attempt import execute, lost, prepare
from orchestrator.cores import cores_for
from orchestrator.nvml import Watch
from orchestrator.parcel import Parcel, elsewhere, pack, sees_mark
from orchestrator.plan import RETRIED
from tasks.harness.records import Attempt, Outcome, Status

_MOST_COMPILERS = 32  # threads, as torch itself would have it: told, since a prepared parent may use more cores than its children
Gpus = Mapping[str, Mapping[str, str]]  # of each host, UUID by visible name


@dataclass(frozen=True)
class Started:
    """An attempt has begun: where, and when by time.monotonic() of this host. A wall clock jumps, and each host has its own."""

    attempt: Attempt
    host: str
    gpu: str
    at_s: float


@dataclass(frozen=True)
class Fallen:
    """The GPU has fallen off under an attempt. gpu: which, and what is wrong with it."""

    outcome: Outcome
    gpu: str


Event = Started | Parcel | Outcome | Fallen  # what a supervisor tells the driver, in this order


def supervise(attempt: Attempt, cpus: int, gpus: Gpus, mark: str | None = None) -> Iterator[Event]:
    """Says that it has begun, then measures in a child process. mark: to be seen in the folder if that is the driver's; None
    where it is.
    """
    gpu, host = _gpu_of(attempt), socket.gethostname()
    yield Started(attempt, host, gpu, time.monotonic())
    here = gpus.get(host, {})
    local = attempt if mark is None or sees_mark(attempt, mark) else elsewhere(attempt)
    event = measure(local, cpus, _cores_of(gpu, here), gpu, here)
    if local is not attempt:
        yield pack(local, attempt)
    yield _as_of(event, attempt)
    if isinstance(event, Fallen):
        threading.Event().wait()  # for the driver's end: Ray takes this GPU for one that is at work


def prepare_place(attempt: Attempt, cpus: int, gpus: Gpus) -> None:
    """In the process in which the next attempts are likely to be supervised."""
    gpu, here = _gpu_of(attempt), gpus.get(socket.gethostname(), {})
    prepare(*_placed(attempt, cpus, _cores_of(gpu, here)))


def _as_of(event: Outcome | Fallen, attempt: Attempt) -> Outcome | Fallen:
    if isinstance(event, Fallen):
        return replace(event, outcome=replace(event.outcome, attempt=attempt))
    return replace(event, attempt=attempt)


def _gpu_of(attempt: Attempt) -> str:
    visible = {**os.environ, **attempt.settings.env}.get("CUDA_VISIBLE_DEVICES", "")
    return visible if attempt.cell.params.device == "cuda" else ""


def _cores_of(gpu: str, gpus: Mapping[str, str]) -> tuple[int, ...] | None:
    return cores_for(gpu, gpus) if gpu else None


def measure(attempt: Attempt, count: int, cores: tuple[int, ...] | None, gpu: str, gpus: Mapping[str, str]) -> Outcome | Fallen:
    """gpu: the one that the cell comes to, if it is for one. Asks after it where the cell ends badly."""
    if attempt.cell.params.device != "cuda" or gpu not in gpus:
        return execute_or_lose(attempt, count, cores)
    watch = Watch(gpus[gpu])
    outcome = execute_or_lose(attempt, count, cores)
    last_word = str(outcome.evidence.get("message", ""))
    fault = watch.fault(last_word) if outcome.status in RETRIED else None
    if fault is None:
        return outcome
    name = f"GPU {gpu} ({gpus[gpu]}) of {socket.gethostname()}: {fault}"
    said = {"cell_ended_as": str(outcome.status), "cell_said": last_word}
    evidence = {**outcome.evidence, **said, "message": f"its GPU went away: {name}", "nvml": fault, "gpu_uuid": gpus[gpu]}
    return Fallen(replace(outcome, status=Status.LOST, evidence=evidence), name)


def only_on(gpu: str, attempt: Attempt) -> Attempt:
    """The attempt at a place where it sees no other GPU."""
    return replace(attempt, settings=replace(attempt.settings, env={**attempt.settings.env, "CUDA_VISIBLE_DEVICES": gpu}))


def execute_or_lose(attempt: Attempt, count: int, cores: tuple[int, ...] | None = None) -> Outcome:
    """Measures a cell on so many cores, or on these. A disk that takes no attempt is not the cell's fault."""
    began = time.monotonic()
    attempt, variables = _placed(attempt, count, cores)
    try:
        return execute(attempt, variables)
    except OSError as error:
        return lost(attempt, f"its folder cannot be written: {error}", time.monotonic() - began)


def _placed(attempt: Attempt, count: int, cores: tuple[int, ...] | None) -> tuple[Attempt, dict[str, str]]:
    """The attempt on these cores, or on so many, and what its child's environment says of them."""
    if not cores:
        return attempt, {"OMP_NUM_THREADS": str(count)}
    variables = {"OMP_NUM_THREADS": str(len(cores)), "TORCHINDUCTOR_COMPILE_THREADS": str(min(len(cores), _MOST_COMPILERS))}
    return replace(attempt, settings=replace(attempt.settings, cores=cores)), variables


def cores_here() -> int:
    return len(psutil.Process().cpu_affinity() or []) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1
