"""The shapes of tables of kernels: like those of cells, over the rows that each cell's kernels are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import pandas as pd

from orchestrator.analysis.axes import NOTHING, Row, axis_texts, key_axes, sort_cells
from orchestrator.analysis.results import Results
from orchestrator.report.tables.formatters import format_ms, short_kernel_name
from orchestrator.report.tables.layouts import PHASE, Header, Layout, Rows, each, groups

PHASES = ("forward", "backward", "optimizer", "")
OUTSIDE_PHASES = "outside"
OUTSIDE_OPERATORS = "outside operators"
GEMM = "GEMM"
ATTENTION_MATMULS = ("scores", "attention output")
_SHOWN_MODULES = 3


def ms_of_parts(kernels: pd.DataFrame, names: Collection[str], by: str) -> pd.Series[float]:
    """The milliseconds that some parts of the model take. Not of a group in which one of them is
    fused with another part.
    """
    parts = {module: set(module.split("+")) for module in kernels["module"].unique()}
    within = [module for module, fused in parts.items() if fused <= set(names)]
    beyond = [
        module for module, fused in parts.items() if fused & set(names) and module not in within
    ]
    took_ms = kernels[kernels["module"].isin(within)].groupby(by, observed=True)["ms"].sum()
    return took_ms.drop(kernels.loc[kernels["module"].isin(beyond), by].unique(), errors="ignore")


@dataclass(frozen=True)
class WithKernels:
    """Another layout, over cells that have further columns: what `columns` makes of their kernels,
    one row a cell.
    """

    columns: Callable[[pd.DataFrame], pd.DataFrame]
    layout: Layout

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        further = self.columns(results.kernels())
        return self.layout.lay_out(
            replace(results, cells=results.cells.merge(further, on="cell", how="left"))
        )


@dataclass(frozen=True)
class TopKernels:
    """The kernels that took longest, of each cell and phase, in the columns of nsys's
    cuda_gpu_kern_sum.
    """

    count: int
    chosen: Callable[[pd.DataFrame], pd.DataFrame] = lambda kernels: kernels

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        rows: Rows = []
        for cell, phase, kernels in _by_cell_and_phase(results, axes):
            total_ms = kernels["ms"].sum()
            for kernel in _top_by_name(self.chosen(kernels), self.count):
                rows.append([*axis_texts(cell, axes), phase, *_kernel_texts(kernel, total_ms)])
        titles = [
            "time",
            "total ms",
            "instances",
            "avg µs",
            "med µs",
            "min µs",
            "max µs",
            "sd µs",
            "class",
            "modules",
            "name",
        ]
        return [*axes, PHASE, *titles], rows


@dataclass(frozen=True)
class ByClass:
    """One row a cell and phase, one column a class: its share of the phase's kernel time."""

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        present = (
            results.kernels().groupby("kernel_class")["ms"].sum().sort_values(ascending=False).index
        )
        rows: Rows = []
        for cell, phase, kernels in _by_cell_and_phase(results, axes):
            total_ms, by_class = kernels["ms"].sum(), kernels.groupby("kernel_class")["ms"].sum()
            shares = [
                f"{by_class[name] / total_ms:.1%}" if name in by_class else NOTHING
                for name in present
            ]
            rows.append([*axis_texts(cell, axes), phase, format_ms(total_ms), *shares])
        return [*axes, PHASE, "kernel ms", *(f"{name} share" for name in present)], rows


@dataclass(frozen=True)
class ByModule:
    """One row a cell and module, one column a phase: milliseconds, and the module's share of the
    step's kernel time.
    """

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes, all_kernels = key_axes(results), results.kernels()
        phases = [phase for phase in PHASES if (all_kernels["phase"] == phase).any()]
        rows: Rows = []
        for cell, kernels in _by_cell(results, axes):
            inside = kernels[kernels["name"] != OUTSIDE_OPERATORS]
            table = inside.pivot_table(index="module", columns="phase", values="ms", aggfunc="sum")
            for module in table.sum(axis=1).sort_values(ascending=False).index:
                times = [table.loc[module].get(phase) for phase in phases]
                texts = [
                    NOTHING if time is None or pd.isna(time) else format_ms(time) for time in times
                ]
                share = table.loc[module].sum() / inside["ms"].sum()
                rows.append(
                    [*axis_texts(cell, axes), module or "not attributed", *texts, f"{share:.1%}"]
                )
        return [
            *axes,
            "module",
            *(f"{phase or OUTSIDE_PHASES} ms" for phase in phases),
            "share",
        ], rows


