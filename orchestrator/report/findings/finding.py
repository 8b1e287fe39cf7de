"""A finding: a number of a run, its interval, and a sentence, with the cells that it rests on.

A finding compares like with like: its cells are pairs that agree in all axes but the one in
question. The page, the terminal and `answers.md` show the same findings with the same marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from orchestrator.analysis.axes import RUN, Row, has_value, ordered_values
from orchestrator.analysis.pairs import BASE, combinations, is_clear, select
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.report.text.cell_names import LENGTH, PASSES, name_of, scope_of
from orchestrator.report.text.memory_failures import NO_TABLE, TextTable
from orchestrator.report.text.numbers import interval, marks, ratio, span
from tasks.spec.parameters import TIMING_AXES

Basis = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Finding:
    """A number of a run, and a sentence that starts with a conclusion.

    label: what the number is. scope: the cells that it is about. gain: the share of the time of a
    step, of memory or of cells that a reader could recover, at least; 0 if there is nothing to
    recover. basis: the ids of the cells that the number rests on, each with that of its counterpart
    if it is a comparison. is_cpu_bound: the number is about times of CPU-bound steps. is_clear:
    false if it may be chance. section: the question of the page that it answers, by default that of
    its rule.
    """

    label: str
    number: str
    interval: str
    conclusion: str
    detail: str = ""
    scope: str = ""
    gain: float = 0.0
    basis: Basis = ()
    is_cpu_bound: bool = False
    is_clear: bool = True
    table: TextTable = NO_TABLE
    section: str = ""

    @property
    def marked_number(self) -> str:
        """The number with its marks, which every rendering shows."""
        return f"{self.number}{marks(self.is_cpu_bound, not self.is_clear)}"

    @property
    def sentence(self) -> str:
        return f"{self.conclusion} {self.detail}".strip()


def of_pair(pair: Row, label: str, conclusion: str, detail: str) -> Finding:
    """Return what one pair of cells says: its ratio, and the time that can be saved at least."""
    found = of_pairs(pd.DataFrame([pair]).infer_objects(), label, conclusion, detail)
    return replace(found, scope=scope_of(pair))


def of_pairs(
    found: pd.DataFrame, label: str, conclusion: str, detail: str, noun: str = "pair"
) -> Finding:
    """Return what pairs of cells say: the median and the range of their ratios, and the least gain.

    Of one pair, the range is the interval of its ratio.
    """
    spread, is_certain = span(found["ratio"]), bool(is_clear(found).any())
    if len(found) == 1:
        only = found.iloc[0]
        spread = interval(only["low"], only["high"], only["coverage"])
    return Finding(
        label,
        ratio(found["ratio"].median()),
        spread,
        conclusion,
        detail,
        counted(len(found), noun),
        least_gain(found["low"].median(), found["high"].median()) if is_certain else 0.0,
        list(zip(found["cell"], found["cell" + BASE], strict=True)),
        bool(found["is_cpu_bound"].any()),
        is_certain,
    )


def basis_of_cells(cells: pd.DataFrame) -> Basis:
    """Return the id of each cell."""
    return [(cell,) for cell in cells["cell"]]


def extreme(cells: pd.DataFrame, column: str, largest: bool) -> Row:
    """Return the row with the largest or the smallest value of a column, or None without values."""
    if column not in cells or cells[column].isna().all():
        return None
    values = cells[column].astype(float)
    return cells.iloc[values.argmax() if largest else values.argmin()]


def best_of(found: pd.DataFrame) -> Row:
    """Return the pair with the largest ratio, of those with a clear one if any has."""
    clear = found[is_clear(found)]
    return extreme(clear if len(clear) else found, "ratio", largest=True)


def peak_of(row: Row) -> tuple[float, str] | None:
    """Return the peak of a cell in bytes and what it counts, or None if it is unknown.

    On a GPU it is the allocator's, on a CPU the resident memory of the whole process.
    """
    for column, what in (("peak_rss_bytes", "resident"), ("peak_allocated_bytes", "allocated")):
        if has_value(row, column) and row[column] > 0:
            return float(row[column]), what
    return None


def subject_of(row: Row) -> str:
    """Return a cell as the subject of a sentence, such as `A training step of xl at context 512`."""
    pass_name = PASSES.get(str(row.get("pass")), "step")
    context = f" at context {row[LENGTH]:,}" if has_value(row, LENGTH) else ""
    return f"A {pass_name} of {name_of(row)}{context}"


def has_cell_with(cells: pd.DataFrame, axis: str, value: str) -> bool:
    return axis in cells and bool((cells[axis] == value).any())


def cells_with(results: Results, task: str, *columns: str) -> pd.DataFrame:
    """Return the cells of a task that have a value in each of the columns."""
    cells = results.cells
    if not {"task", *columns} <= set(cells):
        return cells.iloc[:0]
    is_known = cells[list(columns)].notna().all(axis=1)
    return select(cells, (cells["task"] == task) & is_known)


def main_run(found: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the run that has most of them: other runs repeat some of them."""
    sizes = found.get(RUN, pd.Series(dtype=object)).value_counts()
    return select(found, found[RUN] == sizes.index[0]) if len(sizes) else found


