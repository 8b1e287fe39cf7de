"""Checks of cells in two states of a program, and their result: pass, fail or undecided.

Exact quantities are compared here: status, peak memory, graph breaks and recompilations of measured
cells, and predicted memory, for which a check names what grew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from orchestrator.analysis.axes import NOTHING, Row, axis_text, has_value
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.gate_policy import Action, CellLimits, Policy, limits_match
from orchestrator.analysis.verdicts import Verdict
from orchestrator.common.errors import EXIT_FAILURES, EXIT_UNDECIDED, ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.store.run import INCOMPLETE
from tasks.spec.messages import assignments
from tasks.spec.status import Status

STATUS, MEMORY = "status", "memory"
_OOM = (Status.OOM, Status.OOM_INFERRED, Status.HOST_OOM)
_COUNTS = {
    "graph breaks": ("compile_graph_breaks", "graph_breaks"),
    "recompilations": ("compile_recompiles", "recompiles"),
}


@dataclass(frozen=True)
class Check:
    """Comparison of one quantity of a cell.

    settings: the task of the cell and the axes that tell it apart. gate: the quantity.
    reason: why the verdict is UNDECIDED or WORSE. remedy: options of `sweep run` that decide it.
    log_ratios: of B over A, one for each round. interval: of the ratio, for all cells together.
    threshold: relative change from which it counts. detectable: relative change that is found with
        a probability of 90 %. step_ratio: B's step time over A's, if another time is judged.
    accepted: why the cell may fail; empty if it may not.
    """

    cell: str
    settings: Mapping[str, str]
    gate: str
    verdict: Verdict
    a: float | None = None
    b: float | None = None
    unit: str = ""
    reason: str = ""
    remedy: str = ""
    log_ratios: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    threshold: float | None = None
    detectable: float | None = None
    bound_by: BoundBy | None = None
    is_same_machine: bool = True
    step_ratio: float | None = None
    accepted: str = ""

    @property
    def fails(self) -> bool:
        """True if B is worse than the policy allows."""
        return self.verdict in (Verdict.SLOWER, Verdict.WORSE) and not self.accepted

    @property
    def is_time(self) -> bool:
        return self.unit in ("ms", "operations")

    @property
    def ratio(self) -> float | None:
        """B over A; the median over the rounds, if there are several."""
        if self.log_ratios:
            return math.exp(float(np.median(self.log_ratios)))
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def label(self) -> str:
        return settings_label(self.settings)


def settings_label(settings: Mapping[str, str]) -> str:
    """Return the task and the values of a cell in one line."""
    words = {name: text for name, text in settings.items() if text != NOTHING}
    return " ".join(filter(None, [words.pop("task", ""), *assignments(words)]))


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs, two cells or two predictions.

    differences: parameters of two named cells, and how the runs were measured.
    only: labels of the cells that only A has, and of those that only B has.
    is_same: both are one program, so that each failure is a false alarm.
    command: of the `sweep ab` that measured both runs, which can decide what is undecided.
    """

    checks: tuple[Check, ...]
    policy: Policy
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    is_same: bool = False
    command: tuple[str, ...] = ()

    @cached_property
    def times(self) -> list[Check]:
        return [check for check in self.checks if check.is_time]

    @cached_property
    def exact(self) -> list[Check]:
        return [check for check in self.checks if not check.is_time]

    @cached_property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.fails]

    @cached_property
    def cells(self) -> list[str]:
        """The ids of the compared cells."""
        return list(dict.fromkeys(check.cell for check in self.checks))

    @cached_property
    def undecided(self) -> list[Check]:
        """The checks without a verdict, of cells that the policy does not accept."""
        found = [check for check in self.checks if check.verdict is Verdict.UNDECIDED]
        return [check for check in found if not check.accepted]

    @cached_property
    def decided_cells(self) -> int:
        """The number of cells without an undecided check."""
        return len(self.cells) - len({check.cell for check in self.undecided})

    @property
    def outcome(self) -> str:
        """PASS, FAIL or UNDECIDED."""
        if self.failures:
            return "FAIL"
        is_enough = self.decided_cells >= self.policy.at_least * len(self.cells)
        return "PASS" if self.cells and is_enough else str(Verdict.UNDECIDED)

    @property
    def exit_code(self) -> int:
        return {"PASS": 0, "FAIL": EXIT_FAILURES}.get(self.outcome, EXIT_UNDECIDED)


