"""The plan of a sweep: how often each cell is measured, and why.

Cells, their earlier attempts and the options enter, a Plan leaves. This is the one place that
decides what an earlier attempt means for this run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from orchestrator.common.text import counted
from orchestrator.planning.changed_models import obsolete_attempts
from orchestrator.planning.history import CellHistory, read_histories, with_quality_flags
from orchestrator.planning.oom_inference import OomInference
from orchestrator.planning.options import PENDING, QUALITY_FLAGS, UNMEASURED, RunOptions
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run import INCOMPLETE
from tasks.spec.cell import Cell
from tasks.spec.status import Status


@dataclass(frozen=True)
class Decision:
    """The number of times that a cell will be measured, and the reason.

    repetitions: 0 if the cell is not measured.
    replaces: the new results replace earlier successes.
    excluded: not measured because the options select other cells.
    exhausted: not measured because it has failed too often.
    """

    cell: Cell
    repetitions: int
    reason: str
    replaces: bool = False
    excluded: bool = False
    exhausted: bool = False


@dataclass(frozen=True)
class Plan:
    """The decisions about all cells of a sweep.

    inferable: ids of the cells to run for which an OOM may be inferred.
    inferred: the cells to run whose OOM is known already: id to the cell that ran out of memory.
    """

    decisions: tuple[Decision, ...]
    histories: Mapping[str, CellHistory] = field(default_factory=dict)
    inferable: frozenset[str] = frozenset()
    inferred: Mapping[str, Cell] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        """All cells of the sweep."""
        return [decision.cell for decision in self.decisions]

    @cached_property
    def to_run(self) -> list[Cell]:
        """The cells to measure or to infer, with repetitions.

        Every cell comes once before any cell comes again, so that a slow drift of the machine
        widens the spread of the repetitions and does not shift some cells against others.
        """
        cells: list[Cell] = []
        for done in range(max((decision.repetitions for decision in self.decisions), default=0)):
            cells += [decision.cell for decision in self.decisions if decision.repetitions > done]
        return cells

    @cached_property
    def to_measure(self) -> list[Cell]:
        """The cells to run without those whose OOM is inferred already."""
        return [cell for cell in self.to_run if cell.id not in self.inferred]

    @property
    def out_of_memory(self) -> list[Cell]:
        """The cells that ran out of memory and are not measured again."""
        cells = [decision.cell for decision in self.decisions if not decision.repetitions]
        return [cell for cell in cells if self.history(cell).status == Status.OOM]

    @property
    def incomplete(self) -> list[str]:
        """The ids of the cells that have no result because some of their rows are missing."""
        histories = self.histories.items()
        return [cell for cell, history in histories if history.status == INCOMPLETE]

    def history(self, cell: Cell) -> CellHistory:
        """Return the earlier attempts of a cell."""
        return self.histories.get(cell.id, CellHistory())

    def statuses(self) -> Counter[str]:
        """Count the cells by their status before this run."""
        return Counter(self.history(cell).status for cell in self.cells)


def plan_request(request: SweepRequest) -> Plan:
    """Plan a request by the attempts in its results folder."""
    cells, run = request.expansion.cells, request.run
    obsolete = obsolete_attempts(run, cells, request.model_sources())
    histories = read_histories(run, obsolete)
    if request.options.retry & set(QUALITY_FLAGS):
        histories = with_quality_flags(histories, run)
    max_attempts = request.config.limits.attempts
    return make_plan(cells, histories, request.options, max_attempts)


def make_plan(
    cells: Iterable[Cell],
    histories: Mapping[str, CellHistory],
    options: RunOptions,
    max_attempts: int,
) -> Plan:
    """Plan these cells. A cell that has failed max_attempts times is measured only on request."""
    decisions = []
    for cell in cells:
        history = histories.get(cell.id, CellHistory())
        decisions.append(_decide(cell, history, options, max_attempts))
    plan = Plan(tuple(decisions), histories)
    return _with_inferred(plan, options) if options.infer_oom else plan


def _decide(cell: Cell, history: CellHistory, options: RunOptions, max_attempts: int) -> Decision:
    resumed = options.resumed.get(cell.id)
    if resumed is None:
        return _decide_by_status(cell, history, options, max_attempts)
    if resumed.failed:
        reason = f"given up after {counted(max_attempts, 'attempt')}: {history.statuses[-1]}"
        return Decision(cell, 0, reason, exhausted=True)
    own_attempts = max_attempts + resumed.misses
    return _decide_by_status(cell, history, options.for_resumed(cell), own_attempts)


def _decide_by_status(
    cell: Cell, history: CellHistory, options: RunOptions, max_attempts: int
) -> Decision:
    requested = _decide_by_options(cell, history, options)
    return requested or _decide_by_history(cell, history, options, max_attempts)


def _decide_by_options(cell: Cell, history: CellHistory, options: RunOptions) -> Decision | None:
    """Return what the options say about a cell with this status, or None if they say nothing."""
    status, missing = history.status, options.repeat - history.successes
    if options.only and status not in options.only:
        return Decision(cell, 0, f"not selected: {status}", excluded=True)
    if status in UNMEASURED:
        reason = "new" if status == PENDING else "incomplete: some of its rows are missing"
        if history.obsolete:
            reason = "failed with another source of its model"
        return Decision(cell, missing, reason)
    if options.fresh:
        return _measure_again(cell, history, options, f"fresh: was {status}")
    retried = sorted(options.retry & {status, *history.flags})
    if retried:
        return _measure_again(cell, history, options, f"retry: was {retried[0]}")
    if status in options.only and not options.retry:
        reason = f"selected: was {status}"
        if missing > 0:
            return Decision(cell, missing, reason)
        return _measure_again(cell, history, options, reason)
    return None


def _decide_by_history(
    cell: Cell, history: CellHistory, options: RunOptions, max_attempts: int
) -> Decision:
    status, missing = history.status, options.repeat - history.successes
    if status == Status.OOM_INFERRED and not options.infer_oom:
        return Decision(cell, missing, "inferred, not measured")
    if status == Status.OK and missing > 0 and history.misses < max_attempts:
        reason = f"repeat: measured {history.successes} of {options.repeat} times"
        return Decision(cell, missing, reason)
    if not Status(status).is_retried:
        return Decision(cell, 0, f"done: {status}")
    if history.failures >= max_attempts:
        given_up = f"given up after {counted(history.failures, 'attempt')}: {status}"
        return Decision(cell, 0, f"{given_up}; --retry {status} tries again", exhausted=True)
    return Decision(cell, missing, f"retry: was {status}")


def _measure_again(cell: Cell, history: CellHistory, options: RunOptions, reason: str) -> Decision:
    """Replace the earlier successes by at least as many new ones."""
    repetitions = max(options.repeat, history.successes)
    return Decision(cell, repetitions, reason, replaces=history.successes > 0)


def _with_inferred(plan: Plan, options: RunOptions) -> Plan:
    inference = OomInference(plan.out_of_memory)
    decisions: list[Decision] = []
    inferable: set[str] = set()
    inferred: dict[str, Cell] = {}
    for decision in plan.decisions:
        cell, history = decision.cell, plan.history(decision.cell)
        smaller = inference.find_smaller(cell)
        is_settled = decision.repetitions or decision.excluded or smaller
        # The cell that its OOM was inferred from fits now, or is tried again.
        if history.status == Status.OOM_INFERRED and not is_settled:
            decision = Decision(
                cell, 1, "inferred, but no cell that ran out of memory shows it now"
            )
        decisions.append(decision)
        if decision.repetitions and _may_be_inferred(history, options):
            inferable.add(cell.id)
            if smaller:
                inferred[cell.id] = smaller
    return Plan(tuple(decisions), plan.histories, frozenset(inferable), inferred)


def _may_be_inferred(history: CellHistory, options: RunOptions) -> bool:
    """False for a cell that has fitted, that was measured as OOM, or that is selected by status."""
    is_measured = Status.OK in history.statuses or history.status == Status.OOM
    is_selected = (
        history.status not in UNMEASURED and history.status in options.retry | options.only
    )
    return not is_measured and not is_selected
