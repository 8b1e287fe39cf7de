"""The tables that put published numbers beside a run's own. Adding one is one entry in `against`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache

import pandas as pd

from orchestrator.analysis.axes import (
    GIB,
    NOTHING,
    Row,
    axis_texts,
    has_value,
    key_axes,
    sort_cells,
)
from orchestrator.analysis.results import Results
from orchestrator.report.references.devices import ALL, devices
from orchestrator.report.references.doubts import doubts_of, implied_tflops, is_time_of_a_phase
from orchestrator.report.references.explanations import explanations
from orchestrator.report.references.matching import (
    is_first_forward,
    left_open,
    matches,
    names_a_shape,
    siblings,
)
from orchestrator.report.references.parts import (
    ours_allocation,
    ours_calculated,
    ours_part,
    ours_share,
    with_allocations,
    with_parts,
    with_shares,
)
from orchestrator.report.references.records import Number, published_on
from orchestrator.report.references.schema import writeups
from orchestrator.report.tables.cell_filters import of_task
from orchestrator.report.tables.formatters import format_ms, mark, missing_text
from orchestrator.report.tables.kernel_tables import gemm_shares, softmax_and_matmul
from orchestrator.report.tables.layouts import PHASE, Header, Rows, each
from orchestrator.report.tables.table import NOTES, Table

Numbers = tuple[Number, ...]
Ours = Callable[
    [Number, Row], float | None
]  # what a cell of ours has in place of a number; None: nothing
Prepare = Callable[[Results], pd.DataFrame]

_ORDER = ("built", "forward", "backward", "optimizer", "step", "")
_LONGEST_NAME = 60  # letters of a kernel
_MEANS = (
    "Ours is a mean where theirs is, else a median; the interval is of our median in either case, out of which a few slow steps "
    "move a mean."
)
_MODES = ("compile_mode", "compile_cache")  # which an eager cell does not have


def published_tables(device: str | None) -> tuple[Table, ...]:
    """Those of `--against DEVICE`; none without."""
    return () if device is None else against(device)


@cache
def against(device: str) -> tuple[Table, ...]:
    """The tables of what was published on a device, or on ALL, each with the cells of the run that are the same.

    Raises KeyError.
    """
    numbers = _once(published_on(device))
    where = f"Published on {'any device' if device == ALL else devices()[device].name} ({_sources(numbers)})"
    times = tuple(
        number
        for number in numbers
        if is_time_of_a_phase(number) and number.statistic in ("mean", "median")
    )
    return (
        Table(
            "against-timings",
            f"Against {device}: timings",
            f"{where}, and this run's: milliseconds of a phase waited for at its end, and of a step of such phases. "
            f"Where ours / theirs is above 1.00, ours takes longer. {_MEANS} TFLOP/s are what their time implies.",
            Beside(
                _of(times, "train_step"),
                _ours_ms,
                format_ms,
                "ms",
                interval=_interval,
                timed=_itself,
            ),
            of_task("train_step"),
        ),
        Table(
            "against-attention",
            f"Against {device}: attention",
            f"{where}, and this run's: milliseconds of a pass, waited for. {_MEANS} TFLOP/s are what their time implies.",
            Beside(
                _of(times, "attention"),
                _ours_ms,
                format_ms,
                "ms",
                interval=_interval,
                timed=_itself,
            ),
            of_task("attention"),
        ),
        Table(
            "against-compile",
            f"Against {device}: what compiling gains",
            f"{where}, and this run's: how many times faster compiled than eager, all else being equal.",
            Beside(
                _speed_ups(times, "compile", ("eager",)),
                _speed_up_over("compile"),
                _times,
                "",
                _with_base("compile", "eager"),
                timed=_both("compile"),
            ),
        ),
        Table(
            "against-precision",
            f"Against {device}: what a narrow precision gains",
            f"{where}, and this run's: how many times faster than in fp32, which theirs may have been tf32.",
            Beside(
                _speed_ups(times, "precision", ("fp32", "tf32")),
                _speed_up_over("precision"),
                _times,
                "",
                _with_base("precision", "fp32"),
                timed=_both("precision"),
            ),
        ),
        Table(
            "against-memory",
            f"Against {device}: peak memory",
            f"{where}, and this run's: GiB allocated at most.",
            Beside(_peaks(_of(numbers, "train_step")), _ours_bytes, _gib, "GiB"),
            of_task("train_step"),
        ),
        Table(
            "against-attention-memory",
            f"Against {device}: memory of attention",
            f"{where}, and this run's: GiB held at the end of a phase, and at most.",
            Beside(_peaks(_of(numbers, "attention")), _ours_bytes, _gib, "GiB"),
            of_task("attention"),
        ),
        Table(
            "against-gemm-share",
            f"Against {device}: matrix products",
            f"{where}, and this run's: their share of the time of all kernels.",
            Beside(
                _with_metric(numbers, "gemm_share"),
                _ours_share,
                "{:.1%}".format,
                "",
                _with_kernels(gemm_shares),
            ),
            of_task("train_step"),
        ),
        Table(
            "against-softmax-matmul",
            f"Against {device}: softmax over matrix products",
            f"{where}, and this run's: the time of softmax over that of the two matrix products of attention.",
            Beside(
                _with_metric(numbers, "softmax_over_matmul"),
                _ours_softmax,
                "{:.1%}".format,
                "",
                _with_kernels(softmax_and_matmul),
            ),
            of_task("train_step"),
        ),
        Table(
            "against-accumulation",
            f"Against {device}: adding up",
            f"{where}, and this run's: the sum that was found.",
            Beside(
                _with_metric(numbers, "sum"),
                lambda number, row: _column(row, "sum"),
                "{:.9f}".format,
                "",
            ),
            of_task("accumulation"),
        ),
        Table(
            "against-kernels",
            f"Against {device}: the kernels that take most",
            f"{where}, and this run's: the share of the phase's kernel time that the kernel of the same rank takes. GPUs have "
            "kernels of their own: which ones are ours, `kernels` says.",
            Beside(_ranked(numbers), ours_share, "{:.1%}".format, "", with_shares),
            of_task("train_step"),
        ),
        Table(
            "against-attention-parts",
            f"Against {device}: parts of attention",
            f"{where}, and this run's: milliseconds of the kernels of a part, of all layers, or of one where theirs is.",
            Beside(_of_parts(numbers), ours_part, format_ms, "ms", with_parts),
            of_task("train_step"),
        ),
        Table(
            "against-allocations",
            f"Against {device}: single allocations",
            f"{where}, and this run's: MiB of the largest allocation of a part at the peak, or of that of the same rank.",
            Beside(_allocated(numbers), ours_allocation, _mib, "MiB", with_allocations),
            of_task("train_step"),
        ),
        Table(
            "against-calculations",
            f"Against {device}: what was calculated",
            f"{where}, and measured in this run: MiB of a tensor, and of what is kept for the backward pass.",
            Beside(_calculated(numbers), ours_calculated, _mib, "MiB"),
        ),
    )


@dataclass(frozen=True)
class Beside:
    """One row a published number and a cell of ours that it may be of.

    ours: the same of our cell. show: prints either. unit: of both. prepare: our cells, with what `ours` needs of them. interval:
    of our median, also where ours is a mean. timed: the cells whose steps it is of, which are marked where a host decides those.
    """

    numbers: Numbers
    ours: Ours
    show: Callable[[float], str]
    unit: str
    prepare: Prepare = lambda results: results.cells
    interval: Callable[[Number, Row], str] = lambda number, row: NOTHING
    timed: Callable[[Row], tuple[Row, ...]] = lambda row: ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        cells = self.prepare(results) if self.numbers else results.cells.iloc[:0]
        pairs = [
            (number, row)
            for number, row in matches(self.numbers, each(cells))
            if self._says_something(number, row)
        ]
        mine = (
            cells[cells["cell"].isin({row["cell"] for _, row in pairs})]
            if pairs
            else cells.iloc[:0]
        )
        axes = key_axes(replace(results, cells=mine)) if pairs else []
        place = {cell: rank for rank, cell in enumerate(sort_cells(mine, axes)["cell"])}
        pairs.sort(
            key=lambda pair: (place[pair[1]["cell"]], _ORDER.index(pair[0].phase), pair[0].writeup)
        )
        titles = [f"{whose} {self.unit}".strip() for whose in ("ours", "theirs")]
        measured = [titles[0], "95 % interval of our median", titles[1], "both are"]
        header = [
            *axes,
            PHASE,
            "published in",
            "on",
            "there on",
            *measured,
            "ours / theirs",
            "their TFLOP/s",
            NOTES,
        ]
        return header, [self._row(number, row, axes) for number, row in pairs]

    def _says_something(self, number: Number, row: Row) -> bool:
        """Ours has the same, or ended in a way that is worth a word."""
        return row["status"] != "ok" or self.ours(number, row) is not None

    def _row(self, number: Number, row: Row, axes: list[str]) -> list[str]:
        ours, theirs, marked = self.ours(number, row), number.amount, mark(*self.timed(row))
        tflops = implied_tflops(number)
        return [
            *axis_texts(row, axes),
            number.phase or NOTHING,
            ": ".join(filter(None, (number.writeup, number.title, number.variant))),
            devices()[number.device].name
            if len({one.device for one in self.numbers}) > 1
            else NOTHING,
            number.labels.get("device", "cuda").replace("cuda", NOTHING),
            missing_text(row) if ours is None else f"{self.show(ours)}{marked}",
            NOTHING if ours is None else self.interval(number, row),
            "OOM" if theirs is None else self.show(theirs),
            f"{number.statistic}s" if is_time_of_a_phase(number) else NOTHING,
            f"{ours / theirs:.2f}{marked}"
            if ours is not None and theirs and names_a_shape(number)
            else NOTHING,
            NOTHING if tflops is None else f"{tflops:.1f}",
            "\n".join(
                filter(
                    None,
                    (
                        _stands_for(number, row),
                        *doubts_of(number),
                        left_open(number),
                        _said(number),
                        _explained(number),
                    ),
                )
            ),
        ]


def _stands_for(number: Number, row: Row) -> str:
    return (
        "Ours is of the forward pass of the first step, before there are gradients."
        if is_first_forward(number, row)
        else ""
    )


def _said(number: Number) -> str:
    return (
        f"Said there: {'; '.join(f'{subject}: {words}' for subject, words in number.said)}."
        if number.said
        else ""
    )


def _explained(number: Number) -> str:
    return explanations()[number.writeup, number.table]


def counterparts() -> dict[tuple[str, str], tuple[str, ...]]:
    """By write-up and table, those of ours that its numbers stand in; of one that is printed again, those of the first."""
    found: dict[tuple[str, str], tuple[str, ...]] = {
        (one.name, table.name): () for one in writeups() for table in one.table
    }
    for table in against(ALL):
        assert isinstance(table.layout, Beside)
        for key in dict.fromkeys((number.writeup, number.table) for number in table.layout.numbers):
            found[key] += (table.name,)
    first = {
        (one.name, table.name): (one.name, table.repeats)
        for one in writeups()
        for table in one.table
        if table.repeats
    }
    return {key: names or found.get(first.get(key, key), ()) for key, names in found.items()}


def _sources(numbers: Numbers) -> str:
    named = {number.writeup for number in numbers}
    return "; ".join(
        f"{one.name} is {one.title} ({one.source})" for one in writeups() if one.name in named
    )


def nothing_in_common(device: str) -> str:
    """In place of tables that would be empty: what there is of a device."""
    numbers = published_on(device)
    tasks: dict[str, dict[str, list[object]]] = {}
    for number in numbers:
        told = tasks.setdefault(number.task, {})
        for axis in ("size", "d_head", "context_length", "precision", "compile"):
            told.setdefault(axis, []).extend(number.params.get(axis, ()))
    parts = [
        " ".join(
            [
                task,
                *(
                    f"{axis}={','.join(map(str, dict.fromkeys(values)))}"
                    for axis, values in told.items()
                    if values
                ),
            ]
        )
        for task, told in tasks.items()
    ]
    return f"--against {device}: none of its {len(numbers)} published numbers is of a cell of this run. There are {'; '.join(parts)}"


def _once(numbers: Numbers) -> Numbers:
    """Without what a write-up prints again, as a table or as a column of another."""

    def key(number: Number) -> tuple[object, ...]:
        of_what = (
            number.writeup,
            number.device,
            number.task,
            number.metric,
            number.phase,
            number.statistic,
            number.variant,
        )
        return (
            *of_what,
            number.amount,
            frozenset(number.params.items()),
            frozenset(number.labels.items()),
        )

    return tuple(
        {key(number): number for number in reversed(numbers) if not number.repeats}.values()
    )[::-1]


def _of(numbers: Numbers, task: str) -> Numbers:
    return tuple(number for number in numbers if number.task == task)


def _with_metric(numbers: Numbers, metric: str) -> Numbers:
    return tuple(number for number in numbers if number.metric == metric)


def _ranked(numbers: Numbers) -> Numbers:
    """Shares of kernels, each with its rank among those of its cell, in the order that they are printed in."""
    shares = [
        number
        for number in numbers
        if number.metric in ("share", "top_share") and "part" not in number.labels
    ]
    above: Counter[object] = Counter()
    found = []
    for number in shares:
        params = tuple(sorted(number.params.items()))
        of_cell = (number.writeup, number.table, number.metric, number.phase, params)
        above[of_cell] += 1
        kernel = number.labels.get("kernel", "")[:_LONGEST_NAME]
        rank = str(above[of_cell])
        variant = ", ".join(filter(None, (f"rank {rank}", kernel)))
        found.append(replace(number, labels={**number.labels, "rank": rank}, variant=variant))
    return tuple(found)


def _of_parts(numbers: Numbers) -> Numbers:
    """Times of a part of attention."""
    times = [
        number
        for number in _with_metric(numbers, "duration")
        if "part" in number.labels and number.statistic != "sd"
    ]
    return tuple(replace(number, variant=number.labels["part"]) for number in times)


def _allocated(numbers: Numbers) -> Numbers:
    sizes = [
        number
        for number in _with_metric(numbers, "tensor")
        if number.kind == "allocations" and number.statistic == "mean"
    ]
    return tuple(replace(number, variant=_part_and_rank(number)) for number in sizes)


def _calculated(numbers: Numbers) -> Numbers:
    told = [
        number
        for number in numbers
        if number.kind == "calculation" and number.metric in ("tensor", "saved")
    ]
    return tuple(
        replace(number, variant=_part_and_rank(number))
        for number in told
        if number.statistic == "mean"
    )


def _part_and_rank(number: Number) -> str:
    return " ".join(filter(None, (number.labels.get("rank", ""), number.labels.get("part", ""))))


def _peaks(numbers: Numbers) -> Numbers:
    return (*_with_metric(numbers, "held"), *_with_metric(numbers, "peak"))


def _speed_ups(times: Numbers, axis: str, base: tuple[str, ...]) -> Numbers:
    """How many times faster each is than what was published of the cell that differs in `axis` alone."""
    bases: dict[object, list[Number]] = defaultdict(list)
    for number in times:
        if number.amount and set(number.params.get(axis, ("?",))) <= set(base):
            bases[_but_for(axis, number)].append(number)
    others = [
        number
        for number in times
        if number.amount and not set(number.params.get(axis, base)) & set(base)
    ]
    return tuple(
        _over(number, first, axis) for number in others for first in bases[_but_for(axis, number)]
    )


def _but_for(axis: str, number: Number) -> object:
    """What a number is of, whatever it has in `axis`."""
    params = tuple(sorted((name, values) for name, values in number.params.items() if name != axis))
    who = (number.writeup, number.device)
    return (
        *who,
        number.task,
        number.phase,
        number.statistic,
        params,
        tuple(sorted(number.labels.items())),
    )


def _over(number: Number, base: Number, axis: str) -> Number:
    title = number.title if number.title == base.title else f"{number.title}, over {base.title}"
    faster = Decimal((base.amount or 0.0) / (number.amount or 1.0))
    doubts = tuple(dict.fromkeys([*doubts_of(number), *doubts_of(base)]))
    return replace(
        number,
        metric=f"speed_up_over_{axis}",
        title=title,
        value=faster,
        unit="1",
        over=1,
        or_unit=None,
        doubts=doubts,
    )


def _ours_ms(number: Number, row: Row) -> float | None:
    stem = _timed(number, row)
    return None if stem is None else _column(row, f"{stem}_{number.statistic}")


def _timed(number: Number, row: Row) -> str | None:
    """A step is the one that waits at each phase, which is nearest to a loop that waits at each step."""
    names = ("step_synced", "step") if number.phase == "step" else (number.phase,)
    return next(
        (f"{name}_ms" for name in names if _column(row, f"{name}_ms_{number.statistic}")), None
    )


def _interval(number: Number, row: Row) -> str:
    """Of the median of ours."""
    stem = _timed(number, row)
    ends = [_column(row, f"{stem}_ci_{end}") for end in ("low", "high")]
    return " to ".join(format_ms(ms) for ms in ends if ms is not None) or NOTHING


def _itself(row: Row) -> tuple[Row, ...]:
    return (row,)


def _both(axis: str) -> Callable[[Row], tuple[Row, ...]]:
    """And the one that it is held against."""
    return lambda row: tuple(filter(None, (row, row[f"_over_{axis}"])))


def _ours_bytes(number: Number, row: Row) -> float | None:
    if is_first_forward(number, row):
        return _column(row, "first_forward_peak_allocated_bytes")
    return _column(
        row,
        f"{number.phase}_held_allocated_bytes"
        if number.metric == "held"
        else "peak_allocated_bytes",
    )


def _ours_share(number: Number, row: Row) -> float | None:
    return _column(row, "gemm_share")


def _ours_softmax(number: Number, row: Row) -> float | None:
    softmax, matmul = (_column(row, f"{number.phase}_{part}_ms") for part in ("softmax", "matmul"))
    return softmax / matmul if softmax is not None and matmul else None


def _speed_up_over(axis: str) -> Ours:
    def ours(number: Number, row: Row) -> float | None:
        own, base = _ours_ms(number, row), row[f"_over_{axis}"]
        over = None if base is None else _ours_ms(number, base)
        return None if own is None or over is None else over / own

    return ours


def _with_base(axis: str, base: str) -> Prepare:
    """Beside each cell the one that it is compared with, as a row; only the cells that have one."""

    def prepare(results: Results) -> pd.DataFrame:
        cells = results.cells
        if axis not in cells:
            return cells.iloc[:0]
        found = siblings(each(cells), results.axes, axis, base, _MODES if axis == "compile" else ())
        others = cells[cells["cell"].isin(found) & (cells[axis] != base)]
        return others.assign(**{f"_over_{axis}": [found[cell] for cell in others["cell"]]})

    return prepare


def _with_kernels(by_cell: Callable[[pd.DataFrame], pd.DataFrame]) -> Prepare:
    def prepare(results: Results) -> pd.DataFrame:
        if "attributed_to_phase" not in results.cells:
            return results.cells.iloc[:0]
        return results.cells.merge(by_cell(results.kernels()), on="cell")

    return prepare


def _column(row: Row, name: str) -> float | None:
    return float(row[name]) if has_value(row, name) else None


def _mib(nbytes: float) -> str:
    return f"{nbytes / 1024**2:.2f}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"
