"""Tables of memory by phase, by part and by allocation: measured, predicted, and by formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pandas as pd

from orchestrator.analysis.axes import Row, has_value, key_axes, ordered_values, ranks_of
from orchestrator.analysis.results import Results
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables import layouts
from orchestrator.report.tables.formatters import Value, predicted, to_gib, to_mib
from orchestrator.report.tables.layouts import Measure
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid, quantity
from tasks.spec.status import OUT_OF_MEMORY
from tasks.spec.tables import ROLES, STEP_PHASES, WHOLE_STEP

_LENGTH = "context_length"
_TOP = 10
_BY_PART = ("activations", "temporary", "unlabelled")
_OTHER_PARTS = "other parts"
_SMALL_PART = 0.005  # share of the peak; smaller parts share a row
_TOTAL = "in all"


def composition(results: Results) -> TableGrid:
    """Return one row per cell and role; activations and the like have one per part of the model."""
    rows = _with_moments(results.allocations())
    part = rows["part"].where(rows["role"].isin(_BY_PART), "")
    of_part = rows["total_bytes"].groupby([rows["order"], rows["role"], part]).transform("sum")
    is_small = (of_part < _SMALL_PART * rows["all_bytes"]) & (part != "")
    rows = rows.assign(part=part.mask(is_small, _OTHER_PARTS))
    rows = pd.concat([rows, rows.assign(role=_TOTAL, part="")])
    keys = ["cell", "order", "when", "all_bytes", "role", "part"]
    sums = rows.groupby(keys, as_index=False)[["total_bytes", "count"]].sum()
    rank, is_last = sums["role"].map([*ROLES, _TOTAL].index), sums["part"] == _OTHER_PARTS
    sums = sums.assign(rank=rank, last=is_last, less=-sums["total_bytes"])
    sums = sums.sort_values(["order", "rank", "last", "less"])
    columns = (_MOMENT, _ROLE, _PART, *_SIZES, _COUNT)
    return layouts.child_rows(results, sums, columns, ("moment", "role", "part"))


def largest_allocations(results: Results) -> TableGrid:
    """Return the allocations that take most of each cell's memory, and the largest of each role.

    A row stands for allocations of the same size, role, part and place in the code; slack has one.
    """
    rows = _with_moments(results.allocations())
    # Slack is no allocation: nothing made it.
    is_made = rows["count"] > 0
    made_in = rows["allocated_in"].mask(is_made & (rows["allocated_in"] == ""), "before")
    rows = rows.assign(allocated_in=made_in, size_each=rows["size_bytes"].where(is_made))
    rows = rows.sort_values(["order", "total_bytes"], ascending=[True, False])
    by_size = rows.sort_values("size_bytes", ascending=False, kind="stable")
    largest = by_size.drop_duplicates(["order", "role"])
    is_top = rows.groupby("order").cumcount() < _TOP
    columns = (
        *(_MOMENT, *_SIZES, _ROLE, _PART, ("made in", predicted("allocated_in", _name)), _COUNT),
        ("MiB each", predicted("size_each", to_mib)),
        ("call chain", predicted("call_chain", _name)),
    )
    return layouts.child_rows(
        results, rows[is_top | rows.index.isin(largest.index)], columns, ("moment",)
    )


def largest_by_part(results: Results) -> TableGrid:
    """Return the largest allocation of each role and part, whenever it lives in a step."""
    rows = results.allocations()
    rows = rows[rows["moment"] == WHOLE_STEP]
    rows = rows.sort_values("size_bytes", ascending=False, kind="stable")
    columns = (
        _PART,
        ("role", predicted("role", _name)),
        ("MiB", predicted("size_bytes", to_mib)),
        ("made in", predicted("allocated_in", _name)),
        ("call chain", predicted("call_chain", _name)),
    )
    return layouts.child_rows(results, rows, columns, ("part",))


def _with_moments(allocations: pd.DataFrame) -> pd.DataFrame:
    """Return allocations with all bytes of their moment, its order and its text: `peak, backward`."""
    allocations = allocations[allocations["moment"] != WHOLE_STEP]
    by_moment = allocations.groupby(["cell", "moment"], sort=False)
    moment, phase = allocations["moment"], by_moment["phase"].transform("first")
    return allocations.assign(
        order=by_moment.ngroup(),
        when=moment.where(phase == "", moment + ", " + phase),
        all_bytes=by_moment["total_bytes"].transform("sum"),
    )


def _name(text: str) -> Entry:
    return Entry(text) if text else MISSING


_MOMENT: Measure = ("moment", predicted("when", _name))
_ROLE: Measure = ("role", predicted("role", _name))
_PART: Measure = ("part", predicted("part", _name))
_COUNT: Measure = ("allocations", lambda row: quantity(row["count"] or None, ".0f"))
_SIZES: tuple[Measure, ...] = (
    ("GiB", predicted("total_bytes", partial(to_gib, form=".3f"))),
    ("share", show.ratio("total_bytes", "all_bytes", ".1%")),
)


def by_context(results: Results) -> TableGrid:
    """Return what cells need: one row per combination of the axes, one column per context."""
    axes = key_axes(results, without=(_LENGTH,))
    lengths = ordered_values(_LENGTH, results.cells[_LENGTH])
    found = []
    for group in layouts.groups(results.cells, axes):
        needs = {row[_LENGTH]: show.memory_need(row) for row in group}
        entries = {f"context {length}": needs.get(length, MISSING) for length in lengths}
        found.append((group[0], entries))
    return layouts.grid_of(axes, found)


_ROLES = (
    "parameters", "gradients", "optimizer_state", "activations", "attention_squares",
    "autocast_weight_copies", "temporary", "workspace", "slack", "inputs", "unlabelled",
)  # fmt: skip
_WHOLE = {
    "measured": "peak_allocated_bytes",
    "predicted": "predicted_peak_allocated_bytes",
    "closed_form": "closed_form_bytes",
}


def _with_peaks(cells: pd.DataFrame) -> pd.DataFrame:
    """Return all cells of a run that measured memory: a cell that failed shows its status."""
    columns = {"peak_allocated_bytes", "peak_rss_bytes", "predicted_peak_allocated_bytes"}
    return cells if columns & set(cells) else cells.iloc[:0]


def _with_memory_needs(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the training steps, unless all that is known is that they failed."""
    steps = layouts.of_task("train_step")(cells)
    columns = ("peak_reserved_bytes", "peak_rss_bytes", "predicted_peak_reserved_bytes")
    is_known = len(layouts.having(*columns)(steps)) or steps["status"].isin(OUT_OF_MEMORY).any()
    return steps if is_known else steps.iloc[:0]


