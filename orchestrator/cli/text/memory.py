"""Text of `sweep plan --memory`: the memory that each cell is predicted to need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.cli.text import format_gib, format_table
from orchestrator.common.text import cell_count
from orchestrator.hardware.gpu_catalog import UNTESTED_ON_AMD, GpuModel
from orchestrator.planning.prediction_requests import cap_bytes, predict_memory, verdict_of
from orchestrator.planning.request import SweepRequest
from tasks.prediction.closed_form import ClosedForm, closed_form
from tasks.prediction.records import (
    AS_BLOCKS,
    AS_EAGER,
    CLOSED_FORM,
    COMPILED,
    MARGIN,
    MAY_TAKE_MORE,
    MOST_OVERGUESS,
    Prediction,
    predictable,
    unsupported_reason,
)
from tasks.spec.cell import Cell
from tasks.training.parameters import TrainStepParams

_EXPLAINED = 3  # a sweep of more cells gets only the table
_HOW = {
    "tracked": "every tensor is followed",
    "modelled": "every tensor is followed, and those within fused attention are modelled",
    COMPILED: "every tensor of the code that torch's compiler generates is followed",
    AS_BLOCKS: "compiled as a whole, predicted as compiled blocks: borderline is within 6 %",
    AS_EAGER: "compiled, but predicted as eager for the reason in the row: it usually needs less",
    MAY_TAKE_MORE: "compiled, but predicted as eager for the reason in the row: it may take more",
    CLOSED_FORM: "only parameters, gradients and AdamW's moments: a lower bound",
}
# How the last line counts cells with each verdict, in its order: one cell, and several.
_COUNTED = {
    "fits": ("fits", "fit"),
    "borderline": 2 * (f"borderline (within {100 * MARGIN:g} %)",),
    "perhaps": 2 * ("perhaps (compiled, but predicted as eager)",),
    "unlikely": 2 * (f"unlikely (predicted as eager: more than {MOST_OVERGUESS} times the limit)",),
    "oom": ("does not fit", "do not fit"),
    "bounded": 2 * ("with only a lower bound, which fits; whether activations fit is not known",),
    "unlimited": 2 * ("without a verdict: add --gpu H200 or --set memory_limit_gib=32",),
    "unknown": 2 * ("not predicted",),
}


def describe_memory(request: SweepRequest, card: GpuModel | None) -> Iterator[str]:
    """Yield a table of predicted memory with verdicts, its explanation, and how many cells fit.

    card: the GPU whose memory is the limit; None: only the limit of the cell.
    """
    cells = predictable(request.expansion.cells)
    predictions = predict_memory(cells, card, request.import_paths)
    label = request.expansion.label
    yield ""
    if cells:
        verdict = f"on {card.name}" if card else "verdict"
        header = ["cell", "peak GiB", "first step GiB", "reserved GiB", verdict, "how"]
        rows = [[label(cell), *_memory_row(cell, predictions[cell.id], card)] for cell in cells]
        yield format_table(header, rows)
    if len(request.expansion.cells) <= _EXPLAINED:
        for cell in cells:
            yield from _explain_memory(label(cell), cell, predictions[cell.id])
    used = {prediction.how for prediction in predictions.values() if prediction.how}
    if used and card:
        yield from _explain_limit(card)
        if any(cap_bytes(cell, card) != card.usable_bytes for cell in cells):
            yield "the verdict on a cell with a lower memory_limit_gib is for that limit"
    explained = [f"`{how}`: {meaning}" for how, meaning in _HOW.items() if how in used]
    if explained:
        yield f"how: {'; '.join(explained)}"
    yield from _not_predicted(request.expansion.cells, card)
    if cells:
        yield _count_verdicts(cells, predictions, card)


def _explain_limit(card: GpuModel) -> Iterator[str]:
    """Return how much memory a GPU has for tensors, and when a cell runs out of it."""
    yield (
        f"on {card.name}: {format_gib(card.usable_bytes)} GiB without the CUDA context; oom: torch's"
        " allocator would find no room in them, even after it has returned unused blocks"
    )
    if card.is_amd:
        yield UNTESTED_ON_AMD


def _not_predicted(cells: Iterable[Cell], card: GpuModel | None) -> Iterator[str]:
    """Return a line per reason for which the memory of cells is not predicted."""
    reasons = Counter((cell.params.device, unsupported_reason(cell)) for cell in cells)
    for (device, reason), count in reasons.items():
        if f"on {device} " in reason:  # on a GPU, the same cell would be predicted
            remedy = "add --set device=cuda"
            if card is None:
                remedy += " --gpu H200"
            yield f"{cell_count(count)} on {device}, and memory is predicted for GPUs only: {remedy}"
        elif reason:
            yield f"{cell_count(count)} not predicted: {reason}"


def _count_verdicts(
    cells: Sequence[Cell], predictions: Mapping[str, Prediction], card: GpuModel | None
) -> str:
    counts: Counter[str] = Counter()
    for cell in cells:
        prediction = predictions[cell.id]
        without_verdict = "unlimited" if prediction.how else "unknown"
        if prediction.least_bytes() is not None and cap_bytes(cell, card) is not None:
            without_verdict = "bounded"
        counts[verdict_of(cell, prediction, card) or without_verdict] += 1
    texts = []
    for name, (one, several) in _COUNTED.items():
        if count := counts[name]:
            texts.append(f"{count} {one if count == 1 else several}")
    return ", ".join(texts)


def _memory_row(cell: Cell, prediction: Prediction, card: GpuModel | None) -> list[str]:
    if not prediction.how:
        return ["", "", "", "", prediction.reason]
    verdict = verdict_of(cell, prediction, card) or ""
    least = prediction.least_bytes()
    if least is not None:
        how = f"{prediction.how}, activations unknown: {prediction.reason}"
        return [f"≥ {format_gib(least)}", "", "", verdict, how]
    sizes = (
        prediction.peak_bytes(),
        prediction.peak_bytes(mode="first"),
        prediction.peak_bytes("peak_reserved_bytes"),
    )
    how = f"{prediction.how}: {prediction.reason}" if prediction.reason else prediction.how
    return [*map(format_gib, sizes), verdict, how]


def _explain_memory(label: str, cell: Cell, prediction: Prediction) -> Iterator[str]:
    """Return the peak of one cell by role: by the closed form, if there is one, and as predicted."""
    found = None
    if isinstance(cell.params, TrainStepParams):
        found = closed_form(cell.params)
    found = found or ClosedForm(())
    formulas = {term.name: term.formula for term in found.terms}
    by_formula: Mapping[str, float] = {term.name: term.nbytes for term in found.terms}
    if not by_formula:
        by_formula = prediction.role_bytes("closed_form_bytes")
    at_peak = prediction.role_bytes()
    if not by_formula and not at_peak:
        return
    rows = []
    for role in dict.fromkeys([*by_formula, *at_peak]):
        sizes = (format_gib(nbytes.get(role), 3) for nbytes in (by_formula, at_peak))
        rows.append([role, formulas.get(role, ""), *sizes])
    # Without moments, the terms are those of the parameters alone, and their sum is not the peak.
    total = ""
    if found.moments or not found.terms:
        total = format_gib(sum(by_formula.values()), 3)
    rows.append(["in all", "", total, format_gib(sum(at_peak.values()), 3)])
    yield f"\n{label}: memory at the peak"
    yield format_table(["role", "closed form", "GiB", "predicted GiB"], rows)
    if found.moments:
        moments = [
            f"{term.name} {term.formula} = {format_gib(term.nbytes, 3)}" for term in found.moments
        ]
        yield f"the closed form's peak is the largest of three, in GiB: {', '.join(moments)}"
        yield (
            "B sequences of S tokens, D d_model, F d_ff, H heads, L layers, V words,"
            " A all activations"
        )
    elif found.terms:
        yield (
            "a closed form of the activations exists only for naive attention in fp32, in a step"
            " with a backward pass"
        )
