"""Runs one attempt in its slot, on the GPUs and cores assigned to it, and reports events about it.

In a Ray worker `supervise` does so, in a serial driver `measure`; this module does not import Ray.
If a second try may succeed, it finds out whether the GPU or the whole host is to blame instead of
the cell.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common.errors import LIMIT_REMEDIES
from orchestrator.execution.attempt_archive import in_local_folder, move_into_archive, shares_folder
from orchestrator.execution.child_process import is_forked
from orchestrator.execution.child_supervision import execute, prepare, start_fork_template
from orchestrator.execution.events import AttemptStarted, DeviceLost, Event
from orchestrator.execution.exit_diagnosis import lost_outcome
from orchestrator.execution.fork_client import ForkServerTemplate
from orchestrator.execution.host_probe import gpu_failure, host_failure
from orchestrator.execution.measuring_process import ProcessNotStarted
from orchestrator.hardware.cpu_affinity import Cores, cores_for, cores_here
from orchestrator.hardware.nvml import GpuHealthWatch, gpu_uuids, may_be_broken
from orchestrator.hardware.visible_gpus import VISIBLE_GPUS, GpuUuids, split_gpu_names
from tasks.spec.attempt import BEFORE_ITS_TASK, Attempt
from tasks.spec.axes import select
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

# Torch's own limit of threads that compile. The number of these threads is set explicitly, because
# torch counts the cores when it is imported, and a fork server may have more cores than its children.
_MAX_COMPILE_THREADS = 32


@dataclass(frozen=True)
class Slot:
    """A place where one attempt runs.

    Args:
        cpus: how many CPU cores it may use.
        cores: the cores that it is pinned to, or None for any.
        gpu: the value of CUDA_VISIBLE_DEVICES, which may name several GPUs; empty without a GPU.
        uuids: the UUIDs of all GPUs of this host that cells may use.
    """

    cpus: int
    cores: Cores | None = None
    gpu: str = ""
    uuids: GpuUuids = field(default_factory=dict)

    @classmethod
    def of(cls, attempt: Attempt, cpus: int, uuids: GpuUuids) -> Slot:
        """Return the slot that this process has for the attempt."""
        gpu = _visible_gpus(attempt)
        return cls(cpus, _cores_near(gpu, uuids), gpu, uuids)

    def variables(self) -> dict[str, str]:
        """Return the variables that limit a child's threads.

        With `cores`, those of OpenMP and those that compile; otherwise those of OpenMP to `cpus`.
        """
        if not self.cores:
            return {"OMP_NUM_THREADS": str(self.cpus)}
        threads = len(self.cores)
        compile_threads = min(threads, _MAX_COMPILE_THREADS)
        return {
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads),
        }

    def with_cores(self, attempt: Attempt) -> Attempt:
        """Return the attempt with this slot's cores in its settings: the child pins itself to them."""
        if not self.cores:
            return attempt
        return replace(attempt, settings=replace(attempt.settings, cores=self.cores))


def supervise(
    attempt: Attempt, cpus: int, gpus: Mapping[str, GpuUuids], token: str | None = None
) -> Iterator[Event]:
    """Run an attempt in a child process and yield its events: its start, its files, its end.

    There is an event with its files only if the host does not share the driver's folder. After the
    loss of a GPU the generator waits until the driver ends it.

    Args:
        cpus: how many cores the attempt may use.
        gpus: by host, the GPUs that cells may use.
        token: the content of a file that the driver wrote into the attempt's folder, to find out
            whether this host shares that folder. None if the folder is known to be shared.
    """
    host = socket.gethostname()
    yield AttemptStarted(attempt, host, _visible_gpus(attempt), time.monotonic())
    try:
        is_shared = token is None or shares_folder(attempt, token)
        local = attempt if is_shared else in_local_folder(attempt)
    except OSError as error:
        yield _check_host(lost_outcome(attempt, _describe(error), 0.0))
        return
    event = measure(local, Slot.of(local, cpus, gpus.get(host, {})))
    if local is not attempt:
        with suppress(OSError):  # a cell without its files is still a result
            yield move_into_archive(local, attempt)
    yield _with_attempt(event, attempt)
    if isinstance(event, DeviceLost) and event.gpu:
        # As long as this task runs, Ray gives its GPUs to no other cell. The driver ends it.
        threading.Event().wait()


def prepare_slot(attempt: Attempt, cpus: int, gpus: Mapping[str, GpuUuids]) -> None:
    """Start this process's fork server. The process is likely to supervise the next attempts."""
    slot = Slot.of(attempt, cpus, gpus.get(socket.gethostname(), {}))
    prepare(slot.with_cores(attempt), slot.variables())


def start_template(
    attempt: Attempt, folder: Path, cpu_cells: int, tag: Mapping[str, str]
) -> ForkServerTemplate | None:
    """Start to import torch on this host before it is known where cells will run.

    Returns None for attempts that are not forked, and if no process can be started.

    Args:
        folder: where the template's socket lies.
        cpu_cells: how many CPU cells may run at the same time.
        tag: variables of the template's processes by which the sweep finds them.
    """
    if not is_forked(attempt):
        return None
    params, uuids = attempt.cell.params, gpu_uuids()
    if params.device == "cuda" and not uuids:
        return None
    # A template serves the slots that have the same variables. Expected is an equal share of the
    # cores for each GPU, or for each concurrent CPU cell. Another slot starts its own fork server.
    names = list(uuids)[: params.gpu_count]
    cpus = cores_here() * len(names) // len(uuids) if names else cores_here() // cpu_cells
    slot = Slot(max(1, cpus), _cores_near(",".join(names), uuids))
    with suppress(OSError):  # it only saves time
        return start_fork_template(folder, slot.with_cores(attempt), slot.variables(), tag)
    return None


