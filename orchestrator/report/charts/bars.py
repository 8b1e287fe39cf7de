"""Charts of bars and areas: kernels by class, the longest kernels, and parts of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from orchestrator.analysis.axes import Row
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts.chart import (
    Drawn,
    Layer,
    Panel,
    channel,
    colour_channel,
    data_of,
    legend,
    marks,
    with_data,
)
from orchestrator.report.charts.measures import KEY, of_column
from orchestrator.report.charts.theme import light
from orchestrator.report.tables.formatters import short_kernel_name
from orchestrator.report.text.cell_names import (
    COMPILED,
    LENGTH,
    NAME,
    fullest_context,
    ordered,
    scope_of,
    scopes_of,
    sort_by,
)
from orchestrator.report.text.numbers import number, rounded
from orchestrator.report.text.slices import choose_slice, evenly
from tasks.spec.tables import OUTSIDE_OPERATORS, ROLES

_WIDTH = 260
_ROW = 26  # pixels of a bar
_MOST_ROWS, _MOST_PANELS, _TOP = 8, 4, 10
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
_CARDS = (24, 40, 80, 140)  # GiB of common GPUs
_ROLE_COLOURS = ("m1", "m2", "m3", "m5", "m6", "m4", "m7", "k5", "k4", "k2", "k3", "k6")


def kernel_classes(results: Results) -> Drawn | None:
    """Return the kernel time of a step by class of work: one bar for each precision and way to compile."""
    kernels, cells, note = _profiled(results)
    if cells.empty:
        return None
    own = kernels.merge(cells[["cell", NAME, LENGTH, KEY, "variant", "scope"]], on="cell")
    parts = own["kernel_class"].map(_CLASSES).str[0]
    own = own.assign(part=parts.fillna(_OTHER))
    panels = []
    for name in evenly(ordered(NAME, cells), _MOST_PANELS):
        rows = own[own[NAME] == name]
        by_part = rows.groupby(["variant", KEY, "scope", "part"], sort=False)
        bars = by_part["ms"].sum().reset_index(name="value")
        context = cells.loc[cells[NAME] == name, LENGTH].iloc[0]
        title = f"{name}, context {context:,}" if context == context else str(name)
        order = list(dict.fromkeys(cells["variant"]))[:_MOST_ROWS]
        bars = bars[bars["variant"].isin(order)]
        layers = _stacked(bars, order, _CLASS_COLOURS, " ms")
        size = {"width": _WIDTH, "height": _ROW * len(order)}
        panels.append({"layer": layers, "title": title, **size})
    occurring = set(own["part"])
    colours = {part: colour for part, colour in _CLASS_COLOURS.items() if part in occurring}
    return Drawn(panels, legend("box", colours), note)


def _profiled(results: Results) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Return all kernels, the cells to show, and what these share.

    They are, of each model, the cells of its longest context.
    """
    kernels = results.kernels()
    # Without the number of steps, the milliseconds of a step are unknown.
    kernels = kernels[(kernels["name"] != OUTSIDE_OPERATORS) & kernels["ms"].notna()]
    cells = of_column("train_step", "step_ms_median")(results)
    cells = cells[cells["cell"].isin(kernels["cell"])]
    if cells.empty or LENGTH not in cells:
        return kernels, cells.iloc[:0], ""
    shown = [NAME, LENGTH, "precision", "compile"]
    cells, note = choose_slice(cells, results.axes, shown)
    variants = cells.groupby([NAME, LENGTH])["cell"].transform("count")
    fullest = variants == variants.groupby(cells[NAME]).transform("max")
    cells = cells[fullest]
    cells = cells[cells[LENGTH] == cells.groupby(NAME)[LENGTH].transform("max")]
    cells = sort_by(cells, ("precision", "compile"))
    words = cells["compile"].replace(COMPILED)
    cells = cells.assign(variant=cells["precision"] + " " + words, scope=scopes_of(cells))
    return kernels, cells, note


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
    y = channel("variant:N", sort=order, title=None, axis={"labelLimit": 130})
    highest = float(totals["value"].max()) * 1.16
    scale = {"domain": [0, highest], "nice": False}
    axis = {"tickCount": 5, "format": ",~r"}
    encoding = {
        "x": channel("value:Q", title=None, stack="zero", scale=scale, axis=axis),
        "y": y,
        "color": colour_channel("part:N", colours),
        "order": "rank:Q",
        "description": "label:N",
        "href": "href:N",
    }
    rows = data_of(data, ["variant", "part", "value", "label", "rank", "href"])
    drawn = with_data(rows, marks("bar", encoding, height=16))
    numbers = _texts({"x": "value:Q", "y": y, "text": "text:N"})
    return [drawn, with_data(data_of(totals, ["variant", "value", "text"]), numbers)]


