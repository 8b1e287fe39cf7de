"""What `status` and `show` print: read only, without torch and without Ray."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.execution.measuring_process import git_commit
from orchestrator.hardware.gpu_catalog import Card, driver_name
from orchestrator.hardware.nvml import gpu_names
from orchestrator.planning.duration_estimate import Conditions, Estimator, expect
from orchestrator.planning.fingerprints import known_fingerprints
from orchestrator.planning.invocation import as_again, command_in_copy, last_command
from orchestrator.planning.memory_prediction import predict_memory, verdict_of
from orchestrator.planning.plan import PENDING, Plan
from orchestrator.planning.resumption import going_on
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.run import Run, find_cell
from orchestrator.sweep.console import format_seconds, so_many, where_it_ended, why_it_ended
from orchestrator.sweep.pipeline import Request, make_settings, plan_request
from tasks.prediction.closed_form import closed_form
from tasks.prediction.records import (
    AS_EAGER,
    CLOSED_FORM,
    MARGIN,
    MOST_OVERGUESS,
    Prediction,
    Verdict,
    why_not,
)
from tasks.spec.attempt import LOG_FILE
from tasks.spec.cell import Cell, in_a_line
from tasks.training.parameters import TrainStepParams

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 20
_EXPLAINED = 3  # cells, beyond which their memory is a table alone
_HOW = {
    "tracked": "every tensor followed",
    "modelled": "every tensor followed but those within fused attention, which are modelled",
    AS_EAGER: "compiled, but predicted as if eager, an upper guess",
    CLOSED_FORM: "parameters, gradients and AdamW's moments alone, a lower bound",
}
_FITTING = {  # what is said of one cell, and of many
    "fits": ("fits", "fit"),
    "borderline": 2 * (f"borderline (within {100 * MARGIN:g} %)",),
    "perhaps": 2 * ("perhaps (compiled: predicted as eager, an upper guess)",),
    "unlikely": 2
    * (f"unlikely (compiled: predicted more than {MOST_OVERGUESS} times what there is)",),
    "oom": ("does not fit", "do not fit"),
    "unlimited": 2 * ("without a verdict: add --gpu H200 or --set memory_limit_gib=32",),
    "unknown": 2 * ("not predicted",),
}
_GIB = 1024**3


def describe_plan(
    plan: Plan, label: Callable[[Cell], str], expected: str, everything: bool
) -> Iterator[str]:
    """The cells, how many are done, what will run, and why. expected: what is said of how long it will take."""
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(plan.statuses().items()))
    yield f"{so_many(len(plan.decisions))}: {statuses}"
    inferred = (
        f", and {len(plan.inferred)} are inferred to run out of memory" if plan.inferred else ""
    )
    yield f"{len(set(plan.to_measure))} to run{_in_all(plan)}{inferred}"
    if expected:
        yield expected
    width = len("infer" if plan.inferred else "keep")
    chosen = sorted(plan.decisions, key=lambda decision: not decision.times)
    for decision in chosen if everything else chosen[:_SHOWN]:
        witness = plan.inferred.get(decision.cell.id)
        mark = "infer" if witness else "run" if decision.times else "keep"
        reason = (
            f"asks for no less than {witness.id}, which ran out of memory"
            if witness
            else decision.reason
        )
        often = f", {decision.times} times" if decision.times > 1 and not witness else ""
        yield f"  {mark:{width}} {decision.cell.id} {label(decision.cell)}  ({reason}{often})"
    if not everything and len(chosen) > _SHOWN:
        yield f"  … and {len(chosen) - _SHOWN} more: --all prints them"


def _in_all(plan: Plan) -> str:
    times = len(plan.to_measure)
    return f", {times} times in all" if times > len(set(plan.to_measure)) else ""


def describe_cost(request: Request, plan: Plan, card: Card | None) -> str:
    """How long what is to run will take: on `card`, or on the GPUs that are here. Empty where nothing can be said."""
    cells = plan.to_measure
    if not cells:
        return ""
    on_gpu = any(cell.params.device == "cuda" for cell in cells)
    here = gpu_names() if on_gpu and card is None else ()
    gpu = (driver_name(card) if card else next(iter(here), None)) if on_gpu else None
    elsewhere = card is not None and gpu not in _measured_on(request)
    conditions = Conditions.of(make_settings(request, None), gpu)
    estimator = Estimator(request.expansion.cells, {} if elsewhere else plan.history, conditions)
    widest = max(cell.params.gpu_count for cell in cells)
    expected = expect(estimator, cells, {"cuda": max(1, len(here), widest)})
    if expected:
        where = _where(cells, card, here, widest)
        return f"expected: {format_seconds(expected.wall_s)} on {where}{',' if on_gpu else ''} {expected}"
    if not on_gpu:
        return ""
    named = card.name if card else next(iter(here), None)
    return (
        f"expected time: unknown, no source gives a peak speed of {named}"
        if named
        else "expected time: unknown, no GPU is here; add --gpu H200 for an estimate"
    )


def _where(cells: Sequence[Cell], card: Card | None, here: Sequence[str], widest: int) -> str:
    devices = {cell.params.device for cell in cells}
    if "cuda" not in devices:
        return "the CPU" if devices == {"cpu"} else "this machine"
    if card is not None:
        return f"one {card.name}" if widest <= 1 else f"{widest} × {card.name}"
    if len(here) < widest:
        return f"a host with {widest} GPUs" if widest > 1 else "one GPU"
    return f"this machine's {len(here)} GPU{'s' if len(here) > 1 else ''}"


def _measured_on(request: Request) -> set[str]:
    """The GPUs that the run's rows are of."""
    return {str(mark.get("gpu")) for mark in known_fingerprints(request.run).get("cuda", [])}