@dataclass(frozen=True)
class Fused:
    """One row a class: how many kernels of it a step has and how long they take, eager and compiled
    side by side.
    """

    axes = ("compile", "compile_mode", "compile_cache")

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        keys, all_kernels = key_axes(results, without=self.axes), results.kernels()
        ways = list(
            dict.fromkeys(
                self._way(row) for row in each(sort_cells(results.cells, self._present(results)))
            )
        )
        rows: Rows = []
        for group in groups(sort_cells(results.cells, keys), keys):
            cells = {self._way(row): row for row in group}
            tables = {
                way: _counts(all_kernels[all_kernels["cell"] == row["cell"]])
                for way, row in cells.items()
            }
            if len(tables) < 2:
                continue
            classes = (
                pd.concat(tables.values())["ms"]
                .groupby(level=0)
                .max()
                .sort_values(ascending=False)
                .index
            )
            for name in classes:
                texts = [text for way in ways for text in _count_texts(tables.get(way), name)]
                rows.append([*axis_texts(next(iter(cells.values())), keys), name, *texts])
        return [
            *keys,
            "class",
            *(f"{way} {title}" for way in ways for title in ("kernels", "ms")),
        ], rows

    def _present(self, results: Results) -> list[str]:
        return [axis for axis in self.axes if axis in results.cells]

    def _way(self, row: Row) -> str:
        mode = row.get("compile_mode", "default")
        return (
            row["compile"]
            if mode == "default" or row["compile"] == "eager"
            else f"{row['compile']} {mode}"
        )


@dataclass(frozen=True)
class Difference:
    """The kernels by which two cells differ most: of two, those; of more, the first two that one
    axis alone tells apart.
    """

    count: int
    preferred: tuple[str, ...] = ("compile", "precision", "attention", "pass")

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        pair = self._pair(results)
        if pair is None:
            return [], []
        kernels, names = results.kernels(), [self._name(cell, pair, results) for cell in pair]
        left, right = (_per_kernel(kernels[kernels["cell"] == cell["cell"]]) for cell in pair)
        both = left.add_suffix("_left").join(right.add_suffix("_right"), how="outer").fillna(0.0)
        both["more_ms"] = both["ms_right"] - both["ms_left"]
        ordered = both.loc[both["more_ms"].abs().sort_values(ascending=False).index].head(
            self.count
        )
        rows = [
            [
                row["phase"] or OUTSIDE_PHASES,
                row["kernel_class"],
                *_pair_texts(row),
                short_kernel_name(row["name"]),
            ]
            for row in each(ordered.reset_index())
        ]
        titles = [f"{name} {title}" for name in names for title in ("kernels", "ms")]
        return [PHASE, "class", *titles, "more ms", "name"], rows

    def _pair(self, results: Results) -> tuple[Row, Row] | None:
        axes = key_axes(results)
        cells = list(each(sort_cells(results.cells, axes)))
        if len(cells) == 2:
            return cells[0], cells[1]
        for axis in [axis for axis in self.preferred if axis in axes]:
            for members in groups(
                sort_cells(results.cells, axes), [other for other in axes if other != axis]
            ):
                if len(members) > 1:
                    return members[0], members[1]
        return None

    def _name(self, cell: Row, pair: tuple[Row, Row], results: Results) -> str:
        told = [axis for axis in results.axes if str(pair[0].get(axis)) != str(pair[1].get(axis))]
        return " ".join(f"{axis}={cell[axis]}" for axis in told) or str(cell["cell"])


def _by_cell(results: Results, axes: list[str]) -> Iterator[tuple[Row, pd.DataFrame]]:
    of_cell = dict(iter(results.kernels().groupby("cell")))
    for cell in each(sort_cells(results.cells, axes)):
        if cell["cell"] in of_cell:
            yield cell, of_cell[cell["cell"]]


