"""Results of earlier runs in a folder: what is continued, and what this run would measure otherwise.

Another program, model source, instrument or environment is reported. Other environment variables
are refused, because all rows of a folder stand in one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from orchestrator.common.errors import RunMismatch
from orchestrator.common.output import Notify
from orchestrator.common.provenance import PROGRAM_SOURCE, describe_program
from orchestrator.common.text import cell_count
from orchestrator.config.schema import SweepConfig
from orchestrator.planning.cell_decisions import Plan, describe_continuation
from orchestrator.planning.invocation import Invocation
from orchestrator.planning.request import SweepRequest
from orchestrator.store.cell_state import CellState
from orchestrator.store.run import Run, describe_incomplete
from tasks.spec.axes import Values, leave_out
from tasks.spec.messages import assignments
from tasks.spec.status import Status

# A folder may be moved: where compilers cache their code changes no result.
_CACHE_VARIABLES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})


class _Row(NamedTuple):
    cell: str
    number: int
    status: str
    commit: str | None
    facts: str


def check_prior_results(
    request: SweepRequest, plan: Plan, invocation: Invocation, notify: Notify
) -> None:
    """Report what the folder has already. Raise RunMismatch for other environment variables."""
    if message := describe_continuation(plan):
        notify(message)
    if not request.run.exists:
        notify(f"{request.run}: run.json is gone, and with it what --fresh and --retry replaced")
    if incomplete := describe_incomplete(request.run, plan.incomplete):
        notify(str(incomplete))
    if plan.to_run and not request.execution.allow_mixed:
        require_same_env(request, plan)
    for line in describe_prior_results(request, plan, invocation):
        notify(line)


def describe_prior_results(
    request: SweepRequest, plan: Plan, invocation: Invocation
) -> Iterator[str]:
    """Yield a line for each way in which results that stay differ from those of this run."""
    name = request.run.read_manifest().get("name", request.config.name)
    if name != request.config.name:
        yield f"{request.run}: has results of another config, {name}, and they stay in its tables"
    models: dict[str, str | None] = {}
    replaced = _replaced_cells(plan)
    for decision in plan.decisions:
        if decision.cell.id not in replaced:
            models[decision.cell.id] = getattr(decision.cell.params, "model", None)
    cells: dict[str, set[str]] = {}  # by the difference
    for row in _shown_rows(request.run, plan):
        if row.status == Status.OK and row.cell in models:
            for text in _differences(row, models[row.cell], request.config, invocation):
                cells.setdefault(text, set()).add(row.cell)
    changed = [one for one in plan.decisions if one.repetitions and plan.state(one.cell).obsolete]
    if changed:
        yield f"{cell_count(len(changed))} failed with another source of the model; measured again"
    for text in sorted(cells):
        count = cell_count(len(cells[text]))
        yield f"{count} measured earlier {text}: measure again with `--retry ok`"


def _differences(
    row: _Row, model: str | None, config: SweepConfig, invocation: Invocation
) -> Iterator[str]:
    """Yield how a result was measured otherwise. Facts that an older version left out are skipped."""
    facts = json.loads(row.facts)
    missing = set(config.instruments).difference(facts.get("instruments", config.instruments))
    if missing:
        yield f"without {', '.join(sorted(missing))}"
    source = facts.get(PROGRAM_SOURCE)
    if is_by_other_program(source, row.commit, invocation):
        here = describe_program(invocation.program_source, invocation.commit)
        yield f"by another program, {describe_program(source, row.commit)} (here {here})"
    model_source = (invocation.sources or {}).get(model or "")
    if model_source and facts.get("model_source") not in (None, model_source):
        yield f"with another source of {model}"
    if env := _other_env(facts, config):
        yield env


def is_by_other_program(source: str | None, commit: str | None, invocation: Invocation) -> bool:
    """True if another version of the program measured a result with this source and commit."""
    # Commits are compared only for old results: many commits change nothing that measures.
    if source is not None:
        return source != invocation.program_source
    return None not in (commit, invocation.commit) and commit != invocation.commit


def require_same_env(request: SweepRequest, plan: Plan) -> None:
    """Raise RunMismatch if results that stay were measured with other environment variables."""
    replaced = _replaced_cells(plan)
    for row in sorted(_shown_rows(request.run, plan), key=lambda row: row.status != Status.OK):
        env = None if row.cell in replaced else _other_env(json.loads(row.facts), request.config)
        if env:
            raise RunMismatch(
                f"{request.run}: has results {env}",
                f"Name another folder with --out, measure them again with --retry {row.status},"
                " or add --mixed to allow both in one",
            )


def _replaced_cells(plan: Plan) -> set[str]:
    """Return the ids of the cells whose earlier results this run replaces."""
    replaced = set()
    for decision in plan.decisions:
        is_replaced = decision.is_marked or not plan.state(decision.cell).since_mark.valid
        if decision.repetitions and is_replaced:
            replaced.add(decision.cell.id)
    return replaced


def _shown_rows(run: Run, plan: Plan) -> Iterator[_Row]:
    """Yield the valid successes of each cell, or the attempt that ran out of memory instead."""
    columns = ["cell", "attempt", "status", "commit", "facts"]
    for row in map(_Row._make, run.rows("attempts", columns)):
        state = plan.states.get(row.cell, CellState())  # a running sweep may add rows
        shown = state.shown.number if state.shown and state.status == Status.OOM else None
        if row.number in (*state.valid, shown):
            yield row


def _other_env(facts: Values, config: SweepConfig) -> str:
    """Return how the environment variables of a result differ; empty if they do not."""
    env = facts.get("env")
    ignored = _CACHE_VARIABLES
    if env is None or leave_out(env, ignored) == leave_out(config.env, ignored):
        return ""
    here = _describe_env(config.env)
    return f"with other environment variables: {_describe_env(env)} (here {here})"


def _describe_env(env: Mapping[str, str]) -> str:
    return " ".join(sorted(assignments(env))) or "none"