def _with_attempt(event: Outcome | DeviceLost, attempt: Attempt) -> Outcome | DeviceLost:
    if isinstance(event, Outcome):
        return replace(event, attempt=attempt)
    return replace(
        event,
        lost_outcome=replace(event.lost_outcome, attempt=attempt),
        own_outcome=replace(event.own_outcome, attempt=attempt),
    )


def _visible_gpus(attempt: Attempt) -> str:
    if attempt.cell.params.device != "cuda":
        return ""
    return {**os.environ, **attempt.settings.env}.get(VISIBLE_GPUS, "")


def _cores_near(gpu: str, uuids: GpuUuids) -> Cores | None:
    """Return the GPUs' shares of the cores, or None for any core.

    It returns None without GPUs, and if a GPU has no cores for itself or has all of them.
    """
    cores: set[int] = set()
    for name in split_gpu_names(gpu):
        share = cores_for(name, uuids)
        if not share:
            return None
        cores.update(share)
    return tuple(sorted(cores)) or None


def measure(attempt: Attempt, slot: Slot) -> Outcome | DeviceLost:
    """Execute an attempt. If it may be retried, find out whether its GPUs or its host have failed."""
    uuids: dict[str, str] = {}
    if attempt.cell.params.device == "cuda":
        names = split_gpu_names(slot.gpu)
        uuids = select(slot.uuids, names)
    # Each remembers what NVML answers now, to compare it with the answer afterwards.
    watches = {name: GpuHealthWatch(uuid) for name, uuid in uuids.items()}
    outcome = execute_or_report_lost(attempt, slot)
    if len(uuids) > 1:  # the child itself records the UUID of a single GPU
        facts = {**outcome.facts, "gpu_uuids": list(uuids.values())}
        outcome = replace(outcome, facts=facts)
    if not outcome.status.is_retried:
        return outcome
    message = str(outcome.evidence.get("message", ""))
    for name, watch in watches.items():
        fault = watch.fault(message)
        if fault is None and may_be_broken(message):
            # NVML may report no fault of a GPU on which processes can no longer compute.
            fault = gpu_failure(name)
        if fault is not None:
            uuid = uuids[name]
            description = f"GPU {name} ({uuid}) of {socket.gethostname()}: {fault}"
            evidence = {"nvml": fault, "gpu_uuid": uuid}
            return _device_lost(
                outcome, description, effect="its GPU went away", evidence=evidence, gpu=name
            )
    return _check_host(outcome)


def _check_host(outcome: Outcome) -> Outcome | DeviceLost:
    """Return DeviceLost if the whole host can measure nothing, and the outcome otherwise."""
    message = str(outcome.evidence.get("message", ""))
    is_disk_full = any(os.strerror(number) in message for number in (errno.ENOSPC, errno.EDQUOT))
    # A task that began had everything that a host must provide, except for disk space.
    if outcome.stage not in BEFORE_ITS_TASK and not is_disk_full:
        return outcome
    fault = host_failure(outcome.attempt.path)
    if fault is None:
        return outcome
    description = f"host {socket.gethostname()}: {fault}"
    return _device_lost(
        outcome,
        description,
        effect="nothing is measured on its host",
        evidence={"host_fault": fault},
    )


def _device_lost(
    outcome: Outcome, description: str, *, effect: str, evidence: Mapping[str, str], gpu: str = ""
) -> DeviceLost:
    """Return the loss. The outcome's own status and message become evidence of the lost attempt.

    effect: what happened to the cell, the beginning of its message.
    """
    own_status = {
        "cell_ended_as": str(outcome.status),
        "cell_said": str(outcome.evidence.get("message", "")),
        "message": f"{effect}: {description}",
    }
    lost = replace(
        outcome,
        status=Status.LOST,
        evidence={**outcome.evidence, **own_status, **evidence},
        # As a fact, so that a publication removes the name from the message above, too.
        facts={**outcome.facts, "host": socket.gethostname()},
    )
    return DeviceLost(lost, outcome, description, gpu)


def only_on(gpu: str, attempt: Attempt) -> Attempt:
    """Return the attempt with these GPUs as the only visible ones."""
    env = {**attempt.settings.env, VISIBLE_GPUS: gpu}
    return replace(attempt, settings=replace(attempt.settings, env=env))


def execute_or_report_lost(attempt: Attempt, slot: Slot) -> Outcome:
    """Execute an attempt. It is lost if its folder cannot be written or if this process fails."""
    attempt, began = slot.with_cores(attempt), time.monotonic()
    try:
        return execute(attempt, slot.variables())
    except OSError as error:
        return lost_outcome(attempt, _describe(error), time.monotonic() - began)
    except Exception as error:
        reason = f"its supervisor failed: {error!r}"
        return lost_outcome(attempt, reason, time.monotonic() - began)


def _describe(error: OSError) -> str:
    if isinstance(error, ProcessNotStarted) or error.errno in LIMIT_REMEDIES:
        return f"no process could be started: {error.strerror}"
    return f"its folder cannot be written: {error}"
