"""The `run` command: config → cells → plan → attempts → outcomes → parts. Each arrow is a function of another module."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import NoGpuLeft, NoNodeLeft
from orchestrator.common.provenance import git_commit
from orchestrator.execution import nsys
from orchestrator.planning.attempt_queue import AttemptQueue
from orchestrator.planning.fingerprints import check_fingerprints, known_fingerprints
from orchestrator.planning.invocation import new_invocation
from orchestrator.planning.options import RunOptions
from orchestrator.planning.plan import flawed_cells, load_cells, plan_request
from orchestrator.planning.preflight import (
    check_gpu_kinds,
    describe_nice_levels,
    exclude_wider_cells,
    first_gpu,
    require_devices,
    require_one_kind_of_gpu,
)
from orchestrator.planning.prior_results import (
    describe_prior_results,
    read_prior_results,
    require_same_env,
)
from orchestrator.planning.request import SweepRequest, make_settings
from orchestrator.planning.resumption import describe_resumption, mark_finished, resume
from orchestrator.store.open import open_for_writing
from orchestrator.store.run_writer import RunWriter
from orchestrator.sweep.interruption import SAVING_S, restored_handlers, stoppable
from orchestrator.sweep.preparation import foresee
from orchestrator.sweep.recovery import measured_by, recover_attempts
from orchestrator.sweep.result import Summary
from orchestrator.sweep.runtime import Means
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

if TYPE_CHECKING:
    pass


def run_sweep(request: SweepRequest, choice: RunOptions, means: Means) -> Summary:
    """Measures what the plan says. Everything finished is kept, however this ends."""
    limit = means.time_limit_s
    deadline = None if limit is None else time.monotonic() + limit - SAVING_S
    summary, commit = Summary(), git_commit()
    with restored_handlers(), open_for_writing(request.run, means.take_over) as writer:
        writer.require_readable_parts()
        summary.recovered = recover_attempts(writer, commit)
        invocation = new_invocation(request, choice, commit, means.skip_predicted_oom)
        choice = resume(request, choice, invocation)
        for line in describe_resumption(request, choice):
            means.say(line)
        plan = plan_request(request, choice)
        summary.before = plan.statuses()
        summary.given_up = sum(decision.exhausted for decision in plan.decisions)

        kept = read_prior_results(request.run, plan)
        if not means.mixed and plan.to_run:
            require_same_env(request.run, plan, request.config)
        for line in describe_prior_results(kept, request.config, invocation):
            means.say(line)

        measured = set[str]()

        def keep(outcome: Outcome) -> None:
            writer.append(measured_by(invocation, outcome), commit)
            summary.statuses[outcome.status] += 1
            if outcome.status is not Status.OOM_INFERRED:
                measured.add(outcome.attempt.cell.id)

        settings = make_settings(request, means.start_method)
        queue = AttemptQueue(
            request.run,
            request.expansion.cells,
            plan,
            settings,
            deadline,
            keep if choice.infer_oom else None,
        )
        if plan.to_run:
            with stoppable(deadline, summary) as arm:
                _measure(request, writer, queue, means, summary, keep, invocation, arm)
        elif not request.run.exists:
            writer.write_manifest(request.manifest(known_fingerprints(request.run), invocation))
        summary.late, summary.late_s, summary.elsewhere = queue.late, queue.late_s, queue.elsewhere
        if summary.is_at_its_end:
            mark_finished(writer, invocation)
        summary.inferred = queue.still_inferred
        summary.verified, summary.refuted = queue.verified, tuple(queue.refuted)
        summary.left, summary.cells = queue.left, len(measured)
        summary.flaws.update(
            {flaw: len(measured & cells) for flaw, cells in _derive(writer).items()}
        )
    return summary


def _measure(
    request: SweepRequest,
    writer: RunWriter,
    queue: AttemptQueue,
    means: Means,
    summary: Summary,
    keep: Callable[[Outcome], None],
    invocation: Mapping[str, Any],
    arm: Callable[[], None],
) -> None:
    with means.open_scheduler(queue.example()) as scheduler:
        arm()  # Ray takes SIGTERM for itself when it starts
        hosts = scheduler.hosts()
        for line in describe_nice_levels(hosts):
            means.say(line)
        require_devices(request, queue.devices, hosts)
        fingerprints = check_fingerprints(request.run, hosts, queue, means.mixed)
        kinds = {kind: scheduler.slots("cuda", kind) for kind in sorted(queue.kinds)}
        check_gpu_kinds(queue, hosts, kinds, means.say)
        exclude_wider_cells(queue, hosts, means.say)
        if queue.infers:
            require_one_kind_of_gpu(fingerprints, queue)
        writer.write_manifest(request.manifest(fingerprints, invocation))
        if nsys.INSTRUMENT in request.config.instruments and not nsys.program():
            means.say(
                "nsys is not on the PATH here: where it is not, cells are measured without it"
            )
        scheduler.prepare(queue.example())
        foresee(request, writer, queue, means, summary, hosts)
        queue.arrange(
            {device: scheduler.slots(device) for device in queue.devices},
            first_gpu(hosts),
            kinds,
        )
        display = means.open_display(queue.total, queue.remaining_s)
        try:
            for outcome in scheduler.run(queue, display.started):
                keep(outcome)
                queue.finished(outcome)
                display.finished(outcome)
        except (NoGpuLeft, NoNodeLeft) as error:
            summary.broken = error
        finally:
            display.close()


def _derive(writer: RunWriter) -> dict[str, set[str]]:
    """Write the derived row of each cell. Return the cells with each flaw."""
    from orchestrator.analysis.cpu_bound import ran_with_others

    cells = load_cells(writer)
    writer.write_cells(cells)
    return {**flawed_cells(cells), "concurrent": set(cells.loc[ran_with_others(cells), "cell"])}
