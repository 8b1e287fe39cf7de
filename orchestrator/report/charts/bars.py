"""Charts of bars and areas: kernels by class, the longest kernels, and parts of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import altair as alt
import pandas as pd

from orchestrator.analysis.axes import Row
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts.chart import Drawn, LegendEntry, Panel, data_of, records, rounded
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
    sort_by,
)
from orchestrator.report.text.numbers import number
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
_CARDS = (24, 40, 80, 140)  # GiB of common GPUs
_ROLE_COLOURS = ("m1", "m2", "m3", "m5", "m6", "m4", "m7", "k5", "k4", "k2", "k3", "k6")


@dataclass(frozen=True)
class KernelClasses:
    """The kernel time of a step by class of work: one bar for each precision and way to compile."""

    def draw(self, results: Results) -> Drawn | None:
        kernels = _kernels(results)
        cells, note = _profiled(results, kernels)
        if cells.empty:
            return None
        labels = [name for name, _ in _CLASSES.values()]
        own = kernels.merge(cells[["cell", NAME, LENGTH, KEY, "variant", "scope"]], on="cell")
        names = {name: label for name, (label, _) in _CLASSES.items()}
        own = own.assign(part=own["kernel_class"].map(names).fillna(_OTHER))
        panels = []
        for name in evenly(ordered(NAME, cells), _MOST_PANELS):
            rows = own[own[NAME] == name]
            sums = rows.groupby(["variant", KEY, "scope", "part"], sort=False)["ms"].sum()
            bars = sums.rename("value").reset_index()
            context = cells.loc[cells[NAME] == name, LENGTH].iloc[0]
            title = f"{name}, context {context:,}" if context == context else str(name)
            order = list(dict.fromkeys(cells["variant"]))[:_MOST_ROWS]
            bars = bars[bars["variant"].isin(order)]
            panel = _stacked(bars, order, dict.fromkeys((*labels, _OTHER)), _CLASS_COLOURS, " ms")
            panels.append(panel.properties(title=title))
        present = [part for part in (*dict.fromkeys(labels), _OTHER) if (own["part"] == part).any()]
        legend = [LegendEntry("box", part, _CLASS_COLOURS[part]) for part in present]
        return Drawn(panels, legend, note, 2)


def _kernels(results: Results) -> pd.DataFrame:
    kernels = results.kernels()
    # Without the number of steps, the milliseconds of a step are unknown.
    known: pd.DataFrame = kernels[(kernels["name"] != OUTSIDE_OPERATORS) & kernels["ms"].notna()]
    return known


def _profiled(results: Results, kernels: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the cells whose kernels are shown: of each model, those of its longest context."""
    cells = of_column("train_step", "step_ms_median")(results)
    cells = cells[cells["cell"].isin(kernels["cell"])]
    if cells.empty or LENGTH not in cells:
        return cells.iloc[:0], ""
    shown = [NAME, LENGTH, "precision", "compile"]
    cells, note = choose_slice(cells, results.axes, shown)
    variants = cells.groupby([NAME, LENGTH])["cell"].transform("count")
    fullest = variants == variants.groupby(cells[NAME]).transform("max")
    cells = cells[fullest]
    cells = cells[cells[LENGTH] == cells.groupby(NAME)[LENGTH].transform("max")]
    cells = sort_by(cells, ("precision", "compile"))
    words = cells["compile"].replace(COMPILED)
    scopes = [scope_of(row) for row in cells.to_dict("records")]
    return cells.assign(variant=cells["precision"] + " " + words, scope=scopes), note


