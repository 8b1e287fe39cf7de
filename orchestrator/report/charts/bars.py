"""Charts of bars: kernels by class, the longest kernels, and parts of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from orchestrator.analysis.axes import MAIN, Row, each, is_null, ranks_text
from orchestrator.analysis.pairs import TIME
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts import chart
from orchestrator.report.charts.chart import KEY, Drawn, Layer, LegendEntry, Panel
from orchestrator.report.charts.theme import light
from orchestrator.report.tables.formatters import short_kernel_name
from orchestrator.report.text import cell_names
from orchestrator.report.text.cell_names import LENGTH, NAME, NOT_SHOWN
from orchestrator.report.text.numbers import number, rounded
from tasks.spec.messages import shorten
from tasks.spec.parameters import TIMING_AXES
from tasks.spec.tables import OUTSIDE_OPERATORS

_WIDTH = 330
_ROW = 26  # pixels of a bar
_MOST_ROWS, _MOST_PANELS, _TOP = 8, 4, 10
_MOST_AXES = 2  # that name a bar
_LONGEST_NAME = 32  # characters of a kernel's name
_NEAR = 1.15  # a GPU with up to this much more memory than the largest peak is marked
_BEHIND_BARS = {"align": "left", "dx": 4, "fontSize": 11, "color": light("ink2"), "aria": False}
_OTHER = "other"
_CLASSES: Mapping[str, tuple[str, str]] = {
    "GEMM": ("matrix products", "k1"),
    "elementwise": ("elementwise", "k2"),
    "copy": ("copies and casts", "k3"),
    "softmax": ("softmax and attention", "k4"),
    "attention": ("softmax and attention", "k4"),
    "reduction": ("reductions", "k5"),
}
_CLASS_COLOURS = {**dict(_CLASSES.values()), _OTHER: "k6"}
_PARTS: Mapping[str, tuple[str, str]] = {
    "parameters": ("parameters", "m1"),
    "optimizer_state": ("optimizer state", "m2"),
    "gradients": ("gradients", "m3"),
    "autocast_weight_copies": ("weight copies", "m4"),
    "attention_squares": ("attention scores", "m5"),
    "activations": ("other activations", "m6"),
    "inputs": ("temporary, workspace", "m7"),
    "slack": ("temporary, workspace", "m7"),
    "temporary": ("temporary, workspace", "m7"),
    "workspace": ("temporary, workspace", "m7"),
}
_PART_COLOURS = dict(_PARTS.values())
_PART_COLUMNS = {f"predicted_of_{name}_bytes": part for name, (part, _) in _PARTS.items()}
_STEP_PARTS: Mapping[str, tuple[str, str]] = {
    "compute_ms": ("compute", "k1"),
    "exposed_copies_ms": ("copies", "k3"),
    "exposed_transfer_ms": ("exposed transfer", "k2"),
    "exposed_wait_ms": ("exposed wait", "k4"),
    "overlap_idle_ms": ("idle", "k6"),
}
_CARDS = (24, 40, 80, 140)  # GiB of common GPUs


def kernel_classes(results: Results) -> Drawn | None:
    """Return the kernel time of a step by class of work: one bar for each precision and way to compile."""
    kernels, cells, note = _profiled(results)
    if cells.empty:
        return None
    own = kernels.merge(cells[["cell", NAME, KEY, "variant", "scope"]], on="cell")
    parts = own["kernel_class"].map(_CLASSES).str[0]
    own = own.assign(part=parts.fillna(_OTHER))
    panels = []
    names, few = chart.some_of(cell_names.ordered(NAME, cells), _MOST_PANELS, "values of model")
    order, few_bars = chart.some_of(cells["variant"], _MOST_ROWS, "bars")
    for name in names:
        rows = own[(own[NAME] == name) & own["variant"].isin(order)]
        by_part = rows.groupby(["variant", KEY, "scope", "part"], sort=False)
        bars = by_part["ms"].sum().reset_index(name="value")
        context = cells.loc[cells[NAME] == name, LENGTH].iloc[0]
        title = str(name) if is_null(context) else f"{name}, context {context:,}"
        panels.append(_panel(title, _stacked(bars, order, _CLASS_COLOURS, " ms"), order))
    occurring = set(own["part"])
    colours = {part: colour for part, colour in _CLASS_COLOURS.items() if part in occurring}
    return Drawn(panels, chart.legend("box", colours), chart.joined(note, few, few_bars))


def _profiled(results: Results) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Return all kernels, the cells to show, and what these share.

    They are, of each model, the cells of its longest context.
    """
    kernels = results.kernels()
    # Without the number of steps, the milliseconds of a step are unknown.
    kernels = kernels[(kernels["name"] != OUTSIDE_OPERATORS) & kernels["ms"].notna()]
    cells = chart.of_column("train_step", "step_ms_median")(results)
    cells = cells[cells["cell"].isin(kernels["cell"])]
    if cells.empty or LENGTH not in cells:
        return kernels, cells.iloc[:0], ""
    variants = _row_axes(cells, results, ("precision", "compile"))
    cells, note = cell_names.choose_slice(cells, results.axes, [NAME, LENGTH, *variants])
    counts = cells.groupby([NAME, LENGTH])["cell"].transform("count")
    cells = cells[counts == counts.groupby(cells[NAME]).transform("max")]
    cells = cells[cells[LENGTH] == cells.groupby(NAME)[LENGTH].transform("max")]
    cells = cell_names.sort_by(cells, variants)
    return kernels, _named(cells, variants), note


