"""Tables as Markdown, on the terminal and in the run's report folder."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from tabulate import tabulate

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.cell_timing import AGREEMENT
from orchestrator.analysis.comparison import ASSUMED_NOISE, Comparison, ComparisonReport, Verdict
from orchestrator.analysis.cpu_bound import Decides, ran_with_others
from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError, suggestion
from orchestrator.report.key_findings import KeyFinding
from orchestrator.report.tables.formatters import HOST_MARK, NOISE_MARK, format_ms
from orchestrator.report.tables.layouts import Header, Rows
from orchestrator.report.tables.registry import TABLES
from orchestrator.report.tables.table import NOTES, Table

_ANY_NOISE = 10.0  # ten times as long or short: too few repetitions to tell anything
MOST_ROWS = 40  # of a table on a terminal, where nobody asked for that table
_MARKS = {
    HOST_MARK: f"{Decides.HOST} ({HOST_MARK})",
    NOISE_MARK: f"within noise ({NOISE_MARK})",
}
_BINDING = {
    Decides.GPU: f"{Decides.GPU} on both sides",
    Decides.HOST: _MARKS[HOST_MARK],
}
_EVERY_MARK = "".join(_MARKS)
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_SPREAD = " ± "  # between a mean and its standard deviation, in a text and in a title
_MEAN_SD = re.compile(rf"([\d.]+){_SPREAD}([\d.]+|{NOTHING})([{_EVERY_MARK}]?)")


@dataclass(frozen=True)
class Page:
    """A table laid out. The provenance says what its numbers are of; rows name the notes by their number, from 1."""

    table: Table
    header: list[str]
    rows: list[list[str]]
    provenance: str
    notes: tuple[str, ...] = ()


def lay_out(
    results: Results, names: Iterable[str] = (), tables: Sequence[Table] = TABLES
) -> list[Page]:
    """The tables that have rows, or those named. Raises ConfigError for a name that is no table."""
    by_name = {table.name: table for table in tables}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"there is no table {name!r}", suggestion(name, by_name))
    pages, measured_with = [], provenance(results)
    for table in [by_name[name] for name in names] or list(tables):
        header, rows = table.lay_out(results)
        if rows:
            pages.append(_with_notes(Page(table, header, _shared(rows), measured_with)))
    return pages


def _shared(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """With one text where many are the same: of the 571,078 in the tables of 10,000 cells 21,922 differ."""
    return [list(map(sys.intern, row)) for row in rows]


def _with_notes(page: Page) -> Page:
    """Each sentence of the column of notes once, under its number."""
    if NOTES not in page.header:
        return page
    column = page.header.index(NOTES)
    notes = tuple(dict.fromkeys(note for row in page.rows for note in row[column].splitlines()))
    number = {note: place for place, note in enumerate(notes, 1)}

    def named(row: list[str]) -> str:
        return (
            ", ".join(map(str, sorted(number[note] for note in row[column].splitlines())))
            or NOTHING
        )

    return replace(
        page,
        rows=[[*row[:column], named(row), *row[column + 1 :]] for row in page.rows],
        notes=notes,
    )


def notes_of(page: Page, row: Sequence[str]) -> list[str]:
    """The sentences that a row names by number."""
    named = row[page.header.index(NOTES)] if page.notes else NOTHING
    return [] if named == NOTHING else [page.notes[int(number) - 1] for number in named.split(", ")]


def written_out(page: Page) -> tuple[Header, Rows]:
    """For a program: the notes in full, since it has no foot to put them at, 12,313 as 12313, standard deviations in columns of
    their own, and times without their marks. Which columns of a row have one says a column of its own for each mark.
    """
    titles, texts = _with_deviations_apart(page.header, page.rows)
    seen = set("".join(marks_of(text) for row in texts for text in row))
    marks = [mark for mark in _MARKS if mark in seen]
    rows = [
        [*(_plain(text) for text in row), *(_marked_with(mark, titles, row) for mark in marks)]
        for row in texts
    ]
    header = [*titles, *(_MARKS[mark] for mark in marks)]
    if not page.notes:
        return header, rows
    column = titles.index(NOTES)
    notes = (" ".join(notes_of(page, row)) for row in page.rows)
    return header, [
        [*row[:column], said, *row[column + 1 :]] for row, said in zip(rows, notes, strict=True)
    ]


def _with_deviations_apart(header: Header, rows: Rows) -> tuple[Header, Rows]:
    """Each column of a mean ± its standard deviation as two, of which the first has the mark."""
    apart = [any(_MEAN_SD.fullmatch(row[place]) for row in rows) for place in range(len(header))]
    if not any(apart):
        return header, rows
    titles = [
        part
        for title, two in zip(header, apart, strict=True)
        for part in (_two_titles(title) if two else (title,))
    ]
    return titles, [
        [
            part
            for text, two in zip(row, apart, strict=True)
            for part in (_two_texts(text) if two else (text,))
        ]
        for row in rows
    ]


def _two_titles(title: str) -> tuple[str, str]:
    """`forward` as forward and forward sd, `warm-up: mean ± sd` as warm-up: mean and warm-up: sd."""
    mean, _, deviation = title.partition(_SPREAD)
    return (mean, mean.removesuffix("mean") + deviation) if deviation else (title, f"{title} sd")


def _two_texts(text: str) -> tuple[str, str]:
    found = _MEAN_SD.fullmatch(text)
    return (f"{found[1]}{found[3]}", found[2]) if found else (text, NOTHING)


def _marked_with(mark: str, header: Header, row: list[str]) -> str:
    return (
        "; ".join(title for title, text in zip(header, row, strict=True) if mark in marks_of(text))
        or NOTHING
    )


def marks_of(text: str) -> str:
    """Those that stand behind a number, of which there may be two."""
    return text[len(text.rstrip(_EVERY_MARK)) :] if text[:1].isdigit() else ""


def _plain(text: str) -> str:
    """A number without the commas between its thousands, or the mark behind it; any other text as it is."""
    text = text.removesuffix(marks_of(text))
    return text.replace(",", "") if "," in text and _GROUPED.fullmatch(text) else text


def first_rows(page: Page, command: str) -> str:
    """As Markdown for a terminal, which holds no thousand rows. command: prints all of them, as is said below."""
    more = len(page.rows) - MOST_ROWS
    if more <= 0:
        return to_markdown(page)
    rows = "1 row" if more == 1 else f"{more:,} rows"
    return to_markdown(
        replace(page, rows=page.rows[:MOST_ROWS]), below=f"… and {rows} more: {command}"
    )


def to_markdown(page: Page, aligned: bool = True, below: str = "") -> str:
    """aligned: for who reads it as it is; else for who renders it, in half the bytes where there are many columns.

    below: what is said under the rows.
    """
    rows = [_in_a_pipe_table(row) for row in page.rows]
    widths = column_widths(page.header, rows) if aligned else [0] * len(page.header)
    rule = "|".join("-" * max(width + 1, 3) + ":" for width in widths)
    body = "\n".join(
        [_pipes(page.header, widths), f"|{rule}|", *(_pipes(row, widths) for row in rows)]
    )
    notes = "\n".join(f"{number}. {note}" for number, note in enumerate(page.notes, 1))
    parts = [f"## {page.table.title}", page.table.read, body, below, notes, f"*{page.provenance}*"]
    return "\n\n".join(part for part in parts if part) + "\n"


def column_widths(header: list[str], rows: list[list[str]]) -> list[int]:
    """In letters. tabulate would do for the whole table, but takes a minute for ten thousand cells."""
    return [
        max(len(title) + 2, *map(len, texts)) for title, *texts in zip(header, *rows, strict=True)
    ]


def _pipes(texts: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(map(str.rjust, texts, widths)) + " |"


def _in_a_pipe_table(row: list[str]) -> list[str]:
    whole = "".join(row)
    return (
        [text.replace("|", "\\|").replace("\n", " ") for text in row]
        if "|" in whole or "\n" in whole
        else row
    )


def answers_to_markdown(found: Iterable[KeyFinding], measured_with: str) -> str:
    parts = [
        f"### {one.question}\n\n" + "\n".join(f"- {said}" for said in one.sentences)
        for one in found
    ]
    return "\n\n".join(["## In words", *parts, f"*{measured_with}*"]) + "\n"


def describe_comparison(report: ComparisonReport) -> Iterator[str]:
    """What differs in how the two were measured, each cell's verdict, and what it comes to."""
    for name, (before, after) in report.differences.items():
        yield f"{name}: {before} → {after}"
    if report.noise.freedom:
        least, middle, most = np.quantile([one.noise.sd for one in report.comparisons], [0, 0.5, 1])
        spread = f"±{middle:.2%} in the median cell, ±{least:.2%} to ±{most:.2%}"
        yield f"from process to process: {spread}, with {report.noise.freedom} degrees of freedom"
    else:
        yield f"nothing was repeated: the noise is assumed to be {ASSUMED_NOISE:.0%}. `sweep run --repeat 3` measures it"
    if any(one.before.is_of_kernels for one in report.comparisons):
        yield "not both were timed: held against each other by what their kernels take"
    yield ""
    of_kernels = any(one.of_kernels for one in report.comparisons)
    noise = "noise" if report.noise.freedom else "assumed noise"
    header = [
        "cell",
        "A ms",
        "B ms",
        "B / A",
        "interval",
        noise,
        *(["kernels, B / A"] if of_kernels else []),
        "verdict",
    ]
    rows = [_comparison_row(one, of_kernels) for one in report.comparisons]
    yield tabulate(
        rows,
        header,
        tablefmt="pipe",
        disable_numparse=True,
        colalign=["left", *["right"] * (len(header) - 2), "left"],
    )
    yield ""
    counts = Counter(one.verdict for one in report.comparisons)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    alone = report.only_before + report.only_after
    unmatched = f"; {alone} cells that only one of them measured" if alone else ""
    yield f"{verdicts}; geometric mean of B / A: {report.geometric_mean:.4f}{unmatched}"
    yield from _of_the_cpu([one for one in report.comparisons if one.differs])
    yield from _agreement(report.comparisons)


