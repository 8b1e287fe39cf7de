"""`run_sweep`: a request becomes a plan, a preflight, outcomes and a result, all of them frozen.

A `Runtime` has the scheduler and the console of a sweep. Only three objects have state: the queue
(what is left), the log (what was stored) and the interruption (why the sweep stopped).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace

from orchestrator.common.errors import NoGpuLeft, NoNodeLeft
from orchestrator.common.output import Notify, ProgressLine
from orchestrator.common.text import cell_count, shell_path
from orchestrator.config.cell_labels import shared_settings
from orchestrator.execution import nsys
from orchestrator.execution.measurement import was_not_forked
from orchestrator.hardware.host import gpu_counts
from orchestrator.planning.attempt_queue import AttemptQueue
from orchestrator.planning.cell_decisions import Plan, plan_request
from orchestrator.planning.invocation import ExecutionOptions, write_marks
from orchestrator.planning.prediction_requests import (
    PredictedCell,
    begin_predicting,
    cap_bytes,
    predict_memory,
)
from orchestrator.planning.preflight import (
    CHECKS,
    GPU_CHECKS,
    NSYS_CHECKS,
    Preflight,
    Slots,
    known_fingerprints,
    smallest_gpu,
)
from orchestrator.planning.prior_results import check_prior_results
from orchestrator.planning.request import SweepRequest
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.serial import SerialScheduler
from orchestrator.store.open import open_for_writing
from orchestrator.sweep.console import Console
from orchestrator.sweep.interruption import Interruption
from orchestrator.sweep.outcome_log import OutcomeLog, SweepResult, recover_attempts, store_cells
from tasks.prediction.records import predictable
from tasks.spec.attempt import LOG_FILE, Attempt
from tasks.spec.cell import Cell, device_types

_NOT_FORKED = (
    "cells start as new processes, which takes seconds each time, because the fork server cannot"
    " fork here. The reason is at the beginning of a cell's log"
)

OpenScheduler = Callable[[ExecutionOptions, Attempt, Notify], AbstractContextManager[Scheduler]]


def open_scheduler(
    execution: ExecutionOptions, example: Attempt, notify: Notify
) -> AbstractContextManager[Scheduler]:
    """Open a scheduler that runs attempts like this example.

    While Ray starts, this machine prepares to predict and to run such attempts.
    """
    if predictable([example.cell]):
        begin_predicting()
    if execution.scheduler == "serial":
        return closing(SerialScheduler(notify, example))
    with ProgressLine("starting Ray"):
        return closing(RayScheduler(notify, execution.address, execution.cpu_cells, example))


@dataclass(frozen=True)
class Runtime:
    """The console and the scheduler of a sweep. Tests replace both.

    interruption: that of several sweeps, or None for one sweep.
    """

    console: Console
    open_scheduler: OpenScheduler = open_scheduler
    interruption: Interruption | None = None


def run_sweep(request: SweepRequest, runtime: Runtime) -> SweepResult:
    """Measure the cells that the plan selects. Every finished cell is stored, however it ends."""
    notify, shared = runtime.console.notify, runtime.interruption
    # The interruption is outermost: a second Ctrl-C may not interrupt the upload of a remote run.
    with (
        nullcontext(shared)
        if shared
        else Interruption(request.execution.time_limit_s) as interruption,
        open_for_writing(request.run, request.execution.take_over) as writer,
    ):
        recovered = recover_attempts(writer, notify)
        invocation = request.new_invocation()
        plan = plan_request(request, invocation)
        if plan.states:
            check_prior_results(request, plan, invocation, notify)
        deadline, beaten_ms = interruption.deadline, request.beaten_ms
        queue = AttemptQueue(plan, request.run, request.settings, deadline, beaten_ms)
        log = OutcomeLog(writer, invocation)
        preflight, error = Preflight(), None  # these stay if a signal comes first
        if plan.to_run:
            example = request.example_attempt(plan.to_run)
            with (
                interruption.stops_here(),
                interruption.timer(),
                runtime.open_scheduler(request.execution, example, notify) as scheduler,
            ):
                interruption.install()  # Ray replaces the handler of SIGTERM when it starts
                preflight = check_hosts(request, plan, scheduler, notify)
                host_gpus = gpu_counts(preflight.hosts)
                writer.write_manifest(
                    request.manifest(preflight.fingerprints, invocation, host_gpus)
                )
                if request.model_names:
                    writer.copy_files(request.model_configs())
                preflight = predict_cells(request, plan, preflight, notify)
                if preflight.predictions:
                    predicted = preflight.predictions.items()
                    writer.append_predictions({cell: one.samples for cell, one in predicted})
                # A cell for other hosts has a mark too: the same command measures it there.
                left_out = {one.cell for one in preflight.excluded if not one.is_deferred}
                if marks := plan.marks(left_out):
                    write_marks(writer, marks)
                queue.begin(preflight)
                if not request.is_search:
                    notify(shared_settings(request.expansion.cells, request.selection.set))
                error = measure(scheduler, queue, log, runtime.console, interruption)
        elif not request.is_recorded(invocation):
            # `sweep status` and the report are about the last command, also if it found every
            # cell measured.
            fingerprints = known_fingerprints(request.run)
            writer.write_manifest(request.manifest(fingerprints, invocation))
        if request.model_names:  # a cell may have downloaded the config of one
            writer.copy_files(request.model_configs())
        quality = store_cells(writer)
        return SweepResult(
            folder=str(request.run),
            counts=dict(log.counts),
            measured=frozenset(log.measured),
            queue=queue.state(),
            excluded=preflight.excluded,
            before=plan.statuses(),
            given_up=plan.given_up,
            quality={flag: len(cells & log.measured) for flag, cells in quality.items()},
            recovered=recovered,
            stop_reason=interruption.reason,
            error=error,
        )


def check_hosts(
    request: SweepRequest, plan: Plan, scheduler: Scheduler, notify: Notify
) -> Preflight:
    """Return what is known about the hosts, and the cells that they can measure.

    Raises PlatformError or RunMismatch if a check fails.
    """
    with ProgressLine("examining the hosts"):  # each imports torch
        hosts = tuple(scheduler.hosts())
    preflight = Preflight(
        cells=tuple(dict.fromkeys(plan.to_run)), hosts=hosts, has_results=bool(plan.states)
    )
    by_device = {device: scheduler.slots(device) for device in device_types(preflight.cells)}
    by_gpu_kind, checks = {}, CHECKS
    if nsys.INSTRUMENT in request.config.instruments:
        checks += NSYS_CHECKS
    if "cuda" in by_device:
        by_gpu_kind = {kind: scheduler.slots("cuda", kind) for kind in preflight.gpu_kinds}
        checks += GPU_CHECKS
    preflight = replace(preflight, slots=Slots(by_device, by_gpu_kind))
    for check in checks:
        preflight = check(request, preflight, notify)
    # After the checks, so that no slot is prepared for a cell that no host can measure. The slots
    # import torch while memory is predicted.
    scheduler.import_ahead(request.example_attempt(preflight.cells))
    return preflight


def predict_cells(
    request: SweepRequest, plan: Plan, preflight: Preflight, notify: Notify
) -> Preflight:
    """Predict the memory of the cells, on the smallest GPU that each may run on.

    A cell with a result that stays was predicted before it. With --skip-predicted-oom, cells that
    are predicted to run out of memory are excluded. This may take minutes, so it comes after the
    checks and after the manifest is written.
    """
    by_kind: dict[str | None, list[Cell]] = defaultdict(list)
    new = [cell for cell in preflight.cells if cell.id not in plan.measured]
    for cell in predictable(new):
        by_kind[cell.params.gpu_kind].append(cell)
    if not by_kind:
        return preflight
    notify(f"predicting the memory of {cell_count(sum(map(len, by_kind.values())))}")
    predictions: dict[str, PredictedCell] = {}
    for kind, cells in by_kind.items():
        gpu = smallest_gpu(preflight.hosts, kind)
        found = predict_memory(cells, gpu, request.import_paths)
        for cell in cells:
            predictions[cell.id] = PredictedCell(cell, found[cell.id], cap_bytes(cell, gpu))
    preflight = replace(preflight, predictions=predictions)
    if not request.execution.skip_predicted_oom:
        return preflight
    skipped = []
    for one in predictions.values():
        if one.verdict == "oom":
            notify(f"skipped: {request.expansion.label(one.cell)}: {one.oom_reason}")
            skipped.append(one.cell)
    return preflight.exclude(skipped, is_deferred=False)


def measure(
    scheduler: Scheduler,
    queue: AttemptQueue,
    log: OutcomeLog,
    console: Console,
    interruption: Interruption,
) -> NoGpuLeft | NoNodeLeft | None:
    """Run the queue until it is empty. Return the error that left no GPU or node, if one did."""
    is_noted = False
    with closing(console.open_display(queue.total, queue.remaining_s)) as display:
        try:
            for outcome in interruption.until_stopped(scheduler.run(queue, display.started)):
                log.store(outcome)
                if not is_noted and was_not_forked(outcome):
                    is_noted = True
                    file = outcome.attempt.path / LOG_FILE
                    console.notify(f"{_NOT_FORKED}: {shell_path(file)}")
                queue.finished(outcome)
                display.finished(outcome)
                for inferred in queue.take_inferred():
                    log.store(inferred)
        except (NoGpuLeft, NoNodeLeft) as error:
            return error
        finally:
            for inferred in queue.take_inferred():  # those after the last outcome
                log.store(inferred)
    return None