def describe_memory(request: Request, card: Card | None) -> Iterator[str]:
    """A table of what memory each cell is predicted to take, and whether it fits under its limit, or on `card`; what its words
    mean, and how many fit."""
    cells = request.expansion.cells
    foretold = [cell for cell in cells if not why_not(cell)]
    predictions = predict_memory(foretold, card, request.import_paths)
    yield ""
    if foretold:
        yield from _memory_table(request, foretold, predictions, card)
    for cell in foretold if len(cells) <= _EXPLAINED else ():
        yield from _explain_memory(request.expansion.label(cell), cell, predictions[cell.id])
    yield from _explain_how(prediction.how for prediction in predictions.values())
    yield from _not_foretold([cell for cell in cells if why_not(cell)], card)
    if foretold:
        yield _how_many_fit(
            [
                (predictions[cell.id], verdict_of(cell, predictions[cell.id], card))
                for cell in foretold
            ]
        )


def _memory_table(
    request: Request,
    cells: Sequence[Cell],
    predictions: Mapping[str, Prediction],
    card: Card | None,
) -> Iterator[str]:
    from tabulate import tabulate  # 60 ms that no other command here has to pay

    rows = [
        [request.expansion.label(cell), *_memory_of(cell, predictions[cell.id], card)]
        for cell in cells
    ]
    header = [
        "cell",
        "peak GiB",
        "first step GiB",
        "reserved GiB",
        f"on {card.name}" if card else "verdict",
        "how",
    ]
    kept = [place for place in range(len(header)) if any(row[place] for row in rows)]
    yield tabulate(
        [[row[place] for place in kept] for row in rows],
        [header[place] for place in kept],
        disable_numparse=True,
    )


def _explain_how(words: Iterable[str]) -> Iterator[str]:
    """The words of that column, as far as they occur."""
    there = set(words)
    if said := [f"`{word}`: {what}" for word, what in _HOW.items() if word in there]:
        yield f"how: {'; '.join(said)}"


def _not_foretold(cells: Iterable[Cell], card: Card | None) -> Iterator[str]:
    """Of which no memory is predicted, and why: a line a reason."""
    reasons = Counter((cell.params.device, why_not(cell)) for cell in cells)
    for (device, reason), count in reasons.items():
        if f"on {device} " in reason:  # on a GPU it would be
            gpu = shlex.quote(card.name if card else "H200")
            yield f"{so_many(count)} on {device}, and memory is predicted for GPUs only: add --set device=cuda --gpu {gpu}"
        else:
            yield f"{so_many(count)} not predicted: {reason}"


def _how_many_fit(found: Iterable[tuple[Prediction, Verdict | None]]) -> str:
    counts = Counter(_fitting(*one) for one in found)
    said = ((counts[words], words) for words in _FITTING.values())
    return ", ".join(
        f"{count} {one if count == 1 else many}" for count, (one, many) in said if count
    )


def _fitting(prediction: Prediction, verdict: Verdict | None) -> tuple[str, str]:
    """What is said of one cell, and of many."""
    if verdict is None:
        return _FITTING["unlimited" if prediction.how else "unknown"]
    return _FITTING[verdict]