def _of_the_cpu(differing: Sequence[Comparison]) -> Iterator[str]:
    if bound := sum(one.bound_by is Decides.HOST for one in differing):
        which = f"{bound} of the {len(differing)}" if bound < len(differing) else f"all {bound}"
        said = "the one that differs is" if len(differing) == 1 else f"{which} that differ are"
        yield f"{said} CPU-bound: the difference may be the CPU's, not the change's"


def _agreement(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """How many agree, by what binds them, and then in what depends less on the CPU, and in what does not depend on it."""
    binding = {kind: [one for one in comparisons if one.bound_by is kind] for kind in Decides}
    shares = ", ".join(
        f"{_agreeing(found)} {_BINDING[kind]}" for kind, found in binding.items() if found
    )
    whole = f"{_agreeing(comparisons)} cells agree within their intervals or {AGREEMENT:.0%}"
    yield f"{whole}: {shares}" if shares else whole
    if told := [ratio for one in comparisons if (ratio := one.in_additions)]:
        said = f"{sum(ratio.holds_one for ratio in told)} of {len(told)} CPU-bound cells agree"
        yield f"in additions (docs/measuring.md), which depend less on the CPU, {said}"
    if kernels := [ratio for one in comparisons if (ratio := one.of_kernels)]:
        said = f"{sum(ratio.holds_one for ratio in kernels)} of {len(kernels)} cells agree"
        yield f"in kernel time, which does not depend on the CPU, {said}"


def _agreeing(comparisons: Sequence[Comparison]) -> str:
    return f"{sum(one.agrees for one in comparisons)} of {len(comparisons)}"


def _comparison_row(one: Comparison, of_kernels: bool) -> list[str]:
    low, high = one.interval
    cpu_bound = f" ({Decides.HOST})" if one.differs and one.bound_by is Decides.HOST else ""
    verdict = f"{one.verdict}: {one.reason}" if one.reason else f"{one.verdict}{cpu_bound}"
    times = (format_ms(one.before.ms), format_ms(one.after.ms))
    kernels = f"{one.of_kernels.middle:.4f}" if one.of_kernels else NOTHING
    return [
        one.label,
        *times,
        f"{one.ratio:.4f}",
        f"{low:.4f} to {high:.4f}",
        f"±{one.floor:.1%}" if one.floor < _ANY_NOISE else "unknown",
        *([kernels] if of_kernels else []),
        verdict,
    ]


def provenance(results: Results) -> str:
    """What everything in a table was measured with, in one line; `several` where it was not all the same."""
    cells, manifest = results.cells, results.manifest
    parts = [
        f"run {manifest.get('name', '?')}",
        _one_or_several(cells, "gpu") or _one_or_several(cells, "cpu"),
        _labelled("torch", _one_or_several(cells, "torch")),
        _labelled("CUDA", _one_or_several(cells, "cuda")),
        _labelled("driver", _one_or_several(cells, "driver")),
        _labelled("batch", _one_or_several(cells, "batch_size")),
        _protocol(cells),
        _repetitions(cells),
        _marked(cells, "waits_for_host", f"are CPU-bound ({HOST_MARK})"),
        _marked(cells, "power_capped_ns", "at a clock that the power limit held down"),
        _marked(cells, "disturbed", "while something else had the cores"),
        _counted(ran_with_others(cells), "are CPU-bound and ran while others used their host"),
        _marked(cells, "wide", "with an interval wider than 5 %"),
        _labelled("commit", _one_or_several(cells, "commit")),
        _dates(cells),
    ]
    return " · ".join(part for part in parts if part)


def _one_or_several(cells: pd.DataFrame, column: str) -> str:
    values = list(cells[column].dropna().unique()) if column in cells else []
    return (
        ""
        if len(values) == 0
        else str(values[0])
        if len(values) == 1
        else f"several ({len(values)})"
    )


def _labelled(label: str, text: str) -> str:
    return f"{label} {text}" if text else ""


def _protocol(cells: pd.DataFrame) -> str:
    """How many steps: as was asked, or as many as it took."""
    fixed = " + ".join(
        filter(None, (_one_or_several(cells, axis) for axis in ("warmup_steps", "measured_steps")))
    )
    adaptive = "adaptive" if "timing" in cells and (cells["timing"] == "adaptive").any() else ""
    said = " and ".join(filter(None, (fixed, adaptive)))
    return f"{said} steps" if said else ""


def _repetitions(cells: pd.DataFrame) -> str:
    """That a cell was measured more than once, where one was: a row is of one time."""
    often = int(cells["repetitions"].max()) if "repetitions" in cells else 1
    return f"the last of up to {often} times measured" if often > 1 else ""


def _marked(cells: pd.DataFrame, mark: str, text: str) -> str:
    return _counted(cells[mark].astype("Float64") > 0, text) if mark in cells else ""


def _counted(found: pd.Series[bool], text: str) -> str:
    count = int(found.sum())
    return f"{count} of {len(found)} cells {text}" if count else ""


def _dates(cells: pd.DataFrame) -> str:
    begun = (
        pd.to_datetime(cells["started_at"].dropna())
        if "started_at" in cells
        else pd.Series(dtype="datetime64[s]")
    )
    days = sorted(str(day)[:10] for day in begun.dt.normalize().unique())
    return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
