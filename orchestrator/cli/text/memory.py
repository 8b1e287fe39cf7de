"""Text of `sweep plan --memory`: the memory that each cell is predicted to need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.analysis.axes import NOTHING
from orchestrator.cli.text.changes import changes_of
from orchestrator.common.text import cell_count
from orchestrator.config.cell_labels import CellLabels
from orchestrator.hardware.gpu_catalog import UNTESTED_ON_AMD, GpuModel
from orchestrator.planning.prediction_requests import (
    cap_bytes,
    predict_memory,
    reason_of,
    require_prediction,
    verdict_of,
)
from orchestrator.planning.request import SweepRequest
from orchestrator.report.formats.terminal import Screen, dense_table_text, folded_table_text
from orchestrator.report.tables.formatters import to_gib
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.table import MISSING, NOTES, Entry, RenderedTable, at_least
from tasks.prediction import records
from tasks.prediction.closed_form import ClosedForm, closed_form
from tasks.prediction.records import Prediction
from tasks.spec.cell import Cell
from tasks.training.parameters import TrainStepParams

_TASK = "task"
_TOO_LARGE = ("oom", "unlikely")
_AUTOCAST = ("bf16", "fp16")
_EXPLAINED = 3  # a sweep of more cells gets only the table
_HOW = {
    "tracked": "every tensor is followed",
    "modelled": "every tensor is followed, and those within fused attention are modelled",
    records.INCOMPLETE: "every tensor is followed, but not what its note names",
    records.COMPILED: "every tensor of the code that torch's compiler generates is followed",
    records.AS_BLOCKS: "compiled as a whole, predicted as compiled blocks: borderline is within 6 %",
    records.AS_EAGER: "compiled, but predicted as eager for the reason in its note: it usually needs less",
    records.MAY_TAKE_MORE: "compiled, but predicted as eager for the reason in its note: it may take more",
    records.CLOSED_FORM: "only parameters, gradients and AdamW's moments: a lower bound",
}
# How the last line counts cells with each verdict, in its order: one cell, and several.
_COUNTED = {
    "fits": ("fits", "fit"),
    "borderline": 2 * (f"borderline (within {100 * records.MARGIN:g} %)",),
    "perhaps": 2 * ("perhaps (see its note)",),
    "unlikely": 2 * ("unlikely (see its note)",),
    "oom": ("does not fit", "do not fit"),
    "bounded": 2 * ("with only a lower bound, which fits; whether activations fit is not known",),
    "unlimited": 2 * ("without a verdict: add --gpu H200 or --set memory_limit_gib=32",),
    "unknown": 2 * ("not predicted",),
}


def describe_memory(request: SweepRequest, card: GpuModel | None, screen: Screen) -> Iterator[str]:
    """Yield a table of predicted memory with verdicts, its explanation, and how many cells fit.

    card: the GPU whose memory is the limit; None: only the limit of the cell. The tables fit the
    screen. Raise ConfigError if no cell could be predicted.
    """
    cells = records.predictable(request.expansion.cells)
    predictions = predict_memory(cells, card, request.import_paths)
    require_prediction(cells, predictions)
    label = request.expansion.label
    yield ""
    if cells:
        table = _memory_table(cells, predictions, card, label)
        yield dense_table_text(table, screen, "--format json, or fewer cells with --where")
    if len(request.expansion.cells) <= _EXPLAINED:
        for cell in cells:
            yield from _explain_memory(label(cell), cell, predictions[cell.id], screen)
    too_large = [
        cell for cell in cells if verdict_of(cell, predictions[cell.id], card) in _TOO_LARGE
    ]
    yield from _changes(request, too_large, card)
    used = {prediction.how for prediction in predictions.values() if prediction.how}
    if used and card:
        yield (
            f"on {card.name}: {to_gib(card.usable_bytes)} GiB without the CUDA context; oom: torch's"
            " allocator would find no room in them, even after it has returned unused blocks"
        )
        if card.is_amd:
            yield UNTESTED_ON_AMD
        if any(cap_bytes(cell, None) == cap_bytes(cell, card) for cell in cells):
            yield "the verdict on a cell with a lower memory_limit_gib is for that limit"
    explained = [f"`{how}`: {meaning}" for how, meaning in _HOW.items() if how in used]
    if explained:
        yield f"how: {'; '.join(explained)}"
    yield from _weights_in_fp32(cells, predictions)
    yield from _not_predicted(request.expansion.cells, card)
    if cells:
        yield _count_verdicts(cells, predictions, card)


def _changes(
    request: SweepRequest, too_large: Sequence[Cell], card: GpuModel | None
) -> Iterator[str]:
    """Yield the changes that make cells fit, if they are few."""
    if len(too_large) > _EXPLAINED:
        yield f"to list what makes cells fit, choose up to {_EXPLAINED} of them with --where"
        return
    for cell in too_large:
        yield from changes_of(cell, request.expansion.label(cell), card, request.import_paths)


def _weights_in_fp32(cells: Iterable[Cell], predictions: Mapping[str, Prediction]) -> Iterator[str]:
    """Return how large the weights are that autocast leaves in fp32, if there are any."""
    largest = 0.0
    for cell in cells:
        if cell.params.values()["precision"] in _AUTOCAST:
            prediction = predictions[cell.id]
            roles = prediction.role_bytes() or prediction.role_bytes("closed_form_bytes")
            largest = max(largest, roles.get("parameters", 0))
    if largest:
        yield (
            f"bf16 and fp16 are autocast, and weights stay in fp32: up to {to_gib(largest)} GiB;"
            " precision=bf16_pure saves half of that"
        )


def _not_predicted(cells: Iterable[Cell], card: GpuModel | None) -> Iterator[str]:
    """Return a line per reason for which the memory of cells is not predicted."""
    reasons = Counter((cell.params.device, records.unsupported_reason(cell)) for cell in cells)
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
    return ", ".join(
        f"{counts[name]} {one if counts[name] == 1 else several}"
        for name, (one, several) in _COUNTED.items()
        if counts[name]
    )


def _memory_table(
    cells: Sequence[Cell],
    predictions: Mapping[str, Prediction],
    card: GpuModel | None,
    labels: CellLabels,
) -> RenderedTable:
    """Return the table of predictions. The reason of each is a note, however long it is."""
    verdict = f"on {card.name}" if card else "verdict"
    rows = []
    for cell in cells:
        prediction = predictions[cell.id]
        sizes = _sizes(prediction)
        # On a narrow screen, the last ones are left out.
        measures = {
            "peak": sizes.pop("peak"),
            verdict: Entry((prediction.how and verdict_of(cell, prediction, card)) or NOTHING),
            "how": Entry(prediction.how or NOTHING),
            NOTES: Entry(reason_of(cell, prediction, card)),
            **sizes,
        }
        rows.append(({_TASK: cell.task, **labels.values(cell)}, measures))
    return text_table("Predicted memory", rows, verdict)


def _sizes(prediction: Prediction) -> dict[str, Entry]:
    """Return the peak, or a lower bound of it, the reserved memory, and the peaks of two steps."""
    least = prediction.least_bytes()
    sizes = {
        "peak": prediction.peak_bytes(),
        "reserved": prediction.peak_bytes("peak_reserved_bytes"),
        "first step": prediction.peak_bytes(mode="first"),
        "second step": prediction.peak_bytes(mode="second"),  # of several ranks alone
    }
    is_known = prediction.how and least is None
    entries = {name: to_gib(nbytes if is_known else None) for name, nbytes in sizes.items()}
    return entries if least is None else {**entries, "peak": at_least(to_gib(least))}


def _explain_memory(
    label: str, cell: Cell, prediction: Prediction, screen: Screen
) -> Iterator[str]:
    """Return the peak of one cell by role: by the closed form, if there is one, and as predicted."""
    params = cell.params
    found = closed_form(params) if isinstance(params, TrainStepParams) else None
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
        formula = Entry(formulas.get(role, NOTHING))
        rows.append(({"role": role}, _by_role(by_formula.get(role), at_peak.get(role), formula)))
    # Without moments, the terms are those of the parameters alone, and their sum is not the peak.
    total = sum(by_formula.values()) if found.moments or not found.terms else 0
    sums = _by_role(total or None, sum(at_peak.values()) or None, MISSING)
    rows.append(({"role": "in all"}, sums))
    yield f"\n{label}: memory at the peak"
    yield folded_table_text(text_table("Memory by role", rows), screen)
    if found.moments:
        moments = [
            f"{term.name} {term.formula} = {to_gib(term.nbytes, '.3f')}" for term in found.moments
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


def _by_role(by_formula: float | None, at_peak: float | None, formula: Entry) -> dict[str, Entry]:
    sizes = {"closed form": to_gib(by_formula, ".3f"), "predicted": to_gib(at_peak, ".3f")}
    return {**sizes, "formula": formula}