def _memory_of(cell: Cell, prediction: Prediction, card: Card | None) -> list[str]:
    if not prediction.how:
        return ["", "", "", "", prediction.reason]
    least = prediction.least_bytes()
    if least is not None:
        verdict = verdict_of(cell, prediction, card) or ""
        return [
            f"≥ {least / _GIB:.2f}",
            "",
            "",
            verdict,
            f"{prediction.how}, activations unknown: {prediction.reason}",
        ]
    sizes = (
        prediction.peak_bytes(),
        prediction.peak_bytes(mode="first"),
        prediction.peak_bytes("peak_reserved_bytes"),
    )
    return [
        *(f"{nbytes / _GIB:.2f}" for nbytes in sizes if nbytes),
        verdict_of(cell, prediction, card) or "",
        prediction.how,
    ]


def _explain_memory(label: str, cell: Cell, prediction: Prediction) -> Iterator[str]:
    """The peak of one cell by what it is made of: by the formula, where there is one, and as predicted."""
    from tabulate import tabulate

    found = closed_form(cell.params) if isinstance(cell.params, TrainStepParams) else None
    formulas = {term.name: term.formula for term in found.terms} if found else {}
    by_formula = (
        {term.name: term.nbytes for term in found.terms}
        if found
        else prediction.role_bytes("closed_form_bytes")
    )
    at_peak = prediction.role_bytes()
    if not by_formula and not at_peak:
        return
    rows = [
        [role, formulas.get(role, ""), _gib(by_formula.get(role)), _gib(at_peak.get(role))]
        for role in dict.fromkeys([*by_formula, *at_peak])
    ]
    whole = found is None or found.moments
    rows.append(
        ["in all", "", _gib(sum(by_formula.values())) if whole else "", _gib(sum(at_peak.values()))]
    )
    yield f"\n{label}: what is there at the peak"
    yield tabulate(rows, ["", "closed form", "GiB", "predicted GiB"], disable_numparse=True)
    if found and found.moments:
        moments = ", ".join(
            f"{one.name} {one.formula} = {_gib(one.nbytes)}" for one in found.moments
        )
        yield f"the closed form's peak is the largest of three, in GiB: {moments}"
        yield "B sequences of S tokens, D d_model, F d_ff, H heads, L layers, V words, A all activations"
    elif found:
        yield "of activations there is a closed form for naive attention in fp32, in a step with a backward pass"


def _gib(nbytes: float | None) -> str:
    return "" if not nbytes else f"{nbytes / _GIB:.3f}"


def describe_status(request: Request) -> Iterator[str]:
    """Counts by status, what failed and why, what would run next."""
    plan = plan_request(request, going_on(request, *as_again(request, git_commit())))
    for status, count in sorted(plan.statuses().items()):
        yield f"{count:>6} {status}"
    asked = {decision.cell.id for decision in plan.decisions}
    others = Counter(str(past.status) for cell, past in plan.history.items() if cell not in asked)
    if others:
        said = ", ".join(f"{count} {status}" for status, count in sorted(others.items()))
        yield f"and {sum(others.values())} cells that the last command did not ask for: {said}"
    yield from _failures(request)
    to_run = list(dict.fromkeys(plan.to_measure))
    if request.run.is_published:
        yield from _describe_closed(request.run, plan)
    else:
        yield f"{last_command(request.run)} would run {len(to_run)} of {so_many(len(plan.decisions))}{_in_all(plan)}"
    for cell in to_run[:_SHOWN]:
        yield f"  {cell.id} {request.expansion.label(cell)}"
    if len(to_run) > _SHOWN:
        yield f"  … and {len(to_run) - _SHOWN} more"


def _describe_closed(run: Run, plan: Plan) -> Iterator[str]:
    """Of a published run: what was measured, and how to go on in a copy, where something is left."""
    asked, pending = len(plan.decisions), plan.statuses()[PENDING]
    yield f"this run is published and closed: {asked - pending} of the {so_many(asked)} asked for were measured"
    if plan.to_measure:
        copy = Path("results") / run.folder.name
        if copy.exists():
            copy = copy.with_name(f"{copy.name}-copy")
        yield f"to go on, copy it: cp -r {shlex.quote(str(run))} {shlex.quote(str(copy))}"
        yield f"then: {command_in_copy(run, copy)}"
        yield f"which would run {so_many(len(set(plan.to_measure)))}{_in_all(plan)}:"