def _texts(encoding: Mapping[str, object]) -> Layer:
    """Return a layer of texts behind bars."""
    return marks("text", encoding, align="left", dx=4, fontSize=11, color=light("ink2"), aria=False)


def longest_kernels(results: Results) -> Drawn | None:
    """Return the kernels that take most of a step, of the first and the last variant of the largest model."""
    kernels, cells, note = _profiled(results)
    if cells.empty:
        return None
    largest = cells[cells[NAME] == ordered(NAME, cells)[-1]]
    ends = largest.iloc[[0, -1]] if len(largest) > 1 else largest
    panels = []
    for row in ends.to_dict("records"):
        own = kernels[kernels["cell"] == row["cell"]]
        sums = own.groupby("name")[["ms", "count"]].sum().nlargest(_TOP, "ms").reset_index()
        panels.append({**_kernel_bars(sums, row), "title": f"{row[NAME]}, {row['variant']}"})
    return Drawn(panels, (), note)


def _kernel_bars(sums: pd.DataFrame, row: Row) -> Panel:
    # Templates make names long; kernels differ at the beginning.
    names = sums["name"].map(short_kernel_name).str.split("<").str[0]
    unique = (sums.index + 1).astype(str) + ". " + names.str[:34]
    texts, counts = sums["ms"].map(number), sums["count"].map("{:,}".format)
    noun = "calls" if row.get("device") == "cpu" else "launches"  # of operators, or of kernels
    data = pd.DataFrame(
        {"name": unique, "value": rounded(sums["ms"]), "text": texts, "href": f"#cell={row[KEY]}",
         "label": names + ": " + texts + " ms in " + counts + f" {noun}"}
    )  # fmt: skip
    scale = {"domain": [0, float(data["value"].max()) * 1.18]}
    axis = {"tickCount": 4, "format": ",~r"}
    shared = {
        "x": channel("value:Q", title=None, scale=scale, axis=axis),
        "y": channel("name:N", sort=list(unique), title=None, axis={"labelLimit": 220}),
    }
    linked = {**shared, "description": "label:N", "href": "href:N"}
    bars = marks("bar", linked, height=11, color=light("k1"))
    layers = [bars, _texts({**shared, "text": "text:N"})]
    size = {"width": 180, "height": 17 * len(data)}
    rows = data_of(data, ["name", "value", "text", "label", "href"])
    return with_data(rows, {"layer": layers, **size})


def memory_parts(results: Results) -> Drawn | None:
    """Return the predicted peak by part as a stacked bar, and the measured peak as a tick."""
    cells = of_column("train_step", "peak_allocated_bytes", scale=1 / GIB)(results)
    if LENGTH not in cells:
        return None
    cells = cells[cells.filter(items=list(_PART_COLUMNS)).notna().any(axis=1)]
    cells, note = choose_slice(cells, results.axes, [NAME, LENGTH, "precision"])
    if cells.empty:
        return None
    context = fullest_context(cells, "cell")
    cells = cells[cells[LENGTH] == context]
    panels = []
    for precision in evenly(ordered("precision", cells), 2):
        own = cells[cells["precision"] == precision]
        panels.append({**_memory_bars(own), "title": f"{precision}, context {context:,}"})
    return Drawn(panels, legend("box", _PART_COLOURS), f"{note}; tick: measured peak")