def _by_cell_and_phase(
    results: Results, axes: list[str]
) -> Iterator[tuple[Row, str, pd.DataFrame]]:
    """What is outside of operators is no kernel: the shares are of what is inside."""
    for cell, kernels in _by_cell(results, axes):
        inside = kernels[kernels["name"] != OUTSIDE_OPERATORS]
        for phase in PHASES:
            of_phase = inside[inside["phase"] == phase]
            if len(of_phase):
                yield cell, phase or OUTSIDE_PHASES, of_phase


def _top_by_name(kernels: pd.DataFrame, count: int) -> list[Row]:
    """The kernels' names with the longest totals, each with what its rows of several modules and
    operators come to.

    Counts, times, means, extremes and standard deviations are exact; a median of several rows is
    the median of their medians, each as often as it has instances, and `exact_median` is false.
    """
    by_name = kernels.groupby("name", observed=True)
    names = by_name["ms"].sum().sort_values(ascending=False, kind="stable").index[:count]
    return [_merge(str(name), by_name.get_group(name)) for name in names]


def _merge(name: str, rows: pd.DataFrame) -> dict[str, object]:
    counts, total = rows["count"], rows["count"].sum()
    mean_ns = rows["total_ns"].sum() / total
    squares = (counts - 1) * rows["sd_ns"].fillna(0.0) ** 2 + counts * (
        rows["mean_ns"] - mean_ns
    ) ** 2
    return {
        "name": name,
        "kernel_class": rows["kernel_class"].iloc[0],
        "modules": rows.groupby("module")["ms"].sum().sort_values(ascending=False),
        "instances": total / (rows["steps"].iloc[0] if pd.notna(rows["steps"].iloc[0]) else 1),
        "ms": rows["ms"].sum(),
        "mean_ns": mean_ns,
        "median_ns": rows["median_ns"].loc[rows.index.repeat(counts)].median(),
        "exact_median": len(rows) == 1,
        "min_ns": rows["min_ns"].min(),
        "max_ns": rows["max_ns"].max(),
        "sd_ns": (squares.sum() / (total - 1)) ** 0.5 if total > 1 else None,
    }


def _kernel_texts(kernel: Row, total_ms: float) -> list[str]:
    return [
        f"{kernel['ms'] / total_ms:.1%}",
        format_ms(kernel["ms"]),
        f"{kernel['instances']:g}",
        _us(kernel["mean_ns"]),
        ("" if kernel["exact_median"] else "≈") + _us(kernel["median_ns"]),
        _us(kernel["min_ns"]),
        _us(kernel["max_ns"]),
        _us(kernel["sd_ns"]),
        kernel["kernel_class"],
        _modules(kernel["modules"]),
        short_kernel_name(kernel["name"]),
    ]


def _us(ns: float | None) -> str:
    return NOTHING if ns is None or pd.isna(ns) else f"{ns / 1e3:.1f}"


def _modules(times: pd.Series[float]) -> str:
    """The modules that a kernel works for, the longest first."""
    names = [str(name) or "not attributed" for name in times.index]
    more = f", {len(names) - _SHOWN_MODULES} more" if len(names) > _SHOWN_MODULES else ""
    return ", ".join(names[:_SHOWN_MODULES]) + more


def _counts(kernels: pd.DataFrame) -> pd.DataFrame:
    """By class: how many kernels a step has, and their ms."""
    return _per_step(kernels).groupby("kernel_class")[["kernels", "ms"]].sum()


def _per_step(kernels: pd.DataFrame) -> pd.DataFrame:
    inside = kernels[kernels["name"] != OUTSIDE_OPERATORS]
    return inside.assign(kernels=inside["count"] / inside["steps"].fillna(1))


def _count_texts(table: pd.DataFrame | None, name: str) -> list[str]:
    if table is None or name not in table.index:
        return [NOTHING, NOTHING]
    row: Row = table.loc[name]
    return [f"{row['kernels']:g}", format_ms(row["ms"])]


def _per_kernel(kernels: pd.DataFrame) -> pd.DataFrame:
    return _per_step(kernels).groupby(["phase", "kernel_class", "name"])[["kernels", "ms"]].sum()


def _pair_texts(row: Row) -> list[str]:
    sides = [
        text
        for side in ("left", "right")
        for text in (f"{row[f'kernels_{side}']:g}", format_ms(row[f"ms_{side}"]))
    ]
    return [*sides, f"{row['more_ms']:+.3f}"]
