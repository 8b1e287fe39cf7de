"""The plan of a sweep: how often each cell is measured, and why.

Cells, the states of their earlier attempts and the options enter, a Plan leaves. This is the one
place that decides what the state of a cell means for this run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.common.text import cells_and_verb, counted
from orchestrator.hardware.gpu_catalog import matches_kind
from orchestrator.planning.invocation import (
    INVOCATION,
    QUALITY_FLAGS,
    UNMEASURED,
    Invocation,
    RunOptions,
    earlier_marks,
    read_invocations,
)
from orchestrator.planning.oom_inference import OomInference
from orchestrator.planning.request import SweepRequest
from orchestrator.store.cell_state import PENDING, CellState, read_states
from orchestrator.store.layout import ATTEMPTS
from orchestrator.store.run import INCOMPLETE
from tasks.spec.cell import Cell
from tasks.spec.status import Status

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Decision:
    """The number of times that a cell will be measured, and the reason.

    repetitions: 0 if the cell is not measured.
    is_marked: from now on, only attempts of this run and later ones count.
    excluded: not measured because the options select other cells.
    failed_as: the status of a cell that is not measured because it has failed too often.
    """

    cell: Cell
    repetitions: int
    reason: str
    is_marked: bool = False
    excluded: bool = False
    failed_as: str = ""


@dataclass(frozen=True)
class Plan:
    """The decisions about all cells of a sweep.

    inferable: ids of the cells to run for which an OOM may be inferred.
    inferred: the cells to run whose OOM is known already: id to the cell that ran out of memory.
    too_wide: by id, the cells that need more GPUs than one of the hosts that are known has.
    """

    decisions: tuple[Decision, ...]
    states: Mapping[str, CellState] = field(default_factory=dict)
    inferable: frozenset[str] = frozenset()
    inferred: Mapping[str, Cell] = field(default_factory=dict)
    too_wide: Mapping[str, Cell] = field(default_factory=dict)

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
        """The cells to run without those whose OOM is inferred already, and the too wide ones."""
        left_out = self.too_wide.keys() | self.inferred.keys()
        return [cell for cell in self.to_run if cell.id not in left_out]

    @cached_property
    def measured(self) -> set[str]:
        """The ids of the cells with a result that stays. They may be measured again."""
        cells = (one.cell for one in self.decisions if not one.is_marked)
        return {cell.id for cell in cells if self.state(cell).status == Status.OK}

    @property
    def out_of_memory(self) -> list[Cell]:
        """The cells that ran out of memory and are not measured again."""
        cells = [decision.cell for decision in self.decisions if not decision.repetitions]
        return [cell for cell in cells if self.state(cell).status == Status.OOM]

    @property
    def incomplete(self) -> list[str]:
        """The ids of the cells that have no result because some of their rows are missing."""
        return [cell for cell, state in self.states.items() if state.status == INCOMPLETE]

    def state(self, cell: Cell) -> CellState:
        """Return the state of a cell, also of one without an attempt."""
        return self.states.get(cell.id, CellState())

    def statuses(self) -> Counter[str]:
        """Count the cells by their status before this run."""
        return Counter(self.state(decision.cell).status for decision in self.decisions)

    @property
    def given_up(self) -> Counter[str]:
        """Count the cells that failed too often by the status that `--retry` takes."""
        return Counter(one.failed_as for one in self.decisions if one.failed_as)

    def marks(self, excluded: Collection[Cell]) -> dict[str, int]:
        """Return the marks of the cells that are measured again, without those to exclude."""
        marked = [one.cell for one in self.decisions if one.is_marked and one.cell not in excluded]
        return {cell.id: self.state(cell).last_number for cell in marked}


def leave_out_wider(plan: Plan, host_gpus: Sequence[Mapping[str, int]]) -> Plan:
    """Return the plan for hosts with these numbers of GPUs by name. Without any, nothing is known."""
    if not host_gpus:
        return plan
    # For one GPU no host has too few: it may have none of the kind.
    wide = [cell for cell in plan.to_measure if cell.params.gpu_count > 1]
    too_wide = {c.id: c for c in wide if c.params.gpu_count > most_gpus(host_gpus, c)}
    return replace(plan, too_wide=too_wide)


def most_gpus(host_gpus: Iterable[Mapping[str, int]], cell: Cell) -> int:
    """Return the largest number of GPUs of one host that the cell may run on."""
    kind, counts = cell.params.gpu_kind, [0]
    for by_name in host_gpus:
        counts.append(sum(by_name[name] for name in by_name if matches_kind(name, kind)))
    return max(counts)


def plan_request(request: SweepRequest, invocation: Invocation | None = None) -> Plan:
    """Plan a request by the attempts in its results folder.

    invocation: the entry of the command; None: a new one.
    """
    cells, run, options = request.expansion.cells, request.run, request.options
    sources = invocation.sources if invocation else request.model_sources()
    obsolete = _obsolete_attempts(request, sources) if sources and run.exists else set()
    states = read_states(run, obsolete)
    if options.retry & set(QUALITY_FLAGS):
        from orchestrator.analysis.results import load_results

        for flag, flagged in cells_by_flag(load_results(run).cells).items():
            for cell_id in flagged:
                flags = states[cell_id].flags | {flag}
                states[cell_id] = replace(states[cell_id], flags=flags)
    max_attempts = request.config.limits.attempts
    if options.fresh or options.retry or options.only:
        plain = replace(options, retry=frozenset(), only=frozenset(), fresh=False)
        for marks in earlier_marks(run, invocation or request.new_invocation()):
            marked = [cell for cell in cells if cell.id in marks]
            if make_plan(marked, states, plain, max_attempts).to_run:
                options = replace(options, continued=frozenset(cell.id for cell in marked))
                break
    return make_plan(cells, states, options, max_attempts)


def describe_continuation(plan: Plan) -> str:
    """Return a message for the user, empty if no earlier command is continued."""
    # Cells to run that an earlier `--fresh` or `--retry` marked and did not measure.
    earlier = [one.cell for one in plan.decisions if one.repetitions and not one.is_marked]
    left = sum(plan.state(cell).is_to_be_replaced for cell in earlier)
    if not left:
        return ""
    return f"continuing --fresh or --retry: {cells_and_verb(left, 'is', 'are')} left to replace"


def cells_by_flag(cells: pd.DataFrame) -> dict[str, set[str]]:
    """Return the ids of the cells that have each quality flag."""
    from orchestrator.analysis.cpu_bound import is_true

    found = {}
    for flag, column in QUALITY_FLAGS.items():
        found[flag] = set(cells.loc[is_true(cells, column), "cell"])
    return found


def _obsolete_attempts(
    request: SweepRequest, sources: Mapping[str, str | None]
) -> set[tuple[str, int]]:
    """Return the attempts without success at a model whose source was another, by cell and number.

    sources: digest of each of the user's models as it is now. A model that could not be built has the
    source of the command that tried it.
    """
    run = request.run
    obsolete: set[tuple[str, int]] = set()
    models = {cell.id: getattr(cell.params, "model", None) for cell in request.expansion.cells}
    before = {one.time: one.sources or {} for one in read_invocations(run)}
    for cell, number, status, text in run.rows(ATTEMPTS, ["cell", "attempt", "status", "facts"]):
        model = models.get(cell)
        if model is None or status == Status.OK:
            continue
        facts = json.loads(text)
        of_command = before.get(facts.get(INVOCATION), {}).get(model)
        source = facts.get("model_source") or of_command
        if source and sources.get(model) not in (None, source):
            obsolete.add((cell, number))
    return obsolete


def make_plan(
    cells: Iterable[Cell],
    states: Mapping[str, CellState],
    options: RunOptions,
    max_attempts: int,
) -> Plan:
    """Plan these cells. A cell that has failed max_attempts times is measured only on request."""
    decisions = []
    for cell in cells:
        state = states.get(cell.id, CellState())
        decision = _decide_by_options(cell, state, options)
        decisions.append(decision or _decide_by_state(cell, state, options, max_attempts))
    plan = Plan(tuple(decisions), states)
    return _with_inferred(plan, options) if options.infer_oom else plan


def _decide_by_options(cell: Cell, state: CellState, options: RunOptions) -> Decision | None:
    """Return what the options say about a cell with this status, or None if they say nothing."""
    status = state.status
    if options.only and status not in options.only:
        return Decision(cell, 0, f"not selected: {status}", excluded=True)
    if status in UNMEASURED or cell.id in options.continued:
        return None
    # A cell whose replacement failed shows its earlier success, and can be named by both.
    retried = sorted(options.retry & {status, state.since_mark.status, *state.flags})
    if options.fresh:
        reason = f"fresh: was {status}"
    elif retried:
        reason = f"retry: was {retried[0]}"
    elif status in options.only and not options.retry:
        reason = f"selected: was {status}"
        if (missing := _missing(state, options)) > 0:
            return Decision(cell, missing, reason)
    else:
        return None
    # Earlier successes are replaced by at least as many new ones.
    return Decision(cell, max(options.repeat, len(state.valid)), reason, is_marked=True)


def _decide_by_state(
    cell: Cell, state: CellState, options: RunOptions, max_attempts: int
) -> Decision:
    current, missing = state.since_mark, _missing(state, options)
    status = current.status
    if status in UNMEASURED:
        reason = "new" if status == PENDING else "incomplete: some of its rows are missing"
        if state.obsolete:
            reason = "failed with another source of its model"
        elif status == PENDING and state.attempts:
            reason = f"left to replace: was {state.status}"
        # A new cell is marked too: the same command given again must not replace its result.
        is_marked = options.fresh and cell.id not in options.continued
        return Decision(cell, missing, reason, is_marked)
    if status == Status.OOM_INFERRED and not options.infer_oom:
        return Decision(cell, missing, "inferred, not measured")
    if status == Status.OK and missing > 0 and state.misses < max_attempts:
        measured = len(current.valid)
        return Decision(cell, missing, f"repeat: measured {measured} of {measured + missing} times")
    if not Status(status).is_retried:
        return Decision(cell, 0, f"done: {status}")
    if state.failures >= max_attempts:
        given_up = f"given up after {counted(state.failures, 'attempt')}: {status}"
        return Decision(cell, 0, f"{given_up}; --retry {status} tries again", failed_as=status)
    return Decision(cell, missing, f"retry: was {status}")


def _missing(state: CellState, options: RunOptions) -> int:
    """Return how many successes a cell lacks: a marked one gets no fewer than it had before."""
    return max(options.repeat, state.successes_before_mark) - len(state.since_mark.valid)


def _with_inferred(plan: Plan, options: RunOptions) -> Plan:
    inference = OomInference(plan.out_of_memory)
    decisions: list[Decision] = []
    inferable: set[str] = set()
    inferred: dict[str, Cell] = {}
    for decision in plan.decisions:
        cell, state = decision.cell, plan.state(decision.cell)
        smaller = inference.find_smaller(cell)
        is_settled = decision.repetitions or decision.excluded or smaller
        # The cell that its OOM was inferred from fits now, or is tried again.
        if state.status == Status.OOM_INFERRED and not is_settled:
            decision = Decision(
                cell, 1, "inferred, but no cell that ran out of memory shows it now"
            )
        decisions.append(decision)
        if decision.repetitions and _may_be_inferred(state, options):
            inferable.add(cell.id)
            if smaller:
                inferred[cell.id] = smaller
    return Plan(tuple(decisions), plan.states, frozenset(inferable), inferred)


def _may_be_inferred(state: CellState, options: RunOptions) -> bool:
    """False for a cell that has fitted, that was measured as OOM, or that is selected by status."""
    is_measured = bool(state.valid) or state.status == Status.OOM
    is_selected = state.status not in UNMEASURED and state.status in options.retry | options.only
    return not is_measured and not is_selected