def _stacked(
    bars: pd.DataFrame, order: list[str], parts: Sequence[str] | dict[str, None],
    colours: Mapping[str, str], unit: str,
) -> Panel:  # fmt: skip
    """Return stacked bars with their totals. The frame has variant, part, value, scope and key."""
    parts = list(parts)
    totals = bars.groupby("variant", as_index=False)["value"].sum()
    totals = totals.assign(text=totals["value"].map(number))
    labels = [
        f"{scope}: {part} {number(value)}{unit}"
        for scope, part, value in zip(bars["scope"], bars["part"], bars["value"], strict=True)
    ]
    data = bars.assign(
        label=labels, rank=bars["part"].map(parts.index), href="#cell=" + bars[KEY],
        value=rounded(bars["value"]),
    )  # fmt: skip
    y = alt.Y("variant:N", sort=order, title=None).axis(labelLimit=130)
    highest = float(totals["value"].max()) * 1.16
    x = alt.X("value:Q", title=None, stack="zero", scale=alt.Scale(domain=[0, highest], nice=False))
    scale = alt.Scale(domain=parts, range=[light(colours[part]) for part in parts])
    chart = alt.Chart(data_of(data, ["variant", "part", "value", "label", "rank", "href"]))
    drawn = chart.mark_bar(height=16).encode(
        x=x.axis(tickCount=5, format=",~r"),
        y=y,
        color=alt.Color("part:N", scale=scale),
        order="rank:Q",
        description="label:N",
        href="href:N",
    )
    texts = alt.Chart(data_of(totals, ["variant", "value", "text"]))
    numbers = texts.mark_text(align="left", dx=4, fontSize=11, color=light("ink2"), aria=False)
    numbers = numbers.encode(x="value:Q", y=y, text="text:N")
    return alt.layer(drawn, numbers).properties(width=_WIDTH, height=_ROW * len(order))


@dataclass(frozen=True)
class LongestKernels:
    """The kernels that take most of a step, of the first and the last variant of the largest model."""

    def draw(self, results: Results) -> Drawn | None:
        kernels = _kernels(results)
        cells, note = _profiled(results, kernels)
        if cells.empty:
            return None
        largest = cells[cells[NAME] == ordered(NAME, cells)[-1]]
        ends = largest.iloc[[0, -1]] if len(largest) > 1 else largest
        panels = []
        for row in ends.to_dict("records"):
            own = kernels[kernels["cell"] == row["cell"]]
            sums = own.groupby("name")[["ms", "count"]].sum().nlargest(_TOP, "ms").reset_index()
            panels.append(
                _kernel_bars(sums, row).properties(title=f"{row[NAME]}, {row['variant']}")
            )
        return Drawn(panels, (), note, 2)


def _kernel_bars(sums: pd.DataFrame, row: Row) -> Panel:
    # Templates make names long; kernels differ at the beginning.
    names = [short_kernel_name(name).split("<")[0] for name in sums["name"]]
    unique = [f"{rank + 1}. {name[:34]}" for rank, name in enumerate(names)]
    labels = [
        f"{name}: {number(ms)} ms in {count:,} launches"
        for name, ms, count in zip(names, sums["ms"], sums["count"], strict=True)
    ]
    data = pd.DataFrame(
        {"name": unique, "value": rounded(sums["ms"]), "text": sums["ms"].map(number),
         "label": labels, "href": f"#cell={row[KEY]}"}
    )  # fmt: skip
    base = alt.Chart(data_of(data, ["name", "value", "text", "label", "href"]))
    y = alt.Y("name:N", sort=unique, title=None).axis(labelLimit=220)
    x = alt.X("value:Q", title=None).scale(domain=[0, float(data["value"].max()) * 1.18])
    bars = base.mark_bar(height=11, color=light("k1")).encode(
        x=x.axis(tickCount=4, format=",~r"), y=y, description="label:N", href="href:N"
    )
    texts = base.mark_text(align="left", dx=4, fontSize=11, color=light("ink2"), aria=False)
    return alt.layer(bars, texts.encode(x=x, y=y, text="text:N")).properties(
        width=180, height=17 * len(data)
    )


@dataclass(frozen=True)
class MemoryParts:
    """The predicted peak by part as a stacked bar, and the measured peak as a tick."""

    def draw(self, results: Results) -> Drawn | None:
        cells = of_column("train_step", "peak_allocated_bytes", scale=1 / GIB)(results)
        columns = {part: f"predicted_of_{part}_bytes" for part in _PARTS}
        columns = {part: column for part, column in columns.items() if column in cells}
        if cells.empty or not columns or LENGTH not in cells:
            return None
        cells = cells[cells[list(columns.values())].notna().any(axis=1)]
        cells, note = choose_slice(cells, results.axes, [NAME, LENGTH, "precision"])
        if cells.empty:
            return None
        context = fullest_context(cells, "cell")
        cells = cells[cells[LENGTH] == context]
        panels = []
        for precision in evenly(ordered("precision", cells), 2):
            own = cells[cells["precision"] == precision]
            panel = _memory_bars(own, columns).properties(title=f"{precision}, context {context:,}")
            panels.append(panel)
        legend = [LegendEntry("box", part, colour) for part, colour in _PART_COLOURS.items()]
        return Drawn(panels, legend, f"{note}; tick: measured peak", 2)