def _prediction_ratio(column: str) -> Value:
    return show.ratio(f"predicted_{column}", column, ".4f")


def _of_role(role: str) -> Callable[[str], Value]:
    return lambda source: show.gib_predicted(f"{source}_of_{role}_bytes")


def _predictions_of_phases() -> Iterator[tuple[str, Value]]:
    """Yield columns for each phase of the first and of a steady step: predicted, and the ratio."""
    for phase in (*(f"first_{phase}" for phase in STEP_PHASES), *STEP_PHASES):
        for counted, suffix in (("allocated", ""), ("reserved", " reserved")):
            name, column = phase.replace("_", " ") + suffix, f"{phase}_peak_{counted}_bytes"
            if name not in STEP_PHASES:  # the table has these columns
                yield name, show.gib(column)
            yield f"{name} predicted", show.gib_predicted(f"predicted_{column}")
            yield f"{name} ratio", _prediction_ratio(column)


_parts_of = layouts.phase_rows(
    "source",
    (("measured", "measured"), ("predicted", "predicted"), ("closed_form", "formula")),
    (
        ("in all", lambda source: show.gib_predicted(_WHOLE[source])),
        *((role.replace("_", " "), _of_role(role)) for role in _ROLES),
        ("at least", lambda source: show.gib_predicted("at_least_bytes")),
        ("peak", lambda source: show.gib("peak_allocated_bytes")),
        ("ratio", lambda source: show.ratio(_WHOLE[source], _WHOLE["measured"], ".4f")),
    ),
    ("{}_of_parameters_bytes",),
)


