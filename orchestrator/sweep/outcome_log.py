"""The outcomes of a sweep: stored one by one, or recovered after a killed driver, and their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.common.errors import SweepError
from orchestrator.common.output import Notify
from orchestrator.common.provenance import PROGRAM_SOURCE, git_commit
from orchestrator.execution.measurement import recover
from orchestrator.planning.attempt_queue import QueueState
from orchestrator.planning.cell_decisions import cells_by_flag
from orchestrator.planning.invocation import INVOCATION, MEASUREMENT_SETTINGS, Invocation
from orchestrator.planning.preflight import Exclusion
from orchestrator.store.layout import LOCK_FILE
from orchestrator.store.repair import repair
from orchestrator.store.run_writer import RunWriter
from orchestrator.sweep.interruption import StopReason
from tasks.spec.axes import select
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

# A key of the quality of cells, next to the quality flags. Nothing can be measured again for it.
RAN_WITH_OTHERS = "concurrent"


@dataclass(frozen=True)
class OutcomeLog:
    """Stores outcomes with the facts of the command that measured them.

    counts: stored outcomes by status. measured: ids of the cells that were measured.
    """

    writer: RunWriter
    invocation: Invocation
    counts: Counter[Status] = field(default_factory=Counter)
    measured: set[str] = field(default_factory=set)

    def store(self, outcome: Outcome) -> None:
        """Store an outcome. It survives whatever happens after this call."""
        invocation = self.invocation
        facts = {
            **outcome.facts,
            **(invocation.asked or {}),
            PROGRAM_SOURCE: invocation.program_source,
            INVOCATION: invocation.time,
        }
        self.writer.append(replace(outcome, facts=facts), invocation.commit)
        self.counts[outcome.status] += 1
        if outcome.status is not Status.OOM_INFERRED:
            self.measured.add(outcome.attempt.cell.id)


def recover_attempts(writer: RunWriter, notify: Notify = lambda message: None) -> int:
    """Store the outcomes that a killed driver left in the folders of attempts. Return how many.

    What is damaged is repaired first. This comes before the plan, which then sees their rows.
    """
    if all(path.name == LOCK_FILE for path in writer.folder.iterdir()):  # a new run
        return 0
    for line in repair(writer, recover):
        notify(line)
    finished = list(filter(None, map(recover, writer.attempts_without_row())))
    if not finished:
        return 0
    manifest = writer.read_manifest()
    entries = manifest.get("invocations", [])
    last = Invocation.from_json(entries[-1]) if entries else Invocation(commit=git_commit())
    if last.asked is None:  # an older version stored the settings with the config alone
        last = replace(last, asked=select(manifest.get("config", {}), MEASUREMENT_SETTINGS))
    log = OutcomeLog(writer, last)
    for outcome in finished:
        log.store(outcome)
    writer.finish()
    return len(finished)


def store_cells(writer: RunWriter) -> dict[str, set[str]]:
    """Write the derived row of each cell. Return the ids of the cells by quality flag."""
    from orchestrator.analysis.cpu_bound import ran_with_others
    from orchestrator.analysis.results import (
        cells_facts,
        cells_key,
        derive_results,
        stored_results,
    )

    writer.finish()  # the key is that of the closed log
    key = cells_key(writer, every_version=False)
    results = None if writer.has_appended else stored_results(writer, key)
    if results is None:
        results = derive_results(writer, every_version=False)
        writer.write_cells(results.cells, key, cells_facts(results))
    cells = results.cells
    concurrent = set(cells.loc[ran_with_others(cells), "cell"])
    return {**cells_by_flag(cells), RAN_WITH_OTHERS: concurrent}


@dataclass(frozen=True)
class SweepResult:
    """The outcome of a sweep: stored attempts, remaining cells, and why it ended.

    folder: the results folder as the command line names it.
    counts: stored outcomes by status; with repetitions, a cell has several.
    measured: ids of the cells that were measured at least once.
    queue: what was left.
    excluded: cells that the preflight excluded.
    before: cells by status before the sweep.
    given_up: cells that had failed too often before, by the status that `--retry` takes.
    quality: measured cells by quality flag.
    recovered: outcomes of an earlier driver that was killed.
    stop_reason: what interrupted the sweep. error: what made it impossible to continue.
    """

    folder: str = ""
    counts: Mapping[Status, int] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    queue: QueueState = field(default_factory=QueueState)
    excluded: tuple[Exclusion, ...] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    given_up: Mapping[str, int] = field(default_factory=dict)
    quality: Mapping[str, int] = field(default_factory=dict)
    recovered: int = 0
    stop_reason: StopReason | None = None
    error: SweepError | None = None

    def followed_by(self, step: SweepResult) -> SweepResult:
        """Return the result of a search with one more step.

        It counts no cells that are left: only some of those of a search were asked for.
        """
        return replace(
            step,
            counts=Counter(self.counts) + Counter(step.counts),
            measured=self.measured | step.measured,
            queue=replace(
                step.queue, remaining=0, inferred=self.queue.inferred + step.queue.inferred
            ),
            excluded=(*self.excluded, *step.excluded),
            recovered=self.recovered + step.recovered,
        )

    @property
    def is_cut_short(self) -> bool:
        """True if the sweep ended before its last cell."""
        return bool(self.stop_reason or self.error or self.queue.skipped_for_time)

    @property
    def predicted_oom(self) -> int:
        """The number of cells that were skipped because they are predicted to run out of memory."""
        return sum(not exclusion.is_deferred for exclusion in self.excluded)

    @property
    def measured_counts(self) -> dict[Status, int]:
        """The stored outcomes by status, without those that were inferred."""
        counts = dict(self.counts)
        counts.pop(Status.OOM_INFERRED, None)
        return counts
