"""Reports for a terminal: the overview of a run, and single tables, as wide as the terminal.

What is piped into a file is the same without colours, so that a log or a diff is stable.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import rich.box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.analysis.results import Results
from orchestrator.common.text import counted, first_of
from orchestrator.report.findings.finding import Finding
from orchestrator.report.findings.registry import first_screen
from orchestrator.report.tables.formatters import why_failed
from orchestrator.report.tables.table import Column, Entry, RenderedTable
from orchestrator.report.tables.views import heads, narrowed, view_of
from orchestrator.report.text.heat_map import HeatMap, HeatMeasure, heat_map
from orchestrator.report.text.memory_failures import memory_failures
from orchestrator.report.text.numbers import HOST_MARK
from orchestrator.report.text.provenance import provenance
from tasks.spec.messages import escape_controls
from tasks.spec.status import OUT_OF_MEMORY

MIN_WIDTH, FILE_WIDTH = 40, 100
_ASCII_MARK = "*"  # for a terminal that cannot show HOST_MARK
_MAX_FINDINGS = 7
_MAX_FAILURES = 8
_MAX_HIDDEN = 6  # columns without room whose headings are listed
_GAP = 2  # blanks between two columns
_DIVIDER = 1  # blank that a RichTable with a box has between two columns and at both sides
_LABEL = "cell"  # the key of a view whose rows are named by labels
_LONGEST_WORD = 30  # letters of a word in a label that breaks only if it is longer
_FAILURES = "failures"
_MATRICES = ("step", "peak")  # measures of the heat map
_COLOR = re.compile(r"(\x1b\[[\d;]*m)")
# A rule below the head, and no margins.
_HEAD_RULE = rich.box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")


@dataclass(frozen=True)
class Screen:
    """The terminal or file that a report is printed on: width, colours and letters."""

    width: int = FILE_WIDTH
    has_color: bool = False
    encoding: str = "utf-8"

    @classmethod
    def of_stdout(cls, may_color: bool = True) -> Screen:
        """Return the terminal of this process, or the fixed screen of a file.

        COLUMNS, if it is set, is the width of both, and MIN_WIDTH the least. Terminals whose size is
        unknown have width 0.
        """
        is_terminal = sys.stdout.isatty()
        console = Console()
        is_sized = is_terminal or os.environ.get("COLUMNS", "").isdigit()
        known = console.width if is_sized else 0
        width = max(known or FILE_WIDTH, MIN_WIDTH)
        has_color = may_color and is_terminal and not console.no_color
        return cls(width, has_color, getattr(sys.stdout, "encoding", None) or "ascii")

    def text(self, *parts: RenderableType) -> str:
        """Return the parts as text, without blanks at the ends of lines."""
        file = io.StringIO()
        console = Console(
            file=file,
            width=self.width,
            force_terminal=self.has_color,
            no_color=not self.has_color,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )
        for part in parts:
            # A command stays in one line, however narrow the screen, so that it can be copied.
            if isinstance(part, str) and part.lstrip().startswith("sweep "):
                part = Text(part, no_wrap=True, overflow="ignore")
            # Console.print joins texts and would lose how they wrap.
            look = (part.no_wrap, part.overflow) if isinstance(part, Text) else (None, None)
            console.print(part, no_wrap=look[0], overflow=look[1], crop=look[1] != "ignore")
        text = "\n".join(map(str.rstrip, file.getvalue().splitlines()))
        if HOST_MARK.encode(self.encoding, "replace") == b"?":
            text = text.replace(HOST_MARK, _ASCII_MARK)
        # Of the terminal's commands, only colours are left, which rich has written.
        pieces = _COLOR.split(text)
        pieces[::2] = map(escape_controls, pieces[::2])
        return "".join(pieces).encode(self.encoding, "replace").decode(self.encoding)


def table_text(page: RenderedTable, screen: Screen, max_rows: int | None, command: str) -> str:
    """Return a table with as many columns as the screen has room for.

    command: prints the rest, for the line below a table that is not complete.
    """
    view = narrowed(page, max_rows, lambda one: _width(one, _GAP) <= screen.width)
    title = Text(page.table.title, style="bold")
    parts: list[RenderableType] = [title, view.caption, _rich_table(view, _GAP), ""]
    parts += view.numbered_notes
    if view.hidden_rows or view.hidden_measures:
        hidden = ((view.hidden_rows, "more row"), (len(view.hidden_measures), "more column"))
        what = " and ".join(counted(count, noun) for count, noun in hidden if count)
        parts.append(Text(f"{what}: {command}", no_wrap=True, overflow="ignore"))
    if page.provenance:
        parts.append(Text(page.provenance, style="dim"))
    return screen.text(*parts)


def dense_table_text(page: RenderedTable, screen: Screen, remedy: str) -> str:
    """Return all rows of a table without a title, with as many columns as have room.

    The columns are closer together than in `table_text`. Rows that have other axes than the rest
    become another table if one table has no room for every column. remedy: shows the other columns.
    """
    parts_shown = [page]
    if _width(view_of(page, None, len(page.header)), 1) > screen.width:
        parts_shown = _parts_with_equal_keys(page)
    views = [_dense_view(part, screen.width) for part in parts_shown]
    parts: list[RenderableType] = []
    for view in views:
        parts += [*filter(None, [view.caption]), _rich_table(view, 1)]
    parts += views[0].numbered_notes
    if hidden := {measure.name for view in views for measure in view.hidden_measures}:
        parts.append(f"{counted(len(hidden), 'more column')}: {remedy}")
    return screen.text(*parts)


def _parts_with_equal_keys(page: RenderedTable) -> list[RenderedTable]:
    """Return a table for each set of keys that rows have, without those that they have not."""
    count = len(page.grid.keys)
    missing = [tuple(entry.is_missing for entry in row[:count]) for row in page.rows]
    grids = [page.grid.with_rows([own == one for own in missing]) for one in dict.fromkeys(missing)]
    return [replace(page, grid=grid.without_empty_columns()) for grid in grids]


def _dense_view(page: RenderedTable, width: int) -> RenderedTable:
    """Return the view with the most columns that fits.

    If the keys alone have no room, they become one column, whose lines break between its words.
    """
    most = len(page.header)
    view = narrowed(page, None, lambda one: _width(one, 1) <= width, most)
    if _width(view, 1) <= width:
        return view
    return _labelled(narrowed(page, None, lambda one: _width(_labelled(one), 1) <= width, most))


def _labelled(view: RenderedTable) -> RenderedTable:
    """Return a view whose keys are one column of words such as `precision=fp32`."""
    labels = []
    for row in view.rows:
        keys = zip(view.grid.keys, row, strict=False)
        words = [f"{key.name}={entry}" for key, entry in keys if not entry.is_missing]
        labels.append(Entry(" ".join(words)))
    columns = [Column(_LABEL, labels, is_key=True), *view.grid.measures]
    return replace(view, grid=view.grid._replace(columns=columns))


def folded_table_text(page: RenderedTable, screen: Screen) -> str:
    """Return a table without a title, with every column. Texts without room take several lines."""
    return screen.text(_rich_table(view_of(page, max_rows=None, max_columns=None), 1))


def _is_labelled(view: RenderedTable) -> bool:
    return [key.name for key in view.grid.keys] == [_LABEL]


def _plain_table(show_header: bool = True) -> RichTable:
    """Return a table without lines, whose columns are left to add."""
    return RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=show_header)


def _width(view: RenderedTable, gap: int) -> int:
    """Return the width that `_rich_table` needs."""
    total = 2 * _DIVIDER - (gap + _DIVIDER)
    for index, (lines, column) in enumerate(zip(heads(view), view.grid.columns, strict=True)):
        texts = list(map(str, column.entries))
        if index == 0 and _is_labelled(view):
            texts = [word[:_LONGEST_WORD] for text in texts for word in text.split()]
        longest = max(map(cell_len, texts), default=0)
        total += max(longest, *map(cell_len, lines)) + gap + _DIVIDER
    return total


def _rich_table(view: RenderedTable, gap: int) -> RichTable:
    table = RichTable(box=_HEAD_RULE, padding=(0, gap, 0, 0), pad_edge=False)
    for index, (lines, side) in enumerate(zip(heads(view), view.sides, strict=True)):
        # On a screen that is too narrow for every view, texts break. A number never does: with a
        # missing digit it would be another number. Beside labels, nothing else has to break.
        is_whole = side == "right" or (index > 0 and _is_labelled(view))
        head = Text("\n".join(lines))
        table.add_column(head, justify=side, overflow="fold", no_wrap=is_whole)
    for row in view.rows:
        table.add_row(*(Text(str(entry), style="red" if entry.status else "") for entry in row))
    return table


def overview(
    results: Results,
    found: Sequence[Finding],
    pages: Sequence[RenderedTable],
    command: str,
    screen: Screen,
) -> str:
    """Return what is most important about a run. command: prints the report again."""
    grid = heat_map(results)
    # Without a grid there is room for the sentences, which nothing else shows.
    counts = results.cells["status"].value_counts().items()
    listed = ", ".join(f"{count:,} {status}" for status, count in counts)
    parts: list[RenderableType] = [Text(provenance(results), style="dim")]
    parts.append(f"{counted(len(results.cells), 'cell')}: {listed}")
    parts += _findings(found, has_sentences=grid is None)
    if grid:
        for measure in grid.measures:
            if measure.name in _MATRICES:
                parts += ["", *_matrix(grid, measure, screen.width)]
    parts += [*_out_of_memory(results), *_other_failures(results, command)]
    names = [page.table.name for page in pages if page.table.is_default]
    names = names or [page.table.name for page in pages]
    more = (
        f"--table {' | '.join(names)}   (--table list: all)",
        "--where AXIS=VALUE,…   other cells     --format tex | typ | csv | json | md",
    )
    parts += ["", Text("More, with the same command", style="bold")]
    parts += [Padding(Text(line), (0, 0, 0, 2)) for line in more]
    return screen.text(*parts)


def memory_failures_text(results: Results, screen: Screen) -> str:
    """Return the table of the cells that ran out of memory; empty without such a cell."""
    return screen.text(*_out_of_memory(results)).removeprefix("\n")


def _out_of_memory(results: Results) -> Iterator[RenderableType]:
    left = _MAX_FAILURES
    for found in memory_failures(results):
        table = _plain_table()
        for title in found.header:
            table.add_column(Text(title, style="bold"))
        for name, *others in found.rows[:left]:
            table.add_row(Text(f"  {name}"), *others)
        if table.rows:
            yield ""
            if found.caption:
                yield Text(found.caption, style="bold")
            yield table
        left -= len(table.rows)


def _other_failures(results: Results, command: str) -> Iterator[RenderableType]:
    """Yield the first failures with another reason than memory, a line each."""
    cells = results.cells
    failed = cells[~cells["status"].isin(["ok", *OUT_OF_MEMORY])]
    if failed.empty:
        return
    yield from ("", Text("Other cells without a result", style="bold"))
    for row in failed.head(_MAX_FAILURES).to_dict("records"):
        line = f"  {row['cell']}  {row['status']}  {why_failed(row)}"
        yield Text(line, no_wrap=True, overflow="ellipsis")
    if len(failed) > _MAX_FAILURES:
        yield Text(f"  and {len(failed) - _MAX_FAILURES:,} more: {command} --table {_FAILURES}")


def _findings(found: Sequence[Finding], has_sentences: bool) -> Iterator[RenderableType]:
    if not found:
        return
    yield from ("", Text("Answers", style="bold"))
    table = _plain_table(show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in first_screen(found, _MAX_FINDINGS):
        last = one.sentence if has_sentences else one.scope
        texts = (f"  {one.label}", one.marked_number, one.interval, last)
        table.add_row(*map(Text, texts))
    yield table


def _matrix(grid: HeatMap, measure: HeatMeasure, width: int) -> Iterator[RenderableType]:
    """Yield title and table of what the heat map of the page shows, no wider than the screen."""
    columns: dict[tuple[int, int], list[Text]] = {}
    for panel, column in product(range(len(grid.panels)), range(len(grid.columns))):
        texts = []
        for row in range(len(grid.rows)):
            cell = grid.first_view((panel, row, column), measure.name)
            mark = HOST_MARK if "cpu" in cell.style else ""
            texts.append(Text(cell.text + mark, style="red" if cell.style == "bad" else ""))
        if any(map(len, texts)):
            columns[panel, column] = texts
    used = max(map(len, [*grid.rows, grid.row_title])) + _GAP
    texts_shown = chain(*columns.values(), grid.panels, grid.columns)
    longest = max(map(len, map(str, texts_shown)))
    room = max((width - used) // (longest + _GAP), 1)
    panels, places = sorted({panel for panel, _ in columns}), list(columns)
    hidden = []
    while len(places) > room and len(panels) > 1:
        # The first and the last precision are those that readers compare.
        hidden.append(grid.panels[panels.pop(-2 if len(panels) > 2 else 0)])
        places = [place for place in places if place[0] in panels]
    hidden += [f"{grid.panels[one]} {grid.columns[other]}".strip() for one, other in places[:-room]]
    left_out = [f"only {text}" for text in grid.left_out]
    if hidden:
        left_out.append(f"no room for {first_of(hidden, _MAX_HIDDEN)}")
    shown = {place: columns[place] for place in places[-room:]}
    table = _plain_table()
    table.add_column(grid.row_title, no_wrap=True)
    before = -1
    for panel, column in shown:
        # A panel stands above its first column.
        head = f"{grid.panels[panel] if panel != before else ''}\n{grid.columns[column]}"
        table.add_column(Text(head), justify="right", no_wrap=True)
        before = panel
    for name, *texts in zip(grid.rows, *shown.values(), strict=True):
        table.add_row(Text(f"  {name}"), *texts)
    title = f"{measure.label}, {measure.unit.split()[0]}: {grid.first_note}"
    yield from (Text(title.removesuffix(": "), style="bold"), table)
    if left_out:
        yield Text(f"  {'; '.join(left_out)}", style="dim")
