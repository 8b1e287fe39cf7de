"""What to do with each cell, and why: the one place that reads what was finished before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import RunError
from orchestrator.planning.oom_inference import Witnesses
from tasks.spec.cell import Cell
from tasks.spec.status import Status

if TYPE_CHECKING:
    from orchestrator.store.run import Run

PENDING = "pending"
BESIDE = "beside"
# Of a success. Of a cell that needs its host: something else had the cores, or other cells ran there meanwhile. Of any: its steps
# differ so much that the interval of their median is wide.
FLAWS = ("disturbed", BESIDE, "wide")


@dataclass(frozen=True)
class Past:
    """The finished attempts of one cell, oldest first.

    last_number: of the latest of them. replaced: how many successes count no more. flaws: of the success that counts.
    """

    statuses: tuple[Status, ...] = ()
    walls_s: tuple[float, ...] = ()
    last_number: int = 0
    replaced: int = 0
    flaws: frozenset[str] = frozenset()

    @property
    def status(self) -> str:
        """The state that counts: the latest success, else the latest end that says something."""
        if Status.OK in self.statuses:
            return Status.OK
        telling = [status for status in self.statuses if not status.is_environmental]
        return [PENDING, *self.statuses, *telling][-1]

    @property
    def successes(self) -> int:
        """Those that count."""
        return self.statuses.count(Status.OK) - self.replaced

    @property
    def misses(self) -> int:
        """How many repetitions came to nothing."""
        return self.failures + self.statuses.count(Status.OOM)

    @property
    def was_verified(self) -> bool:
        """Whether it was measured after it was inferred to run out of memory."""
        if Status.OOM_INFERRED not in self.statuses:
            return False
        since = self.statuses[self.statuses.index(Status.OOM_INFERRED) :]
        return any(
            status != Status.OOM_INFERRED and not status.is_environmental for status in since
        )

    @property
    def failures(self) -> int:
        return sum(status.is_retried and not status.is_environmental for status in self.statuses)


@dataclass(frozen=True)
class Done:
    """A cell that a command which goes on has measured again already. times: how often it is to be in all, as it was before;
    misses: how often it had come to nothing until then; failed: whether it did nothing else since.
    """

    times: int
    misses: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Choice:
    """What the user asked of this run. `only` and `retry` hold statuses, `only` also `pending`, `retry` also flaws.

    infer_oom: whether an out-of-memory that was inferred will do. verify: how many of those are to be measured all the same.
    repeat: how often each cell is to be measured, in all: what its repetitions differ in is the noise of the machine. done: by
    its id each cell that was measured again already, as was asked.
    """

    infer_oom: bool = False
    verify: int = 0
    repeat: int = 1
    retry: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    fresh: bool = False
    done: Mapping[str, Done] = field(default_factory=dict)

    @property
    def again(self) -> bool:
        """Whether cells are asked for that were measured before."""
        return self.fresh or bool(self.retry | self.only)

    def to_json(self) -> dict[str, Any]:
        """What the user said."""
        said = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "done"
        }
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in said.items()
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Choice:
        read: dict[str, Any] = {
            name: frozenset(value) if isinstance(value, list) else value
            for name, value in said.items()
        }
        return cls(**read)

    def of(self, cell: Cell) -> Choice:
        """What is still asked of one that is done."""
        repeat = max(self.repeat, self.done[cell.id].times)
        return replace(self, fresh=False, retry=frozenset(), only=frozenset(), repeat=repeat)


@dataclass(frozen=True)
class Decision:
    """times: how often the cell will be measured; 0 where it is left alone. replaces: whether in place of earlier successes.

    left_out: whether it is left alone since others are asked for. given_up: since it has failed too often.
    """

    cell: Cell
    times: int
    reason: str
    replaces: bool = False
    left_out: bool = False
    given_up: bool = False


@dataclass(frozen=True)
class Plan:
    """inferable: the ids of the cells to run of which it may be inferred that they do not fit. inferred: of which it is known
    already, and by which cell that was measured. verifying: of the cells to run, those that were inferred before. to_verify: how
    many of those that are inferred now are to be measured all the same.
    """

    decisions: tuple[Decision, ...]
    history: Mapping[str, Past] = field(default_factory=dict)
    inferable: frozenset[str] = frozenset()
    inferred: Mapping[str, Cell] = field(default_factory=dict)
    verifying: frozenset[str] = frozenset()
    to_verify: int = 0

    @cached_property
    def to_run(self) -> list[Cell]:
        """Every cell once before any cell again, so that a drift of the machine strikes repetitions, not cells."""
        rounds = range(max((decision.times for decision in self.decisions), default=0))
        return [
            decision.cell for done in rounds for decision in self.decisions if decision.times > done
        ]

    def past(self, cell: Cell) -> Past:
        return self.history.get(cell.id, Past())

    @cached_property
    def to_measure(self) -> list[Cell]:
        return [cell for cell in self.to_run if cell.id not in self.inferred]

    @property
    def witnesses(self) -> list[Cell]:
        """The cells that ran out of memory, and are not to be tried again."""
        left = (decision.cell for decision in self.decisions if not decision.times)
        return [cell for cell in left if self.past(cell).status == Status.OOM]

    def statuses(self) -> Counter[str]:
        return Counter(self.past(decision.cell).status for decision in self.decisions)


def read_history(run: Run) -> dict[str, Past]:
    """What a run's folder knows of each cell."""
    return history_of(
        run.rows("attempts", ["cell", "attempt", "status", "wall_s", "replaces"]), run
    )