def with_measured_parts(results: Results) -> TableGrid:
    """Return the parts of the peak of cells, each with a column for its measured bytes."""
    recorded = results.allocations()
    recorded = recorded[recorded["moment"] == "peak"]
    sums = recorded.pivot_table("total_bytes", "cell", "role", "sum", observed=True)
    names = sums.columns.astype(str).str.replace(" ", "_")
    sums.columns = "measured_of_" + names + "_bytes"
    cells = results.cells.join(sums, on="cell")
    return _parts_of(replace(results, cells=cells))


def _account(row: Row) -> dict[str, Entry]:
    """Return the account of a cell's memory on its GPU. Each sum is that of the entries before it."""

    def known(column: str) -> float:
        """Return a number of the row: NaN if it is unknown, as each sum with it then is."""
        return float(row[column]) if has_value(row, column) else math.nan

    requested = known("peak_requested_bytes")
    allocated, reserved = known("peak_allocated_bytes"), known("peak_reserved_bytes")
    outside, nccl = known("outside_allocator_bytes"), known("nccl_device_bytes")
    used = known("total_bytes") - known("free_bytes")
    if not math.isnan(used):  # memory ran out
        requested, allocated, reserved = math.nan, known("allocated_bytes"), known("reserved_bytes")
        outside = used - reserved
    has_nccl = ranks_of(row) > 1
    sizes = {
        "requested": requested,
        "+ rounding": allocated - requested,
        "= allocated": allocated,
        "+ cached": reserved - allocated,
        "= reserved": reserved,
        "+ NCCL": nccl,
        "+ context": outside - nccl if has_nccl else outside,
        "= in use": reserved + outside,
    }
    entries = {name: to_gib(size) for name, size in sizes.items()}
    for name in ("+ context", "= in use", *(["+ NCCL"] if has_nccl else [])):
        if math.isnan(sizes[name]):
            entries[name] = Entry("unknown")
    if math.isnan(requested):
        entries["requested"] = show.missing(row)
    return entries


