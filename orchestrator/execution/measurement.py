"""Measures one attempt in a separate process, whatever happens to it, and returns its outcome.

`measure` runs wherever an attempt has its slot: in the driver, or in a Ray worker. It asks the fork
server of this host for the attempt; a minder there runs the measuring process, keeps its limits, and
reports how it ended (tasks/process/minder.py). If a second try may succeed, `measure` finds out
whether the GPU or the whole host is to blame instead of the cell.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from orchestrator.common.errors import LIMIT_REMEDIES
from orchestrator.execution import nsys
from orchestrator.execution.child_environment import (
    child_environment,
    cold_cache,
    write_rerun_script,
)
from orchestrator.execution.events import DeviceLost
from orchestrator.execution.exit_diagnosis import ProcessExit, build_outcome, lost_outcome
from orchestrator.execution.fork_client import ForkServer, ForkServerLost, ForkServers
from orchestrator.execution.host_probe import gpu_failure, host_failure
from orchestrator.execution.oom_killer import OomKillerWatch
from orchestrator.execution.program import PROGRAM, ProcessNotStarted, lifeline, start_process
from orchestrator.hardware.cpu_affinity import Cores, cores_for
from orchestrator.hardware.host import VISIBLE_GPUS, GpuUuids, split_gpu_names
from orchestrator.hardware.links import describe_links
from orchestrator.hardware.nvml import GpuHealthWatch, may_be_broken
from tasks.process.fork_server import COMPILE, MEASURE, READ_LATE
from tasks.process.journal import read_journal
from tasks.process.log_file import remove_middle
from tasks.process.minder import ORPHANS_S, STACK_SIGNAL, STACKS_S, MindRequest, RankExits
from tasks.spec.attempt import (
    ATTEMPT_FILE,
    BEFORE_ITS_TASK,
    JOURNAL_FILE,
    LOG_FILE,
    PREPARATION_S,
    Attempt,
)
from tasks.spec.axes import select
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

# Torch's own limit of threads that compile. The number of these threads is set explicitly, because
# torch counts the cores when it is imported, and a fork server may have more cores than its children.
_MAX_COMPILE_THREADS = 32
# For the fork server to start a minder. It may be importing for a cell of another slot.
_SERVER_S = PREPARATION_S
# For a minder that is stopped or does not answer, on top of what it grants to the attempt.
_GRACE_S = 30.0

# True where processes can be minded: only Linux has subreapers and pidfds.
HAS_MINDERS = sys.platform.startswith("linux")

# Those of the sweep that this process works for. A Ray worker stays for several attempts.
FORK_SERVERS = ForkServers()
atexit.register(FORK_SERVERS.close)


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
        gpu = visible_gpus(attempt)
        return cls(cpus, cores_near(gpu, uuids), gpu, uuids)

    def place(self, attempt: Attempt) -> Attempt:
        """Return the attempt with this slot's cores, and with variables that limit its threads.

        Variables of its config win.
        """
        threads = max(1, (len(self.cores or ()) or self.cpus) // attempt.cell.params.ranks)
        variables = {"OMP_NUM_THREADS": str(threads)}
        if self.cores:
            variables["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(threads, _MAX_COMPILE_THREADS))
        settings = attempt.settings
        env = {**variables, **settings.env}
        settings = replace(settings, env=env, cores=self.cores or settings.cores)
        return replace(attempt, settings=settings)


def visible_gpus(attempt: Attempt) -> str:
    """Return the GPUs that a measuring process of this process would see, empty on a CPU."""
    if attempt.cell.params.device != "cuda":
        return ""
    return {**os.environ, **attempt.settings.env}.get(VISIBLE_GPUS, "")


def cores_near(gpu: str, uuids: GpuUuids) -> Cores | None:
    """Return the GPUs' shares of the cores in the order of the GPUs, or None for any core.

    It returns None without GPUs, and if a GPU has no cores for itself or has all of them.
    """
    cores: dict[int, None] = {}
    for name in split_gpu_names(gpu):
        share = cores_for(name, uuids)
        if not share:
            return None
        cores |= dict.fromkeys(share)
    return tuple(cores) or None


def only_on(gpu: str, attempt: Attempt) -> Attempt:
    """Return the attempt with these GPUs as the only visible ones."""
    env = {**attempt.settings.env, VISIBLE_GPUS: gpu}
    return replace(attempt, settings=replace(attempt.settings, env=env))


def fork_purpose(attempt: Attempt) -> str | None:
    """Return what a fork server must have imported for the attempt, or None if it is not forked."""
    is_spawned = attempt.settings.start_method == "spawn"
    # nsys must start its process itself.
    is_traced = nsys.INSTRUMENT in attempt.settings.instruments and nsys.program() is not None
    if not HAS_MINDERS or is_spawned or is_traced:
        return None
    return COMPILE if attempt.cell.params.compiled else MEASURE


def was_not_forked(outcome: Outcome) -> bool:
    """Return True if a cell was measured in a new process although it should have been forked."""
    is_new = outcome.facts.get("start_method") == "spawn"
    return is_new and fork_purpose(outcome.attempt) is not None


def fork_server(attempt: Attempt) -> ForkServer:
    """Return the fork server of this host for attempts like this one. It may not run yet."""
    return FORK_SERVERS.server(attempt.cell.params.device, child_environment(attempt))


def begin_import(attempt: Attempt, slot: Slot) -> ForkServer | None:
    """Have this host's fork server import what attempts like this one need, without waiting.

    Return the server, or None if the attempt is not forked or no process can be started.
    """
    purpose = fork_purpose(attempt)
    if purpose is None:
        return None
    server = fork_server(slot.place(attempt))
    try:
        server.begin_import(purpose)
    except OSError:  # it only saves time
        return None
    return server


def measure(attempt: Attempt, slot: Slot) -> Outcome | DeviceLost:
    """Execute an attempt. If it may be retried, find out whether its GPUs or its host have failed."""
    uuids: dict[str, str] = {}
    if attempt.cell.params.device == "cuda":
        names = split_gpu_names(slot.gpu)
        uuids = select(slot.uuids, names)
    # Each remembers what NVML answers now, to compare it with the answer afterwards.
    watches = {name: GpuHealthWatch(uuid) for name, uuid in uuids.items()}
    outcome = execute(slot.place(attempt))
    if len(uuids) > 1:  # the child itself records the UUID of a single GPU
        own = list(uuids.values())
        facts = {**outcome.facts, "gpu_uuids": own, "link": describe_links(own)}
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
    return check_host(outcome)


def check_host(outcome: Outcome) -> Outcome | DeviceLost:
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


def execute(attempt: Attempt) -> Outcome:
    """Measure one cell in a separate process and return its outcome, whatever happens to it.

    It is lost if its folder cannot be written, if no process starts, or if nobody saw its end.
    """
    began = time.monotonic()
    try:
        attempt.path.mkdir(parents=True, exist_ok=True)
        (attempt.path / ATTEMPT_FILE).write_text(attempt.to_json())
        write_rerun_script(attempt)
        return _run_measuring_process(attempt)
    except ForkServerLost as error:
        reason = f"the process that ran it went away: {error}"
        lost = lost_outcome(attempt, reason, time.monotonic() - began)
        # A host on which the task had begun can measure, and need not be checked.
        stage = read_journal(attempt.path / JOURNAL_FILE).stage
        return recover(attempt) or replace(lost, stage=stage)
    except OSError as error:
        return lost_outcome(attempt, describe_os_error(error), time.monotonic() - began)
    except Exception as error:
        reason = f"its supervisor failed: {error!r}"
        return lost_outcome(attempt, reason, time.monotonic() - began)
    finally:
        if cache := cold_cache(attempt):
            shutil.rmtree(cache, ignore_errors=True)


def describe_os_error(error: OSError) -> str:
    """Return why an attempt was not measured."""
    if isinstance(error, ProcessNotStarted) or error.errno in LIMIT_REMEDIES:
        return f"no process could be started: {error.strerror}"
    return f"its folder cannot be written: {error}"


def recover(attempt: Attempt) -> Outcome | None:
    """Return the outcome of an attempt that ended after its driver had died, or None.

    The last line of the journal is the commit point: an attempt that wrote it is a result, even if
    the driver was killed before it could store the row.
    """
    journal = read_journal(attempt.path / JOURNAL_FILE)
    if journal.final is None:
        return None
    left_out = remove_middle(attempt.path / LOG_FILE)
    ended = ProcessExit(
        RankExits([0] * attempt.cell.params.ranks, log_left_out_bytes=left_out),
        wall_s=journal.wall_s,
    )
    return build_outcome(attempt, ended, journal.started_at)


def _run_measuring_process(attempt: Attempt) -> Outcome:
    """Raises ForkServerLost or OSError."""
    variables = child_environment(attempt)
    request = MindRequest(
        name=attempt.cell.id,
        attempt=str(attempt.path / ATTEMPT_FILE),
        journal=str(attempt.path / JOURNAL_FILE),
        log=str(attempt.path / LOG_FILE),
        folder=os.getcwd(),
        variables={**os.environ, **variables},
        ranks=attempt.cell.params.ranks,
        preparation_s=PREPARATION_S,
        timeout_s=attempt.settings.timeout_s,
        host_memory_gib=attempt.settings.host_memory_gib,
    )
    words = (request.attempt, "--journal", request.journal)
    is_traced = nsys.INSTRUMENT in attempt.settings.instruments
    command = (*(nsys.command(attempt) if is_traced else ()), *PROGRAM, *words)
    request = replace(request, command=command)
    server = FORK_SERVERS.server(attempt.cell.params.device, variables)
    if purpose := fork_purpose(attempt):
        broken = server.broken(purpose)
        if broken:
            with (attempt.path / LOG_FILE).open("ab") as log:
                reason = f"spawned, since the fork server cannot fork: {broken}\n"
                log.write(reason.encode() + server.last_output())
        else:
            late = select(request.variables, READ_LATE)
            request = replace(request, command=(), variables=late)
    minder = _Minder(server, request) if HAS_MINDERS else None
    started_at, began = time.time(), time.monotonic()
    with OomKillerWatch() as watch:
        exits = minder.wait() if minder else _run_alone(request, words)
        ended = ProcessExit(
            exits,
            wall_s=time.monotonic() - began,
            kernel_oom_kills=watch.oom_kills(),
            kernel_log=watch.lines(),
        )
    return build_outcome(attempt, ended, started_at)


class _Minder:
    """The minder of an attempt, which the fork server starts. Raises ForkServerLost or OSError."""

    def __init__(self, server: ForkServer, request: MindRequest) -> None:
        self._connection = server.ask("measure", asdict(request))
        self._limit_s = request.preparation_s + request.timeout_s + ORPHANS_S + _GRACE_S
        try:
            self._pid = int(self._connection.receive(_SERVER_S)["minder"])
        except BaseException as error:
            self._connection.close()
            if not isinstance(error, TimeoutError):
                raise
            server.close()
            raise ForkServerLost("it does not answer") from error

    def wait(self) -> RankExits:
        """Wait until nothing of the attempt is left. Raises ForkServerLost or OSError."""
        try:
            return RankExits(**self._connection.receive(self._limit_s))
        except TimeoutError as error:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # its ranks die with it
            raise ForkServerLost("it does not answer") from error
        finally:
            self._connection.close()


def _run_alone(request: MindRequest, words: tuple[str, ...]) -> RankExits:
    """Run an attempt as a child of this process, where none can be minded. Raises OSError."""
    with lifeline() as end, open(request.log, "ab") as log:
        arguments = (*words, "--lifeline", str(end))
        process = start_process(arguments, request.variables, log.fileno(), [end])
        try:
            return RankExits([process.wait(request.timeout_s)])
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, STACK_SIGNAL)
            time.sleep(STACKS_S)
            return RankExits([-signal.SIGKILL], late="done", limit_s=request.timeout_s)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()


def _signal_group(group: int, number: int) -> None:
    # macOS raises PermissionError for a group of zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