def history_of(rows: Iterable[tuple[Any, ...]], run: Run) -> dict[str, Past]:
    """rows: of attempts, each with its cell, its number, its status, its seconds and the number that it replaces up to."""
    ordered = sorted(rows, key=lambda row: row[:2])
    return {
        cell: _past([row[1:] for row in own], run)
        for cell, own in groupby(ordered, key=lambda row: row[0])
    }


def _past(attempts: Sequence[tuple[int, str, float, int | None]], run: Run) -> Past:
    """Of a cell's attempts, each with its number, its status, its seconds and the number that it replaces up to."""
    numbers, words, walls, _ = zip(*attempts, strict=True)
    well = [(number, until) for number, word, _, until in attempts if word == Status.OK]
    replaced_until = max((until for _, until in well if until), default=0)
    replaced = sum(number <= replaced_until for number, _ in well) if replaced_until else 0
    return Past(tuple([_status(word, run) for word in words]), walls, numbers[-1], replaced)


def _status(word: str, run: Run) -> Status:
    try:
        return Status(word)
    except ValueError as error:
        raise RunError(
            f"{run}/attempts: {word!r} is no status",
            "Move away the part that is of another program",
        ) from error


def make_plan(
    cells: Iterable[Cell], history: Mapping[str, Past], choice: Choice, attempts: int
) -> Plan:
    """attempts: how often a cell that fails is tried in all, before it is left alone until asked for."""
    plan = Plan(
        tuple(_decide_of(cell, history.get(cell.id, Past()), choice, attempts) for cell in cells),
        history,
    )
    return _with_verified(_with_inferred(plan, choice), choice) if choice.infer_oom else plan


def _with_inferred(plan: Plan, choice: Choice) -> Plan:
    witnesses = Witnesses(plan.witnesses)
    decisions = tuple(
        _unless_it_may_fit(one, plan.past(one.cell), witnesses) for one in plan.decisions
    )
    to_run = [one.cell for one in decisions if one.times]
    inferable = [cell for cell in to_run if _may_be_inferred(plan.past(cell), choice)]
    found = {cell.id: witnesses.of(cell) for cell in inferable}
    known = {cell: witness for cell, witness in found.items() if witness}
    return replace(plan, decisions=decisions, inferable=frozenset(found), inferred=known)


def _unless_it_may_fit(decision: Decision, past: Past, witnesses: Witnesses) -> Decision:
    """What was inferred from a cell that is tried again, or fits now, is to be found out again."""
    if (
        decision.times
        or past.status != Status.OOM_INFERRED
        or decision.left_out
        or witnesses.of(decision.cell)
    ):
        return decision
    return Decision(decision.cell, 1, "was inferred, and no cell of these says so now")


def _with_verified(plan: Plan, choice: Choice) -> Plan:
    """Of what was inferred before, evenly from first to last, as many as were not verified then."""
    wanted = max(0, choice.verify - sum(plan.past(one.cell).was_verified for one in plan.decisions))
    left = [one.cell for one in plan.decisions if not (one.times or one.left_out)]
    chosen = {
        cell.id
        for cell in spread(
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


def spread(cells: Sequence[Cell], count: int) -> list[Cell]:
    """So many of them at most, evenly from first to last."""
    wanted = min(count, len(cells))
    return [cells[place * len(cells) // wanted] for place in range(wanted)]


def _may_be_inferred(past: Past, choice: Choice) -> bool:
    """Not of what has fitted, of what was measured not to, or failed when it was to be verified, and of what is asked for by its
    status."""
    asked = past.status != PENDING and past.status in choice.retry | choice.only
    failed = past.was_verified and Status(past.status).is_retried
    return Status.OK not in past.statuses and past.status != Status.OOM and not failed and not asked


def _decide_of(cell: Cell, past: Past, choice: Choice, attempts: int) -> Decision:
    done = choice.done.get(cell.id)
    if done is None:
        return _decide(cell, past, choice, attempts)
    if done.failed:
        return Decision(
            cell, 0, f"given up after {attempts} attempts: {past.statuses[-1]}", given_up=True
        )
    return _decide(cell, past, choice.of(cell), attempts + done.misses)


def _decide(cell: Cell, past: Past, choice: Choice, attempts: int) -> Decision:
    status, missing = past.status, choice.repeat - past.successes
    if choice.only and status not in choice.only:
        return Decision(cell, 0, f"left out: {status}, not asked for", left_out=True)
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
        return Decision(cell, 0, reason, given_up=True)
    return Decision(cell, missing, f"retry: was {status}")


def _again(cell: Cell, past: Past, choice: Choice, reason: str) -> Decision:
    """In place of what succeeded before, no less often than that."""
    return Decision(cell, max(choice.repeat, past.successes), reason, past.successes > 0)