def describe_cell(run: Run, prefix: str) -> Iterator[str]:
    """One cell: parameters, attempts with their evidence, samples, log, and how to measure it by hand."""
    attempts = run.require().read("attempts")
    cell = find_cell(prefix, attempts["cell"].unique(), run)
    attempts, samples, predictions = (
        table[table["cell"] == cell]
        for table in (attempts, run.read("samples"), run.read("predictions"))
    )
    rows = attempts.sort_values("attempt").to_dict("records")
    params, last = json.loads(rows[-1]["params"]), rows[-1]
    yield f"cell {cell} of task {last['task']}, version {last['task_version']}"
    yield in_a_line(
        "parameters: "
        + ", ".join(f"{name}={value}" for name, value in params.items() if value not in (None, {}))
    )
    for row in rows:
        yield from _attempt(row)
    yield from _result(attempts, samples, predictions)
    yield from _samples(samples[samples["attempt"] == last["attempt"]])
    run.bring_artifacts(cell)
    left = read_artifacts(run, cell, int(last["attempt"]))
    if left.log:
        yield f"log: {run.attempt_folder(cell, int(last['attempt'])) / LOG_FILE}"
        yield from (f"  {_on_a_terminal(line)}" for line in left.log)
    if left.by_hand:
        yield f"by hand: {left.by_hand}"
    if run.is_published:
        yield "logs and artifacts are not published, nor how to measure this cell by hand"


def _failures(request: Request) -> Iterator[str]:
    columns = ["cell", "attempt", "status", "stage", "phase", "evidence"]
    last = {
        row[0]: row[2:] for row in sorted(request.run.rows("attempts", columns), key=itemgetter(1))
    }
    ended = [(cell, *last[cell.id]) for cell in request.expansion.cells if cell.id in last]
    bad = [end for end in ended if end[1] not in ("ok", "skipped")]
    for cell, status, stage, phase, evidence in bad[:_SHOWN]:
        said = why_it_ended(json.loads(evidence))
        yield f"  {status} {cell.id} {request.expansion.label(cell)} in {where_it_ended(stage, phase) or 'start'}: {said}"
    if len(bad) > _SHOWN:
        yield f"  … and {len(bad) - _SHOWN} more that did not end well"


def _attempt(row: Mapping[Any, Any]) -> Iterator[str]:
    where = where_it_ended(row["stage"], row["phase"])
    end = f"{row['status']} in {where}" if where else row["status"]
    yield f"attempt {row['attempt']}: {end}, {row['wall_s']:.1f} s, {row['started_at']}"
    timing = {
        name: value
        for name, value in json.loads(row["facts"]).items()
        if name.startswith("timing_")
    }
    for name, value in {**timing, **json.loads(row["evidence"])}.items():
        text = (
            f"{value:,}"
            if isinstance(value, int) and name.endswith("_bytes")
            else str(value).strip()
        )
        yield f"  {name}: " + "\n    ".join(map(_on_a_terminal, text.split("\n")))


def _on_a_terminal(line: str) -> str:
    """What a cell said, which commands nothing there."""
    return in_a_line(line.expandtabs())


def _result(
    attempts: pd.DataFrame, samples: pd.DataFrame, predictions: pd.DataFrame
) -> Iterator[str]:
    """What the tables say of a cell, as far as its own rows tell."""
    from orchestrator.analysis.axes import is_null
    from orchestrator.analysis.cells import derive_cells
    from orchestrator.report.tables.formatters import gib, median_interval, number, of_steps, plain

    (row,) = derive_cells(attempts, samples, predictions).to_dict("records")
    shown = {
        "step_ms_median": ("step, ms", of_steps(median_interval("step_ms"))),
        "tokens_per_s": ("tokens a second", number("tokens_per_s", ",.0f")),
        "mfu": ("of the GPU's peak", number("mfu", ".1%")),
        "peak_allocated_bytes": ("peak allocated, GiB", gib("peak_allocated_bytes")),
        "peak_reserved_bytes": ("peak reserved, GiB", gib("peak_reserved_bytes")),
        "gpu": ("on", plain("gpu")),
        "torch": ("torch", plain("torch")),
        "commit": ("commit", plain("commit")),
    }
    known = [
        f"  {name}: {show(row)}"
        for column, (name, show) in shown.items()
        if not is_null(row.get(column))
    ]
    if row["status"] == "ok" and known:
        yield f"result, of attempt {row['attempt']}:"
        yield from known


def _samples(samples: pd.DataFrame) -> Iterator[str]:
    for keys, group in samples.groupby(
        ["instrument", "mode", "phase", "metric", "unit"], sort=False, dropna=False
    ):
        values = ", ".join(_value(value, str(keys[-1])) for value in group["value"])
        *names, unit = (str(key) for key in keys)
        yield f"  {' '.join(filter(None, names))} [{unit}]: {values}"


def _value(value: float, unit: str) -> str:
    if value != value:
        return "null"
    return f"{value:,.0f}" if unit == "bytes" else f"{value:g}"
