"""What to do with each cell, and why: the one place that reads what was finished before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.planning.history import PENDING, CellHistory, read_history
from orchestrator.planning.oom_inference import OomInference
from orchestrator.planning.options import FLAWS, RunOptions
from orchestrator.planning.request import SweepRequest
from tasks.spec.cell import Cell
from tasks.spec.status import Status

if TYPE_CHECKING:
    import pandas as pd

    from orchestrator.store.run import Run


@dataclass(frozen=True)
class Decision:
    """times: how often the cell will be measured; 0 where it is left alone. replaces: whether in place of earlier successes.

    left_out: whether it is left alone since others are asked for. given_up: since it has failed too often.
    """

    cell: Cell
    repetitions: int
    reason: str
    replaces: bool = False
    excluded: bool = False
    exhausted: bool = False


@dataclass(frozen=True)
class Plan:
    """inferable: the ids of the cells to run of which it may be inferred that they do not fit. inferred: of which it is known
    already, and by which cell that was measured. verifying: of the cells to run, those that were inferred before. to_verify: how
    many of those that are inferred now are to be measured all the same.
    """

    decisions: tuple[Decision, ...]
    history: Mapping[str, CellHistory] = field(default_factory=dict)
    inferable: frozenset[str] = frozenset()
    inferred: Mapping[str, Cell] = field(default_factory=dict)
    verifying: frozenset[str] = frozenset()
    to_verify: int = 0

    @cached_property
    def to_run(self) -> list[Cell]:
        """Every cell once before any cell again, so that a drift of the machine strikes repetitions, not cells."""
        rounds = range(max((decision.repetitions for decision in self.decisions), default=0))
        return [
            decision.cell
            for done in rounds
            for decision in self.decisions
            if decision.repetitions > done
        ]

    def past(self, cell: Cell) -> CellHistory:
        return self.history.get(cell.id, CellHistory())

    @cached_property
    def to_measure(self) -> list[Cell]:
        return [cell for cell in self.to_run if cell.id not in self.inferred]

    @property
    def witnesses(self) -> list[Cell]:
        """The cells that ran out of memory, and are not to be tried again."""
        left = (decision.cell for decision in self.decisions if not decision.repetitions)
        return [cell for cell in left if self.past(cell).status == Status.OOM]

    def statuses(self) -> Counter[str]:
        return Counter(self.past(decision.cell).status for decision in self.decisions)


def make_plan(
    cells: Iterable[Cell], history: Mapping[str, CellHistory], choice: RunOptions, attempts: int
) -> Plan:
    """attempts: how often a cell that fails is tried in all, before it is left alone until asked for."""
    plan = Plan(
        tuple(
            _decide_of(cell, history.get(cell.id, CellHistory()), choice, attempts)
            for cell in cells
        ),
        history,
    )
    return _with_verified(_with_inferred(plan, choice), choice) if choice.infer_oom else plan


def _with_inferred(plan: Plan, choice: RunOptions) -> Plan:
    witnesses = OomInference(plan.witnesses)
    decisions = tuple(
        _unless_it_may_fit(one, plan.past(one.cell), witnesses) for one in plan.decisions
    )
    to_run = [one.cell for one in decisions if one.repetitions]
    inferable = [cell for cell in to_run if _may_be_inferred(plan.past(cell), choice)]
    found = {cell.id: witnesses.of(cell) for cell in inferable}
    known = {cell: witness for cell, witness in found.items() if witness}
    return replace(plan, decisions=decisions, inferable=frozenset(found), inferred=known)


def _unless_it_may_fit(decision: Decision, past: CellHistory, witnesses: OomInference) -> Decision:
    """What was inferred from a cell that is tried again, or fits now, is to be found out again."""
    if (
        decision.repetitions
        or past.status != Status.OOM_INFERRED
        or decision.excluded
        or witnesses.of(decision.cell)
    ):
        return decision
    return Decision(decision.cell, 1, "was inferred, and no cell of these says so now")


def _with_verified(plan: Plan, choice: RunOptions) -> Plan:
    """Of what was inferred before, evenly from first to last, as many as were not verified then."""
    wanted = max(0, choice.verify - sum(plan.past(one.cell).was_verified for one in plan.decisions))
    left = [one.cell for one in plan.decisions if not (one.repetitions or one.excluded)]
    chosen = {
        cell.id
        for cell in evenly_spaced(
            [cell for cell in left if plan.past(cell).status == Status.OOM_INFERRED], wanted
        )
    }
    decisions = tuple(
        Decision(one.cell, 1, "was inferred: to be verified") if one.cell.id in chosen else one
        for one in plan.decisions
    )
    return replace(
        plan, decisions=decisions, verifying=frozenset(chosen), to_verify=wanted - len(chosen)
    )


def evenly_spaced(cells: Sequence[Cell], count: int) -> list[Cell]:
    """So many of them at most, evenly from first to last."""
    wanted = min(count, len(cells))
    return [cells[place * len(cells) // wanted] for place in range(wanted)]


def _may_be_inferred(past: CellHistory, choice: RunOptions) -> bool:
    """Not of what has fitted, of what was measured not to, or failed when it was to be verified, and of what is asked for by its
    status."""
    asked = past.status != PENDING and past.status in choice.retry | choice.only
    failed = past.was_verified and Status(past.status).is_retried
    return Status.OK not in past.statuses and past.status != Status.OOM and not failed and not asked


def _decide_of(cell: Cell, past: CellHistory, choice: RunOptions, attempts: int) -> Decision:
    done = choice.done.get(cell.id)
    if done is None:
        return _decide(cell, past, choice, attempts)
    if done.failed:
        return Decision(
            cell, 0, f"given up after {attempts} attempts: {past.statuses[-1]}", exhausted=True
        )
    return _decide(cell, past, choice.of(cell), attempts + done.misses)


def _decide(cell: Cell, past: CellHistory, choice: RunOptions, attempts: int) -> Decision:
    status, missing = past.status, choice.repeat - past.successes
    if choice.only and status not in choice.only:
        return Decision(cell, 0, f"left out: {status}, not asked for", excluded=True)
    if status == PENDING:
        return Decision(cell, missing, "new")
    if choice.fresh:
        return _again(cell, past, choice, f"fresh: was {status}")
    for asked in sorted(choice.retry & {status, *past.flaws}):
        return _again(cell, past, choice, f"retry: was {asked}")
    if status in choice.only and not choice.retry:
        asked = f"asked for: was {status}"
        return Decision(cell, missing, asked) if missing > 0 else _again(cell, past, choice, asked)
    if status == Status.OOM_INFERRED and not choice.infer_oom:
        return Decision(cell, missing, "was inferred, not measured")
    if status == Status.OK and missing > 0 and past.misses < attempts:
        return Decision(
            cell, missing, f"repeat: measured {past.successes} of {choice.repeat} times"
        )
    if not Status(status).is_retried:
        return Decision(cell, 0, f"done: {status}")
    if past.failures >= attempts:
        reason = f"given up after {past.failures} attempts: {status}; --retry {status} tries again"
        return Decision(cell, 0, reason, exhausted=True)
    return Decision(cell, missing, f"retry: was {status}")


def _again(cell: Cell, past: CellHistory, choice: RunOptions, reason: str) -> Decision:
    """In place of what succeeded before, no less often than that."""
    return Decision(cell, max(choice.repeat, past.successes), reason, past.successes > 0)


def plan_request(request: SweepRequest, choice: RunOptions) -> Plan:
    history = read_history(request.run)
    if choice.retry & set(FLAWS):
        for flaw, cells in flawed_cells(load_cells(request.run)).items():
            history |= {
                cell: replace(history[cell], flaws=history[cell].flaws | {flaw}) for cell in cells
            }
    return make_plan(request.expansion.cells, history, choice, request.config.limits.attempts)


def load_cells(run: Run) -> pd.DataFrame:
    from orchestrator.analysis.results import load_results

    return load_results(run).cells


def flawed_cells(cells: pd.DataFrame) -> dict[str, set[str]]:
    """The cells with each flaw."""
    from orchestrator.analysis.cpu_bound import flagged

    return {flaw: flagged(cells, column) for flaw, column in FLAWS.items()}
