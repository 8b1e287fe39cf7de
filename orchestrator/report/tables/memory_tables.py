"""Tables of memory by phase, by part and by allocation: measured, predicted, and by formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pandas as pd

from orchestrator.analysis.axes import Row, key_axes, ordered_values
from orchestrator.analysis.results import Results
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables.cell_filters import both, having, of_task
from orchestrator.report.tables.formatters import Value, to_gib, to_mib
from orchestrator.report.tables.layouts import (
    PhaseRows,
    cell_rows,
    each,
    each_cell,
    grid_of,
    groups,
)
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid, quantity
from tasks.spec.status import OUT_OF_MEMORY
from tasks.spec.tables import ROLES

_LENGTH = "context_length"
_TOP = 10
_BY_PART = ("activations", "temporary", "unlabelled")
_OTHER_PARTS = "other parts"
_SMALL_PART = 0.005  # share of the peak; smaller parts share a row
_TOTAL = "in all"


def composition(results: Results) -> TableGrid:
    """Return one row per cell and role; activations and the like have one per part of the model."""
    allocations = results.allocations()
    parts, found = _parts_by_moment(allocations), []
    for cell, moment, text in _moments(results, allocations):
        rows = parts[cell["cell"], moment]
        total_bytes = sum(row["total_bytes"] for row in rows)
        count = sum(row["count"] for row in rows)
        total = {"role": _TOTAL, "part": "", "total_bytes": total_bytes, "count": count}
        for row in (*rows, total):
            names = [Entry(text), Entry(row["role"]), _name(row["part"])]
            found.append((cell, [*names, *_sizes(row, total_bytes)]))
    keys = ["moment", "role", "part"]
    return grid_of(key_axes(results), keys, ("GiB", "share", "allocations"), found)


def largest_allocations(results: Results) -> TableGrid:
    """Return the allocations that take most of each cell's memory, and the largest of each role.

    A row stands for allocations of the same size, role, part and place in the code; slack has one.
    """
    found, every = [], results.allocations()
    by_moment = dict(iter(every.groupby(["cell", "moment"])))
    for cell, moment, text in _moments(results, every):
        allocations = by_moment[cell["cell"], moment]
        total_bytes = allocations["total_bytes"].sum()
        in_order = allocations.sort_values("total_bytes", ascending=False, kind="stable")
        largest = in_order.sort_values("size_bytes", ascending=False, kind="stable")
        shown = {*in_order.index[:_TOP], *largest.drop_duplicates("role").index}
        for row in each(in_order[in_order.index.isin(shown)]):
            # Slack is no allocation: nothing made it.
            is_slack = not row["count"]
            each_mib = MISSING if is_slack else to_mib(row["size_bytes"], ".2f")
            made_in = row["allocated_in"] or ("" if is_slack else "before")
            names = (row["role"], row["part"], made_in, row["call_chain"])
            gib, share, count = _sizes(row, total_bytes)
            role, part, made, chain = map(_name, names)
            entries = [gib, share, role, part, made, count, each_mib, chain]
            found.append((cell, [Entry(text), *entries]))
    titles = ("GiB", "share", "role", "part", "made in", "allocations", "MiB each")
    return grid_of(key_axes(results), ["moment"], [*titles, "call chain"], found)


def by_context(results: Results) -> TableGrid:
    """Return what cells need: one row per combination of the axes, one column per context."""
    axes = key_axes(results, without=(_LENGTH,))
    lengths = ordered_values(_LENGTH, results.cells[_LENGTH])
    found = []
    for group in groups(results.cells, axes):
        entries = {row[_LENGTH]: show.memory_need(row) for row in group}
        found.append((group[0], [entries.get(length, MISSING) for length in lengths]))
    return grid_of(axes, (), map("context {}".format, lengths), found)


def _moments(results: Results, allocations: pd.DataFrame) -> Iterator[tuple[Row, str, str]]:
    """Yield each cell with its moments, and a text for each such as `peak, backward`."""
    first = allocations.drop_duplicates(["cell", "moment"])
    by_cell: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for cell, moment, phase in first[["cell", "moment", "phase"]].itertuples(index=False):
        by_cell[cell].append((moment, f"{moment}, {phase}" if phase else moment))
    for row in each_cell(results):
        for moment, text in by_cell.get(row["cell"], ()):
            yield row, moment, text


def _parts_by_moment(allocations: pd.DataFrame) -> Mapping[tuple[str, str], list[Row]]:
    """Return bytes and number of allocations by role and part, in the order of ROLES.

    The keys are cells with their moments.
    """
    moment = [allocations["cell"], allocations["moment"]]
    sizes, role = allocations["total_bytes"], allocations["role"]
    parts = allocations["part"].where(role.isin(_BY_PART), "")
    of_part = sizes.groupby([*moment, role, parts]).transform("sum")
    is_small = of_part < _SMALL_PART * sizes.groupby(moment).transform("sum")
    split = allocations.assign(part=parts.mask(is_small & (parts != ""), _OTHER_PARTS))
    keys = ["cell", "moment", "role", "part"]
    sums = split.groupby(keys, as_index=False)[["total_bytes", "count"]].sum()
    sums = sums.assign(rank=sums["role"].map(list(ROLES).index), last=sums["part"] == _OTHER_PARTS)
    sums = sums.sort_values(["rank", "last", "total_bytes"], ascending=[True, True, False])
    by_moment: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in sums.to_dict("records"):
        by_moment[row["cell"], row["moment"]].append(row)
    return by_moment


def _sizes(row: Row, total_bytes: float) -> list[Entry]:
    share = quantity(row["total_bytes"] / total_bytes, ".1%")
    count = quantity(row["count"], ".0f") if row["count"] else MISSING
    return [to_gib(row["total_bytes"], ".3f"), share, count]


def _name(text: str) -> Entry:
    return Entry(text) if text else MISSING


_PHASES = ("forward", "backward", "optimizer")
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
    steps = of_task("train_step")(cells)
    columns = ("peak_reserved_bytes", "peak_rss_bytes", "predicted_peak_reserved_bytes")
    is_known = len(having(*columns)(steps)) or steps["status"].isin(OUT_OF_MEMORY).any()
    return steps if is_known else steps.iloc[:0]


def _prediction_ratio(column: str) -> Value:
    return show.ratio(f"predicted_{column}", column, ".4f")


def _of_role(role: str) -> Callable[[str], Value]:
    return lambda source: show.gib_predicted(f"{source}_of_{role}_bytes")


def _predictions_of_phases() -> Iterator[tuple[str, Value]]:
    """Yield columns for each phase of the first and of a steady step: predicted, and the ratio."""
    for phase in (*(f"first_{phase}" for phase in _PHASES), *_PHASES):
        for counted, suffix in (("allocated", ""), ("reserved", " reserved")):
            name, column = phase.replace("_", " ") + suffix, f"{phase}_peak_{counted}_bytes"
            if name not in _PHASES:  # the table has these columns
                yield name, show.gib(column)
            yield f"{name} predicted", show.gib_predicted(f"predicted_{column}")
            yield f"{name} ratio", _prediction_ratio(column)


_parts_of = PhaseRows(
    (("measured", "measured"), ("predicted", "predicted"), ("closed_form", "formula")),
    (
        ("in all", lambda source: show.gib_predicted(_WHOLE[source])),
        *((role.replace("_", " "), _of_role(role)) for role in _ROLES),
        ("at least", lambda source: show.gib_predicted("at_least_bytes")),
        ("peak", lambda source: show.gib("peak_allocated_bytes")),
        ("ratio", lambda source: show.ratio(_WHOLE[source], _WHOLE["measured"], ".4f")),
    ),
    ("{}_of_parameters_bytes",),
    "source",
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
        cell_rows(
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
        "memory-parts",
        "Parts of the peak",
        "GiB at the moment of the steady peak: measured where allocations were recorded, predicted"
        " by running the model without a GPU, and by formula. Slack: how much larger the"
        " allocator's blocks are than what was requested. Measured activations include the squares"
        " of attention. N parameters, A bytes of activations: the formula is the largest of 12 N +"
        " A + 2·4·BSV, 16 N + A/L and 16 N + T. It is for fp32 with naive attention. At least:"
        " what the parameters of a model need that cannot run without data.",
        with_measured_parts,
        having(
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
        "saved-tensors",
        "Tensors that a block saves for the backward pass",
        "MiB of one block, each storage once; the five operations that save most, by the part of"
        " the block and the node of the graph; and what the block passes on to the next one."
        " Compiled code is predicted as if it were eager, and is not examined.",
        PhaseRows(
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
            "what",
        ),
        both(of_task("train_step"), having("saved_block_bytes", "predicted_saved_block_bytes")),
    ),
    Table(
        "oom-map",
        "Out-of-memory map",
        "Peak memory reserved and the smallest GPU that has this memory, with room for its CUDA"
        " context, and that precision; or OOM, with the size of the refused allocation. Then the"
        " predicted reserved memory, and whether it would fit.",
        by_context,
        _with_memory_needs,
        is_default=True,
    ),
)