MEMORY_TABLES: tuple[Table, ...] = (
    Table(
        "memory",
        "Peak memory",
        "GiB as the allocator counts it; on a CPU the process's resident set, which includes the"
        " interpreter and libraries and is an upper bound of what the tensors take. The first step"
        " has no optimizer state yet; steady state is what training needs. Predicted without a"
        " GPU; ratio: predicted over measured. `tracked`: every storage was followed; `modelled`:"
        " all but those inside of fused kernels; `compiled`: every storage of the generated code;"
        " `as blocks`: that of compiled blocks, for a model that is compiled as a whole; `as"
        " eager`: compiled code usually needs less, unless it may take more.",
        layouts.cell_rows(
            ("first step", show.peak_gib("first_")),
            ("peak", show.peak_gib()),
            ("predicted", show.gib_predicted("predicted_peak_allocated_bytes")),
            ("ratio", _prediction_ratio("peak_allocated_bytes")),
            show.col("peak_reserved_bytes", "peak reserved"),
            ("formula", show.gib_predicted("closed_form_bytes")),
            ("forward", show.peak_gib("forward_")),
            ("backward", show.peak_gib("backward_")),
            ("optimizer step", show.peak_gib("optimizer_")),
            ("how", show.predicted("predicted_how", lambda how: Entry(str(how)))),
            *_predictions_of_phases(),
        ),
        _with_peaks,
        is_default=True,
    ),
    Table(
        "device-memory",
        "Memory on the GPU, from the tensors to nvidia-smi",
        "GiB. Requested: by tensors. Rounding: the allocator's blocks are larger. Cached: reserved by"
        " the allocator, and in no block at the peak. Of a CUDA graph, only the reserved memory is"
        " known. NCCL: of cells with several GPUs. Context: the CUDA context, libraries, and other"
        " programs on this GPU. In use: what nvidia-smi shows. The memory is that at the peak of a"
        " steady step, or when it ran out.",
        lambda results: layouts.grid_of(
            key_axes(results), ((row, _account(row)) for row in layouts.each_cell(results))
        ),
        layouts.having("peak_reserved_bytes", "free_bytes"),
    ),
    Table(
        "memory-parts",
        "Parts of the peak",
        "GiB at the moment of the steady peak: measured where allocations were recorded, predicted"
        " by running the model without a GPU, and by formula. Slack: how much larger the"
        " allocator's blocks are than what was requested. Measured activations include the squares"
        " of attention. N parameters, A bytes of activations: the formula is the largest of 12 N +"
        " A + 2·4·BSV, 16 N + A/L and 16 N + T. It is for fp32 with naive attention. At least:"
        " what the parameters of a model need that cannot run without data.",
        with_measured_parts,
        layouts.having(
            "predicted_of_parameters_bytes",
            "closed_form_of_parameters_bytes",
            "snapshot_peak_allocated_bytes",
        ),
        is_default=True,
    ),
    Table(
        "composition",
        "Parts of the recorded peak, by part of the model",
        "GiB by role at the moment of a steady step with the most live memory, or when memory ran"
        " out. An activation was made in the forward pass and lived until its end; the part of the"
        " model that made it has a row. Slack: how much larger the allocator's blocks are than what"
        " was requested. Unlabelled: of unknown use.",
        composition,
    ),
    Table(
        "allocations",
        "Largest allocations at the peak",
        "The allocations that take most, and the largest one of each role. A row stands for"
        " allocations of the same role, part, place in the code and size, with the phase that made"
        " them and the call chain, the innermost call first. The backward pass runs on a thread"
        " without Python frames: its chain is that of its module's forward pass. Slack is in the"
        " order too.",
        largest_allocations,
    ),
    Table(
        "allocations-by-part",
        "Largest allocation of each part, over a step",
        "The largest single allocation of each role and part of the model at any time of the recorded"
        " step, with the phase that made it and its call chain. They need not live at the same time.",
        largest_by_part,
    ),
    Table(
        "saved-tensors",
        "Tensors that a block saves for the backward pass",
        "MiB of one block, each storage once; the five operations that save most, by the part of"
        " the block and the node of the graph; and what the block passes on to the next one."
        " Compiled code is predicted as if it were eager, and is not examined.",
        layouts.phase_rows(
            "what",
            (
                ("saved_block", "one block"),
                *((f"saved_{rank}", f"{rank}.") for rank in show.SAVED_RANKS),
                ("residual_stream", "residual stream"),
            ),
            (
                ("saved by", show.saving_operation),
                ("predicted MiB", show.saved_mib_predicted),
                ("measured MiB", lambda stem: show.mib(f"{stem}_bytes")),
                ("of the block", show.share_of_block),
            ),
            ("{}_bytes", "predicted_{}_bytes"),
        ),
        layouts.both(
            layouts.of_task("train_step"),
            layouts.having("saved_block_bytes", "predicted_saved_block_bytes"),
        ),
    ),
    Table(
        "oom-map",
        "Out-of-memory map",
        "Peak memory reserved and the smallest GPU that has this memory, with room for its CUDA"
        " context, and supports the precision; or OOM, with the size of the refused allocation. Then the"
        " predicted reserved memory, and whether it would fit. On a CPU, the peak is the resident"
        " memory of the whole process, while a limit is on what it allocates after its start.",
        by_context,
        _with_memory_needs,
        is_default=True,
    ),
)
