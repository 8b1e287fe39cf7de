"""What is kept of earlier runs, though this one would measure it otherwise: that is said, or refused, and never silent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from orchestrator.common.errors import RunMismatch
from orchestrator.common.provenance import PROGRAM_SOURCE, describe_program
from orchestrator.config.schema import SweepConfig
from orchestrator.planning.plan import Plan
from orchestrator.store.run import Run
from tasks.spec.status import Status

_PLACES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})
_AGAIN = "`--retry ok` measures them again"


@dataclass(frozen=True)
class PriorResult:
    """How a cell was measured that this run leaves as it is. None of what an older program did not write down."""

    commit: str | None
    instruments: frozenset[str] | None
    env: tuple[tuple[str, str], ...] | None
    model: str | None = None
    model_source: str | None = None
    program_source: str | None = None

    def is_by_another(self, source: str, commit: str | None) -> bool:
        """Than the program of that source and commit."""
        if self.program_source is not None:
            return self.program_source != source
        return None not in (self.commit, commit) and self.commit != commit


def measurement_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a row that say how it was asked for. config: as a manifest has it."""
    return {name: config[name] for name in ("env", "instruments") if name in config}


def read_prior_results(run: Run, plan: Plan) -> list[PriorResult]:
    """Of each cell that was measured, and not to be replaced, its successes that count: those that are alike once."""
    cells = [one.cell for one in plan.decisions if not (one.repetitions and one.replaces)]
    models = {
        cell.id: getattr(cell.params, "model", None) for cell in cells if plan.past(cell).successes
    }
    rows = [row for row in _that_count(run) if row.cell in models and row.status == Status.OK]
    return [
        kept for _, kept in dict.fromkeys((row.cell, _kept(row, models[row.cell])) for row in rows)
    ]


@dataclass(frozen=True)
class _Row:
    cell: str
    number: int
    status: str
    commit: str | None
    facts: str
    replaces: int | None


def _that_count(run: Run) -> Iterator[_Row]:
    """Of each cell its successes that none has replaced since; where there is none, its latest out-of-memory."""
    read = run.rows("attempts", ["cell", "attempt", "status", "commit", "facts", "replaces"])
    rows = sorted((_Row(*row) for row in read), key=lambda row: (row.cell, row.number))
    for _, of_cell in groupby(rows, key=lambda row: row.cell):
        own = list(of_cell)
        well = [row for row in own if row.status == Status.OK]
        replaced = max((row.replaces or 0 for row in well), default=0)
        yield from [row for row in well if row.number > replaced] or [
            row for row in own if row.status == Status.OOM
        ][-1:]


def _kept(row: _Row, model: str | None = None) -> PriorResult:
    facts = json.loads(row.facts)
    instruments, env = facts.get("instruments"), facts.get("env")
    return PriorResult(
        row.commit,
        None if instruments is None else frozenset(instruments),
        None if env is None else tuple(sorted(env.items())),
        model,
        facts.get("model_source"),
        facts.get(PROGRAM_SOURCE),
    )


def describe_prior_results(
    kept: list[PriorResult], config: SweepConfig, invocation: Mapping[str, Any]
) -> Iterator[str]:
    """A line for each way in which kept cells differ from those that this invocation would measure now."""
    lacking = Counter(
        ", ".join(sorted(missing))
        for one in kept
        if one.instruments is not None
        and (missing := frozenset(config.instruments) - one.instruments)
    )
    for names, count in lacking.items():
        yield f"{_cells(count)} kept as measured, without {names}: {_AGAIN}"
    source, commit = invocation[PROGRAM_SOURCE], invocation["commit"]
    others = Counter(
        (one.program_source, one.commit) for one in kept if one.is_by_another(source, commit)
    )
    here = describe_program(source, commit)
    for other, count in others.items():
        yield f"{_cells(count)} kept as measured by another program, {describe_program(*other)} (here {here}): {_AGAIN}"
    now = invocation["sources"]
    others_of = [
        one.model
        for one in kept
        if one.model and one.model_source and now[one.model] not in (None, one.model_source)
    ]
    for model, count in Counter(others_of).items():
        yield f"{_cells(count)} kept as measured with another source of {model}: {_AGAIN}"
    for env, count in _other_envs(kept, config).items():
        yield f"{_cells(count)} kept as measured with env {env} (here {_told(config.env)}): {_AGAIN}"


def require_same_env(run: Run, plan: Plan, config: SweepConfig) -> None:
    """Rows of one folder stand in one table, whichever command they are of. Raises RunMismatch."""
    anew = (
        one
        for one in plan.decisions
        if one.repetitions and (one.replaces or not plan.past(one.cell).successes)
    )
    replaced = {one.cell.id for one in anew}
    staying = [row for row in _that_count(run) if row.cell not in replaced]
    for status in (Status.OK, Status.OOM):
        for env in _other_envs((_kept(row) for row in staying if row.status == status), config):
            raise RunMismatch(
                f"{run}: holds results measured with env {env} (here {_told(config.env)})",
                f"Name another folder with --out, measure them again with --retry {status}, or add --mixed to keep both in one",
            )


def _other_envs(kept: Iterable[PriorResult], config: SweepConfig) -> Counter[str]:
    here, others = _that_matters(config.env), [dict(one.env) for one in kept if one.env is not None]
    return Counter(_told(env) for env in others if _that_matters(env) != here)


def _that_matters(env: Mapping[str, str]) -> dict[str, str]:
    """Not where a compiler keeps its cache: a folder may be moved."""
    return {name: value for name, value in env.items() if name not in _PLACES}


def _told(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(env.items())) or "of no variables"


def _cells(count: int) -> str:
    return f"{count} cell{'s are' if count > 1 else ' is'}"