def exact_checks(
    cell: str, settings: Mapping[str, str], rows: tuple[Row, Row], policy: Policy
) -> Iterator[Check]:
    """Yield the checks of a cell's status, peak memory, graph breaks and recompilations."""
    first, second = (str(row["status"]) for row in rows)
    yield _status_check(cell, settings, (first, second), policy)
    if not first == second == Status.OK:
        return
    if all(has_value(row, "peak_allocated_bytes") for row in rows):
        peaks = (float(rows[0]["peak_allocated_bytes"]), float(rows[1]["peak_allocated_bytes"]))
        yield memory_check(cell, settings, peaks, policy.memory)
    for gate, (column, limit) in _COUNTS.items():
        if all(has_value(row, column) for row in rows):
            a, b = (int(row[column]) for row in rows)
            verdict = Verdict.BETTER if b < a else Verdict.SAME
            if b > a + getattr(policy.compile, limit):
                verdict = Verdict.WORSE
            yield Check(cell, settings, gate, verdict, a, b, "count", f"{a} → {b}")


def _status_check(
    cell: str, settings: Mapping[str, str], statuses: tuple[str, str], policy: Policy
) -> Check:
    first, second = statuses
    verdict, reason = Verdict.UNDECIDED, f"{first} → {second}"
    if INCOMPLETE in statuses:
        reason = f"some of its rows are missing in {'A' if first == INCOMPLETE else 'B'}"
    elif first == second == Status.OK:
        verdict, reason = Verdict.SAME, ""
    elif first == Status.OK:
        action = policy.status.oom if second in _OOM else policy.status.failed
        return lost_check(cell, settings, action, reason)
    elif second == Status.OK:
        verdict = Verdict.BETTER
    elif set(statuses) <= {Status.SKIPPED, *_OOM}:
        verdict = Verdict.SAME
    return Check(cell, settings, STATUS, verdict, reason=reason)


def lost_check(cell: str, settings: Mapping[str, str], action: Action, reason: str) -> Check:
    """Return the check of a cell that has a result in A and none in B, for this reason."""
    verdict = Verdict.WORSE if action == "fail" else Verdict.SAME
    return Check(cell, settings, STATUS, verdict, reason=reason)


def memory_check(
    cell: str, settings: Mapping[str, str], peaks: tuple[float, float], limit: float
) -> Check:
    """Return the check of the peak memory in A and B, in bytes."""
    a, b = peaks
    verdict = Verdict.SAME
    if b > a * (1 + limit):
        verdict = Verdict.WORSE
    elif b < a / (1 + limit):
        verdict = Verdict.BETTER
    return Check(cell, settings, MEMORY, verdict, a, b, "bytes", threshold=limit)


def require_matching(policy: Policy, values: Sequence[Mapping[str, object]]) -> None:
    """Raise ConfigError if limits are for cells that do not exist."""
    for limits in policy.cells:
        if not any(limits_match(limits, one) for one in values):
            raise ConfigError(_no_match(limits), _near(limits, values))


def _no_match(limits: CellLimits) -> str:
    words = ", ".join(f"{name}: {axis_text(value)}" for name, value in limits.when.items())
    return f"the policy has limits for {{{words}}}, which no cell matches"


def _near(limits: CellLimits, values: Sequence[Mapping[str, object]]) -> str:
    names = {name for one in values for name in one}
    unknown = next((name for name in limits.when if name not in names), None)
    return suggestion(unknown, names) if unknown else "Correct or remove the entry of `cells`"