def tally(found: pd.DataFrame, subject: str, noun: str) -> str:
    """Return how many pairs are faster, slower or neither, as the conclusion of a finding.

    subject: what is compared, such as `bf16`. noun: names a cell, such as `training step`.
    """
    clear = is_clear(found)
    count, faster = len(found), int((clear & (found["ratio"] > 1)).sum())
    slower = int(clear.sum()) - faster
    unclear = count - faster - slower
    if unclear == count:
        return f"{subject} makes no clear difference."
    if count in (faster, slower):
        which = {1: f"a {noun}", 2: f"both {noun}s"}.get(count, f"all {count:,} {noun}s")
        return f"{subject} makes {which} {'faster' if faster else 'slower'}."
    parts = [f"{subject} makes {faster:,} of {count:,} {noun}s faster"]
    parts += [f"{slower:,} slower"] if slower else []
    parts += [f"{unclear:,} without a clear difference"] if unclear else []
    return f"{', '.join(parts)}."


def least_gain(low: float, high: float) -> float:
    """Return the share of a time that a ratio saves at least, by its interval; 0 if it is unclear.

    A ratio above 1 is saved by choosing the cell, one below 1 by choosing its counterpart.
    """
    if low > 1:
        return 1 - 1 / low
    return max(1 - high, 0.0)


def matched_on(cells: pd.DataFrame, axis: str, keys: Sequence[str]) -> pd.DataFrame:
    """Return the cells whose other axes `keys` occur with each value of an axis.

    Statistics by that axis then compare the same cells. Without such cells the frame is empty.
    """
    others = [key for key in keys if key != axis and key in cells]
    if cells.empty:
        return cells
    values = cells[axis].astype(str)
    counts = values.groupby(combinations(cells, others)).transform("nunique")
    return select(cells, counts == values.nunique())


def warmest(results: Results, cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells without those that were also measured after more warm-up steps."""
    if "warmup_steps" not in cells:
        return cells
    axes = [axis for axis in results.axes if axis in cells and axis not in TIMING_AXES]
    # Sorting several hundred columns would take most of the time.
    alike = combinations(cells, axes)
    in_order = cells["warmup_steps"].sort_values(kind="stable", na_position="last").index
    is_warmest = ~alike.loc[in_order].duplicated(keep="last")
    return select(cells, is_warmest.loc[cells.index])


def by_precision(
    ratios: pd.Series[float], cells: pd.DataFrame, axes: Sequence[str], form: str
) -> list[str]:
    """Return the median ratio in each precision, over the cells or pairs that all precisions have.

    form: of one of them, such as `{name} {ratio}`. Without two precisions the list is empty.
    """
    same = matched_on(cells, "precision", axes)
    medians = ratios[same.index].groupby(same["precision"].astype(str)).median()
    if len(medians) < 2:
        return []
    names = ordered_values("precision", same["precision"])
    texts = [form.format(name=name, ratio=ratio(medians[name])) for name in names]
    count = len(same) // len(medians)
    cells_of_each = f"the same {count:,}" if count > 1 else "the one"
    return [f"of {cells_of_each} in each precision: {', '.join(texts)}"]


def median_of(count: int, noun: str) -> str:
    """Return the words for the median of several cells; empty for one, which is its own."""
    return f"Median of {counted(count, noun)}" if count > 1 else ""


def sentence_of(parts: Sequence[str]) -> str:
    """Return the parts as one sentence; empty if all of them are."""
    text = "; ".join(filter(None, parts))
    return f"{text[0].upper()}{text[1:]}." if text else ""