def _memory_bars(own: pd.DataFrame, columns: Mapping[str, str]) -> Panel:
    order = evenly(ordered(NAME, own), _MOST_ROWS)
    own = own[own[NAME].isin(order)]
    rows = []
    for row in own.to_dict("records"):
        for part, column in columns.items():
            if row[column] == row[column] and row[column]:
                rows.append({"variant": row[NAME], KEY: row[KEY], "scope": scope_of(row),
                             "part": _PARTS[part][0], "value": row[column] / GIB})  # fmt: skip
    keys = ["variant", KEY, "scope", "part"]
    bars = pd.DataFrame(rows).groupby(keys, sort=False)[["value"]].sum().reset_index()
    stacked = _stacked(bars, order, list(_PART_COLOURS), _PART_COLOURS, " GiB predicted")
    labels = [
        f"{scope_of(row)}: {number(row['shown'])} GiB measured" for row in own.to_dict("records")
    ]
    ticks = pd.DataFrame({"variant": own[NAME], "measured": rounded(own["shown"]), "label": labels})
    marks = alt.Chart(data_of(ticks, ["variant", "measured", "label"])).mark_tick(
        thickness=2.5, height=20
    )
    marks = marks.encode(
        x="measured:Q", y=alt.Y("variant:N", sort=order), description="label:N",
        color=alt.value(light("ink")),
    )  # fmt: skip
    highest = float(own["shown"].max())
    cards = [card for card in _CARDS if card < highest * 1.15]
    if cards:
        rules = alt.Chart(records([{"card": card} for card in cards]))
        rule = rules.mark_rule(aria=False, strokeDash=[3, 3], color=light("ink2"))
        return alt.layer(rule.encode(x="card:Q"), stacked, marks)
    return alt.layer(stacked, marks)


@dataclass(frozen=True)
class LiveMemory:
    """Areas of live memory by role during one step, for the cells that recorded it."""

    def draw(self, results: Results) -> Drawn | None:
        live = results.live()
        if live.empty:
            return None
        most = live.groupby(["cell", "event"])["live_bytes"].sum().groupby("cell").max()
        cells = results.cells.set_index("cell").loc[most.nlargest(_MOST_PANELS).index]
        roles = [role for role in ROLES if (live["role"] == role).any()]
        panels = []
        for cell, row in cells.iterrows():
            own = live[live["cell"] == cell]
            panels.append(_areas(own, roles).properties(title=scope_of(row)))
        legend = [
            LegendEntry("box", role, colour)
            for role, colour in zip(roles, _ROLE_COLOURS, strict=False)
        ]
        return Drawn(panels, legend, "GiB over the milliseconds of one step", 2)


def _areas(live: pd.DataFrame, roles: Sequence[str]) -> Panel:
    named = live.assign(at=live["at_ms"].round(3), gib=rounded(live["live_bytes"] / GIB))
    wide = named.pivot_table(
        index=["event", "at", "phase"], columns="role", values="gib", fill_value=0.0
    )
    # A stacked chart adds up rows of the same time, so that only the highest of them may remain.
    order = wide.sum(axis=1).sort_values(ascending=False, kind="stable").index
    highest = wide.loc[order].reset_index().drop_duplicates("at").sort_values("event")
    long = highest.melt(["at", "phase"], [role for role in roles if role in highest], "role", "gib")
    ranks = long["role"].map(list(roles).index)
    colours = [light(name) for name in _ROLE_COLOURS[: len(roles)]]
    areas = alt.Chart(data_of(long.assign(rank=ranks), ["at", "role", "gib", "rank"]))
    x = alt.X("at:Q", title="ms into the step")
    drawn = areas.mark_area(interpolate="step-after", aria=False).encode(
        x=x,
        y=alt.Y("gib:Q", title=None, stack="zero"),
        color=alt.Color("role:N", scale=alt.Scale(domain=list(roles), range=colours)),
        order="rank:Q",
    )
    begins = highest[highest["phase"] != ""].groupby("phase")[["at"]].min().reset_index()
    marks = alt.Chart(data_of(begins, ["phase", "at"]))
    rules = marks.mark_rule(strokeDash=[4, 3], aria=False, color=light("ink2")).encode(x="at:Q")
    names = marks.mark_text(align="left", baseline="top", dx=3, fontSize=10, color=light("ink"))
    names = names.encode(x="at:Q", y=alt.value(2), text="phase:N")
    return alt.layer(drawn, rules, names).properties(width=320, height=180)
