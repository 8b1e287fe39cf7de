"""Results of earlier runs that stay, although this run would measure them in another way.

Another program, model source, instrument or environment is reported. Other environment variables
are refused, because all rows of a folder stand in one table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from orchestrator.common.errors import RunMismatch
from orchestrator.common.provenance import PROGRAM_SOURCE, describe_program
from orchestrator.common.text import cell_count
from orchestrator.config.schema import SweepConfig
from orchestrator.planning.invocation import Invocation
from orchestrator.planning.plan import Plan
from orchestrator.planning.preflight import Notify
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run import Run
from tasks.spec.status import Status

# A folder may be moved: where compilers cache their code changes no result.
_CACHE_VARIABLES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})
_REMEDY = "`--retry ok` measures them again"


@dataclass(frozen=True)
class PriorResult:
    """How a cell was measured that this run leaves as it is. None: not recorded by an older version."""

    commit: str | None
    instruments: frozenset[str] | None
    env: tuple[tuple[str, str], ...] | None
    model: str | None = None
    model_source: str | None = None
    program_source: str | None = None

    def is_by_other_program(self, invocation: Invocation) -> bool:
        """True if another version of the program measured it."""
        if self.program_source is not None:
            return self.program_source != invocation.program_source
        is_known = None not in (self.commit, invocation.commit)
        return is_known and self.commit != invocation.commit


@dataclass(frozen=True)
class _Row:
    cell: str
    number: int
    status: str
    commit: str | None
    facts: str
    replaces: int | None


def check_prior_results(
    request: SweepRequest, plan: Plan, invocation: Invocation, notify: Notify
) -> None:
    """Report how earlier results differ. Raise RunMismatch for other environment variables."""
    results = read_prior_results(request.run, plan)
    if plan.to_run and not request.execution.allow_mixed:
        require_same_env(request, plan)
    for line in describe_prior_results(results, request.config, invocation):
        notify(line)


def read_prior_results(run: Run, plan: Plan) -> list[PriorResult]:
    """Return the valid successes that this run does not replace; equal ones of a cell once."""
    models = {
        decision.cell.id: getattr(decision.cell.params, "model", None)
        for decision in plan.decisions
        if not (decision.repetitions and decision.replaces)
    }
    stored = [
        (row.cell, _read_result(row, models[row.cell]))
        for row in _valid_rows(run)
        if row.status == Status.OK and row.cell in models
    ]
    return [result for _, result in dict.fromkeys(stored)]


def describe_prior_results(
    results: list[PriorResult], config: SweepConfig, invocation: Invocation
) -> Iterator[str]:
    """Yield a line for each way in which earlier results differ from those of this run."""
    for instruments, count in _missing_instruments(results, config).items():
        yield f"{_stored(count)} without {instruments}: {_REMEDY}"
    others = [result for result in results if result.is_by_other_program(invocation)]
    here = describe_program(invocation.program_source, invocation.commit)
    programs = Counter((result.program_source, result.commit) for result in others)
    for program, count in programs.items():
        named = describe_program(*program)
        yield f"{_stored(count)} by another program, {named} (here {here}): {_REMEDY}"
    for model, count in _changed_models(results, invocation).items():
        yield f"{_stored(count)} with another source of {model}: {_REMEDY}"
    for env, count in _other_environments(results, config).items():
        own = _describe_environment(config.env)
        yield f"{_stored(count)} with other environment variables: {env} (here {own}): {_REMEDY}"


def require_same_env(request: SweepRequest, plan: Plan) -> None:
    """Raise RunMismatch if results that stay were measured with other environment variables."""
    replaced = {
        decision.cell.id
        for decision in plan.decisions
        if decision.repetitions and (decision.replaces or not plan.history(decision.cell).successes)
    }
    staying = [row for row in _valid_rows(request.run) if row.cell not in replaced]
    for status in (Status.OK, Status.OOM):
        results = [_read_result(row) for row in staying if row.status == status]
        for env in _other_environments(results, request.config):
            own = _describe_environment(request.config.env)
            raise RunMismatch(
                f"{request.run}: has results with other environment variables: {env} (here {own})",
                f"Name another folder with --out, measure them again with --retry {status},"
                " or add --mixed to allow both in one",
            )


def _valid_rows(run: Run) -> Iterator[_Row]:
    """Yield the valid successes of each cell, or its latest OOM if there are none."""
    stored = run.rows("attempts", ["cell", "attempt", "status", "commit", "facts", "replaces"])
    rows = sorted((_Row(*row) for row in stored), key=lambda row: (row.cell, row.number))
    for _, attempts in groupby(rows, key=lambda row: row.cell):
        own = list(attempts)
        successes = [row for row in own if row.status == Status.OK]
        replaced = max((row.replaces or 0 for row in successes), default=0)
        valid = [row for row in successes if row.number > replaced]
        yield from valid or [row for row in own if row.status == Status.OOM][-1:]


def _read_result(row: _Row, model: str | None = None) -> PriorResult:
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


def _missing_instruments(results: Iterable[PriorResult], config: SweepConfig) -> Counter[str]:
    missing = [
        frozenset(config.instruments) - result.instruments
        for result in results
        if result.instruments is not None
    ]
    return Counter(", ".join(sorted(names)) for names in missing if names)


def _changed_models(results: Iterable[PriorResult], invocation: Invocation) -> Counter[str]:
    sources = invocation.sources or {}
    return Counter(
        result.model
        for result in results
        if result.model
        and result.model_source
        and sources.get(result.model) not in (None, result.model_source)
    )


def _other_environments(results: Iterable[PriorResult], config: SweepConfig) -> Counter[str]:
    own = _without_caches(config.env)
    environments = [dict(result.env) for result in results if result.env is not None]
    return Counter(
        _describe_environment(env) for env in environments if _without_caches(env) != own
    )


def _without_caches(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _CACHE_VARIABLES}


def _describe_environment(env: Mapping[str, str]) -> str:
    assignments = " ".join(f"{name}={value}" for name, value in sorted(env.items()))
    return assignments or "none"


def _stored(count: int) -> str:
    return f"{cell_count(count)} measured earlier"
