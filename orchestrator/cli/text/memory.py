"""Text of `sweep plan --memory`: the memory that each cell is predicted to take."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.common.text import cell_count
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.memory_prediction import predict_memory, verdict_of
from orchestrator.planning.request import SweepRequest
from tasks.prediction.closed_form import closed_form
from tasks.prediction.records import (
    AS_EAGER,
    CLOSED_FORM,
    MARGIN,
    MOST_OVERGUESS,
    Prediction,
    Verdict,
    unsupported_reason,
)
from tasks.spec.cell import Cell
from tasks.training.parameters import TrainStepParams

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


def describe_memory(request: SweepRequest, card: GpuModel | None) -> Iterator[str]:
    """A table of what memory each cell is predicted to take, and whether it fits under its limit,
    or on `card`; what its words mean, and how many fit.
    """
    cells = request.expansion.cells
    foretold = [cell for cell in cells if not unsupported_reason(cell)]
    predictions = predict_memory(foretold, card, request.import_paths)
    yield ""
    if foretold:
        yield from _memory_table(request, foretold, predictions, card)
    for cell in foretold if len(cells) <= _EXPLAINED else ():
        yield from _explain_memory(request.expansion.label(cell), cell, predictions[cell.id])
    yield from _explain_how(prediction.how for prediction in predictions.values())
    yield from _not_foretold([cell for cell in cells if unsupported_reason(cell)], card)
    if foretold:
        yield _how_many_fit(
            [
                (predictions[cell.id], verdict_of(cell, predictions[cell.id], card))
                for cell in foretold
            ]
        )


def _memory_table(
    request: SweepRequest,
    cells: Sequence[Cell],
    predictions: Mapping[str, Prediction],
    card: GpuModel | None,
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


def _not_foretold(cells: Iterable[Cell], card: GpuModel | None) -> Iterator[str]:
    """Of which no memory is predicted, and why: a line a reason."""
    reasons = Counter((cell.params.device, unsupported_reason(cell)) for cell in cells)
    for (device, reason), count in reasons.items():
        if f"on {device} " in reason:  # on a GPU it would be
            gpu = shlex.quote(card.name if card else "H200")
            yield f"{cell_count(count)} on {device}, and memory is predicted for GPUs only: add --set device=cuda --gpu {gpu}"
        else:
            yield f"{cell_count(count)} not predicted: {reason}"


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


def _memory_of(cell: Cell, prediction: Prediction, card: GpuModel | None) -> list[str]:
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
    """The peak of one cell by what it is made of: by the formula, where there is one, and as
    predicted.
    """
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