def _row_axes(cells: pd.DataFrame, results: Results, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the usual axes of rows, or others that vary if none of these does."""
    others = [axis for axis in results.axes if axis not in (*NOT_SHOWN, *TIMING_AXES, *MAIN)]
    free = cell_names.free_axes(cells, (*usual, NAME, LENGTH, "precision", *others))
    if any(axis in free for axis in usual):
        return usual
    left = [axis for axis in free if axis not in (NAME, LENGTH, "precision")]
    return tuple(left[:_MOST_AXES]) or usual


def _named(cells: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """Return the cells with the names of their bars, and their settings."""
    rows = cells[list(axes)].to_dict("records")
    names = [" ".join(cell_names.setting_text(axis, row[axis]) for axis in axes) for row in rows]
    return cells.assign(variant=names, scope=cell_names.scopes_of(cells, axes))


def _panel(title: str, layers: list[Layer], order: Sequence[str]) -> Panel:
    """Return a panel of horizontal bars, which have room for one another."""
    return {"layer": layers, "title": title, "width": _WIDTH, "height": _ROW * len(order)}


def _stacked(
    bars: pd.DataFrame, order: Sequence[str], colours: Mapping[str, str], unit: str
) -> list[Layer]:
    """Return stacked bars with their totals. The frame has variant, part, value, scope and key."""
    totals = bars.groupby("variant", as_index=False)["value"].sum()
    totals = totals.assign(text=totals["value"].map(number))
    data = bars.assign(
        label=bars["scope"] + ": " + bars["part"] + " " + bars["value"].map(number) + unit,
        rank=bars["part"].map(list(colours).index),
        href="#cell=" + bars[KEY],
        value=rounded(bars["value"]),
    )
    y = chart.channel("variant:N", sort=order, title=None, axis={"labelLimit": 130})
    highest = float(totals["value"].max()) * 1.16
    scale = {"domain": [0, highest], "nice": False}
    axis = {"tickCount": 5, "format": ",~r"}
    encoding = {
        "x": chart.channel("value:Q", title=unit.split()[0], stack="zero", scale=scale, axis=axis),
        "y": y,
        "color": chart.colour_channel("part:N", colours),
        "order": "rank:Q",
        "description": "label:N",
        "href": "href:N",
    }
    drawn = chart.with_data(data, chart.marks("bar", encoding, height=16))
    numbers = chart.marks("text", {"x": "value:Q", "y": y, "text": "text:N"}, **_BEHIND_BARS)
    return [drawn, chart.with_data(totals, numbers)]


def step_parts(results: Results) -> Drawn | None:
    """Return what a step on several GPUs consists of: a stacked bar for each strategy."""
    cells = chart.of_column("train_step", "compute_ms")(results)
    if LENGTH not in cells or "parallel" not in cells:
        return None
    shown = [NAME, LENGTH, "gpus", "parallel"]
    others = [axis for axis in results.axes if axis not in (*NOT_SHOWN, *TIMING_AXES)]
    # An axis that follows from the model and the strategy is no reason to leave a cell out.
    free = cell_names.free_axes(cells, [*shown, *others])
    cells, note = cell_names.choose_slice(cells, free, shown)
    cells = _named(cell_names.sort_by(cells, shown), ["parallel"])
    titles = [f"{row[NAME]}, context {row[LENGTH]:,}, {ranks_text(row)}" for row in each(cells)]
    chosen, few = chart.some_of(titles, _MOST_PANELS, "panels")
    names = {column: part for column, (part, _) in _STEP_PARTS.items()}
    colours = dict(_STEP_PARTS.values())
    panels = []
    for title, own in cells.groupby(titles, sort=False):
        if title in chosen:
            order = list(own["variant"])
            layers = _stacked(_parts_of(own, names), order, colours, " ms")
            layers.append(_ticks(own, order, TIME, " ms without the profiler"))
            panels.append(_panel(str(title), layers, order))
    tick = LegendEntry("tick", "step without the profiler", "ink")
    return Drawn(panels, [*chart.legend("box", colours), tick], chart.joined(note, few))


def longest_kernels(results: Results) -> Drawn | None:
    """Return the kernels that take most of a step, of the first and the last variant of the largest model."""
    kernels, cells, note = _profiled(results)
    if cells.empty:
        return None
    largest = cells[cells[NAME] == cell_names.ordered(NAME, cells)[-1]]
    ends = largest.iloc[[0, -1]] if len(largest) > 1 else largest
    panels = []
    for row in ends.to_dict("records"):
        own = kernels[kernels["cell"] == row["cell"]]
        sums = own.groupby("name")[["ms", "count"]].sum().nlargest(_TOP, "ms").reset_index()
        panels.append({**_kernel_bars(sums, row), "title": f"{row[NAME]}, {row['variant']}"})
    return Drawn(panels, (), note)


def _kernel_bars(sums: pd.DataFrame, row: Row) -> Panel:
    # Templates make names long; kernels differ at the beginning.
    names = sums["name"].map(short_kernel_name).str.replace("<.*", "<…>", regex=True)
    shown = [shorten(name, _LONGEST_NAME) for name in names]
    unique = (sums.index + 1).astype(str) + ". " + shown
    texts, counts = sums["ms"].map(number), sums["count"].map("{:,}".format)
    noun = "calls" if row.get("device") == "cpu" else "launches"  # of operators, or of kernels
    data = pd.DataFrame(
        {"name": unique, "value": rounded(sums["ms"]), "text": texts, "href": f"#cell={row[KEY]}",
         "label": names + ": " + texts + " ms in " + counts + f" {noun}"}
    )  # fmt: skip
    scale = {"domain": [0, float(data["value"].max()) * 1.18]}
    axis = {"tickCount": 4, "format": ",~r"}
    shared = {
        "x": chart.channel("value:Q", title="ms", scale=scale, axis=axis),
        "y": chart.channel("name:N", sort=list(unique), title=None, axis={"labelLimit": 220}),
    }
    linked = {**shared, "description": "label:N", "href": "href:N"}
    bars = chart.marks("bar", linked, height=11, color=light("k1"))
    layers = [bars, chart.marks("text", {**shared, "text": "text:N"}, **_BEHIND_BARS)]
    size = {"width": _WIDTH - 90, "height": 17 * len(data)}
    return chart.with_data(data, {"layer": layers, **size})


def memory_parts(results: Results) -> Drawn | None:
    """Return the predicted peak by part as a stacked bar, and the measured peak as a tick."""
    cells = chart.of_column("train_step", "peak_allocated_bytes", scale=1 / GIB)(results)
    if LENGTH not in cells:
        return None
    cells = cells[cells.filter(items=list(_PART_COLUMNS)).notna().any(axis=1)]
    if cells.empty:
        return None
    rows = _row_axes(cells, results, (NAME,))
    # No peak depends on the number of steps.
    axes = [axis for axis in results.axes if axis not in TIMING_AXES]
    shown = dict.fromkeys((*rows, NAME, LENGTH, "precision"))
    cells, note = cell_names.choose_slice(cells, axes, shown)
    context = cell_names.fullest_context(cells, "cell")
    cells = _named(cell_names.sort_by(cells[cells[LENGTH] == context], rows), rows)
    order, few = chart.some_of(cells["variant"], _MOST_ROWS, "bars")
    cells = cells[cells["variant"].isin(order)]
    panels, precisions = [], cell_names.ordered("precision", cells)
    precisions, few_panels = chart.some_of(precisions, 2, "values of precision")
    for precision in precisions:
        own = cells[cells["precision"] == precision]
        own_order = [one for one in order if one in set(own["variant"])]
        bars = _parts_of(own, _PART_COLUMNS, GIB)
        layers = [
            *_cards(own["shown"].max()),
            *_stacked(bars, own_order, _PART_COLOURS, " GiB predicted"),
            _ticks(own, own_order, "shown", " GiB measured"),
        ]
        panels.append(_panel(f"{precision}, context {context:,}", layers, own_order))
    entries = [*chart.legend("box", _PART_COLOURS), LegendEntry("tick", "measured peak", "ink")]
    if cards := [card for card in _CARDS if card < cells["shown"].max() * _NEAR]:
        entries.append(LegendEntry("dash", f"GPUs with {', '.join(map(str, cards))} GiB"))
    return Drawn(panels, entries, chart.joined(note, few, few_panels))


def _parts_of(own: pd.DataFrame, parts: Mapping[str, str], unit: float = 1.0) -> pd.DataFrame:
    """Return the bars of `_stacked`. parts: the name of the part by its column."""
    keys = ["variant", KEY, "scope"]
    columns = own.set_index(keys).filter(items=list(parts)).astype(float) / unit
    values = pd.Series(columns.rename_axis(columns="part").stack(future_stack=True))
    bars = values[values > 0].reset_index(name="value")
    bars = bars.assign(part=bars["part"].map(parts))
    return bars.groupby([*keys, "part"], sort=False)[["value"]].sum().reset_index()


def _ticks(own: pd.DataFrame, order: Sequence[str], column: str, unit: str) -> Layer:
    """Return a tick across each bar, at a value that was measured."""
    labels = own["scope"] + ": " + own[column].map(number) + unit
    ticks = own[["variant"]].assign(measured=rounded(own[column]), label=labels)
    encoding = {
        "x": "measured:Q",
        "y": chart.channel("variant:N", sort=order),
        "description": "label:N",
        "color": {"value": light("ink")},
    }
    return chart.with_data(ticks, chart.marks("tick", encoding, thickness=2.5, height=20))


def _cards(peak_gib: float) -> list[Layer]:
    """Return a line at the memory of each GPU that is not much larger than a peak."""
    cards = pd.DataFrame({"card": [card for card in _CARDS if card < peak_gib * _NEAR]})
    rule = chart.marks("rule", {"x": "card:Q"}, aria=False, strokeDash=[3, 3], color=light("ink2"))
    return [chart.with_data(cards, rule)] if len(cards) else []