def _memory_bars(own: pd.DataFrame) -> Panel:
    order = evenly(ordered(NAME, own), _MOST_ROWS)
    own = own[own[NAME].isin(order)]
    own = own.assign(variant=own[NAME], scope=scopes_of(own))
    keys = ["variant", KEY, "scope"]
    predicted = own.set_index(keys).filter(items=list(_PART_COLUMNS)).astype(float) / GIB
    values = pd.Series(predicted.rename_axis(columns="part").stack(future_stack=True))
    bars = values[values > 0].reset_index(name="value")
    bars = bars.assign(part=bars["part"].map(_PART_COLUMNS))
    bars = bars.groupby([*keys, "part"], sort=False)[["value"]].sum().reset_index()
    stacked = _stacked(bars, order, _PART_COLOURS, " GiB predicted")
    labels = own["scope"] + ": " + own["shown"].map(number) + " GiB measured"
    ticks = own[["variant"]].assign(measured=rounded(own["shown"]), label=labels)
    encoding = {
        "x": "measured:Q",
        "y": channel("variant:N", sort=order),
        "description": "label:N",
        "color": {"value": light("ink")},
    }
    peaks = marks("tick", encoding, thickness=2.5, height=20)
    layers = [
        {"layer": stacked},
        with_data(data_of(ticks, ["variant", "measured", "label"]), peaks),
    ]
    cards = [{"card": card} for card in _CARDS if card < own["shown"].max() * 1.15]
    if cards:
        rule = marks("rule", {"x": "card:Q"}, aria=False, strokeDash=[3, 3], color=light("ink2"))
        layers.insert(0, with_data(cards, rule))
    return {"layer": layers, "width": _WIDTH, "height": _ROW * len(order)}


def live_memory(results: Results) -> Drawn | None:
    """Return areas of live memory by role during one step, for the cells that recorded it."""
    live = results.live()
    if live.empty:
        return None
    most = live.groupby(["cell", "event"])["live_bytes"].sum().groupby("cell").max()
    cells = results.cells.set_index("cell").loc[most.nlargest(_MOST_PANELS).index]
    roles = [role for role in ROLES if (live["role"] == role).any()]
    colours = dict(zip(roles, _ROLE_COLOURS, strict=False))
    panels = []
    for cell, row in cells.iterrows():
        own = live[live["cell"] == cell]
        panels.append({**_areas(own, colours), "title": scope_of(row)})
    return Drawn(panels, legend("box", colours), "GiB over the milliseconds of one step")


def _areas(live: pd.DataFrame, colours: Mapping[str, str]) -> Panel:
    named = live.assign(at=live["at_ms"].round(3), gib=rounded(live["live_bytes"] / GIB))
    wide = named.pivot_table(
        index=["event", "at", "phase"], columns="role", values="gib", fill_value=0.0
    )
    # A stacked chart adds up rows of the same time, so that only the highest of them may remain.
    order = wide.sum(axis=1).sort_values(ascending=False, kind="stable").index
    highest = wide.loc[order].reset_index().drop_duplicates("at").sort_values("event")
    roles = [role for role in colours if role in highest]
    long = highest.melt(["at", "phase"], roles, "role", "gib")
    ranks = long["role"].map(list(colours).index)
    encoding = {
        "x": channel("at:Q", title="ms into the step"),
        "y": channel("gib:Q", title=None, stack="zero"),
        "color": colour_channel("role:N", colours),
        "order": "rank:Q",
    }
    areas = marks("area", encoding, interpolate="step-after", aria=False)
    rows = data_of(long.assign(rank=ranks), ["at", "role", "gib", "rank"])
    begins = highest[highest["phase"] != ""].groupby("phase")[["at"]].min().reset_index()
    rules = marks("rule", {"x": "at:Q"}, strokeDash=[4, 3], aria=False, color=light("ink2"))
    words = {"x": "at:Q", "y": {"value": 2}, "text": "phase:N"}
    look = {"align": "left", "baseline": "top", "dx": 3, "fontSize": 10, "color": light("ink")}
    layers = [with_data(rows, areas), rules, marks("text", words, **look)]
    phases = data_of(begins, ["phase", "at"])
    return with_data(phases, {"layer": layers, "width": 320, "height": 180})
