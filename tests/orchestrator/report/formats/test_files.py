"""Tables as files: typed CSV, LaTeX and Typst that fit a page and compile, and names that are no markup."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.analysis.results import Results, load_results
from orchestrator.report.formats.files import (
    FORMATS,
    files_of,
    to_csv,
    to_json,
    to_markdown,
    to_typst,
    typed_columns,
)
from orchestrator.report.formats.latex import to_ascii_latex, to_latex
from orchestrator.report.formats.terminal import Screen, table_text
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.report.tables.table import (
    Entry,
    RenderedTable,
    Table,
    grid_of_rows,
    milliseconds,
    quantity,
)
from orchestrator.report.tables.views import (
    MAX_COLUMNS,
    MAX_ROWS,
    TEXT_PT,
    estimated_pt,
    fitting_view,
    view_of,
)
from orchestrator.report.text.numbers import HOST_MARK
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.messages import escape_controls
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.support.tables import texts_of

# One worker makes what these tests share.
pytestmark = pytest.mark.xdist_group("every kind")

UGLY = 'a_b & 50% {x} \\ ~ ^ $1 # <script>alert("1")</script> | "quoted", *bold* `code` @ref = [b] // \x1b[31m ä ×'
MakeOutcome = Callable[..., Outcome]


@pytest.fixture
def pages(results: Results) -> list[RenderedTable]:
    return lay_out(results)


@pytest.fixture
def results(tmp_path: Path, make_outcome: MakeOutcome) -> Results:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": UGLY})
        for context in (16, 32):
            for precision in ("fp32", "bf16"):
                writer.append(make_outcome(context_length=context, precision=precision), None)
        writer.append(make_outcome(Status.OOM, context_length=64), None)
    return load_results(Run(tmp_path / "run"))


@pytest.fixture(scope="module")
def every_page(results_of_every_kind: Results) -> list[RenderedTable]:
    return lay_out(results_of_every_kind)


@pytest.fixture
def ugly() -> RenderedTable:
    return text_table(["axis", UGLY], [["1", UGLY], ["2", "–"]])


def text_table(header: list[str], rows: list[list[str]]) -> RenderedTable:
    """A table of texts. The first column is a key."""
    key, *titles = header
    entries = [list(map(Entry, row)) for row in rows]
    return RenderedTable(TABLES[0], grid_of_rows([key], titles, entries), UGLY)


def test_every_page_is_there_in_every_format(pages: list[RenderedTable]) -> None:
    assert {page.table.name for page in pages} >= {"timings", "precision", "failures"}
    assert {name for name, _ in files_of(pages)} == {
        f"{page.table.name}.{suffix}" for page in pages for suffix in FORMATS
    }


def test_markdown_in_a_file_is_not_aligned(ugly: RenderedTable) -> None:
    printed = to_markdown(view_of(ugly)).replace("<", r"\<").splitlines()
    written = FORMATS["md"](ugly).splitlines()
    for aligned, compact in zip(printed, written, strict=True):
        rule = re.fullmatch(r"[|:-]+", compact)
        assert rule or re.sub(" +", " ", aligned) == re.sub(" +", " ", compact)
    assert len(FORMATS["md"](ugly)) < len(to_markdown(view_of(ugly)))


def test_csv_has_numbers_intervals_and_statuses_in_their_own_columns(results: Results) -> None:
    (timings,) = lay_out(results, ["timings"])
    read = pd.read_csv(io.StringIO(to_csv(timings)))
    assert read["total_ms"].dtype.kind == read["total_sd_ms"].dtype.kind == "f"
    assert read.loc[read["status"] == "oom", "total_ms"].isna().all()
    assert set(read["status"]) == {"ok", "oom"}
    assert {"forward_ms", "forward_median_ms", "forward_n"} < set(read)


def test_every_measure_of_every_table_is_numeric_in_csv(every_page: list[RenderedTable]) -> None:
    for page in every_page:
        frame = pd.read_csv(io.StringIO(to_csv(page)))
        assert frame.columns.is_unique
        assert list(frame) == list(typed_columns(page))
        assert len(frame) == len(page.rows)
        numeric = sum(frame[name].dtype.kind in "ifb" for name in frame)
        assert numeric >= sum(not measure.is_text for measure in page.grid.measures), (
            page.table.name
        )
        assert [dict(zip(frame, row, strict=False)) for row in json.loads(to_json(page))]


def test_csv_numbers_are_those_that_a_reader_sees(every_page: list[RenderedTable]) -> None:
    """To the last printed digit, in the unit of the column."""
    compared = 0
    for page in every_page:
        for row in page.rows:
            for entry in row[len(page.grid.keys) :]:
                printed = re.fullmatch(r"[≥≈ ]*(-?\+?[\d,]+(\.\d+)?)(%?)×?", entry.text)
                if entry.number is None or printed is None or isinstance(entry.number, bool):
                    continue
                text = printed[1].replace(",", "")
                scaled = entry.number * (100 if printed[3] else 1)
                digits = len(text.partition(".")[2])
                assert math.isclose(float(text), scaled, abs_tol=0.500001 * 10**-digits), page.table
                compared += 1
    assert compared > 500


@settings(max_examples=30)
@given(st.lists(st.text() | st.from_regex(r"[=+\-@\t\r'][^,]*"), min_size=1, max_size=5))
@example(["=cmd|' /C calc'!A0", "+1+1", "@SUM(1)", "-2+3", "\t=1+1", "\r=1+1", "'=1", "a\rb"])
def test_no_text_of_a_csv_file_is_a_formula(texts: list[str]) -> None:
    """Removing one apostrophe restores the text, in which control characters are escaped."""
    plain = [text for text in texts if text != "–"]
    page = text_table(["key", *map(str, range(len(plain)))], [["k", *plain]])
    _, row = csv.reader(io.StringIO(to_csv(page), newline=""))
    for written, text in zip(row[1:-1], plain, strict=True):
        assert written[:1] not in {"=", "+", "-", "@", "\t", "\r"}
        assert written.removeprefix("'") == escape_controls(text)


@given(
    st.lists(
        st.sampled_from([0.0, -1.5, math.nan, math.inf, -math.inf, 1e308, 1e-308]),
        min_size=3,
        max_size=3,
    )
)
def test_no_number_keeps_a_table_from_being_written(values: list[float]) -> None:
    entries = [
        quantity(values[0], ",.2f", "GiB"),
        milliseconds(values[1]),
        quantity(values[2], ".1%"),
    ]
    grid = grid_of_rows(["size"], ["peak", "ms", "share"], [[Entry("small"), *entries]])
    page = RenderedTable(TABLES[0], grid, "")
    for form in (*FORMATS.values(), to_json, lambda one: table_text(one, Screen(60), None, "")):
        assert "small" in form(page)
    assert all(len(entry.text) < 25 for entry in entries)
    assert json.loads(to_json(page))[0]["size"] == "small"


def test_negative_numbers_of_a_csv_file_have_no_apostrophe() -> None:
    grid = grid_of_rows(["name"], ["more ms"], [[Entry("a"), quantity(-2.5, "+.3f", "ms")]])
    assert to_csv(RenderedTable(TABLES[0], grid, "")) == "name,more_ms,status\na,-2.5,ok\n"


@pytest.mark.render
def test_every_table_is_that_of_cells_parquet_to_the_printed_digit(
    results_of_every_kind: Results, every_page: list[RenderedTable], tmp_path: Path
) -> None:
    """Where the frame that was written comes back, every table in every format is the same to the letter."""
    written = dict(files_of(lay_out(read_back(results_of_every_kind, tmp_path))))
    # Cells of several GPUs and searches have tables of their own, and these cells were measured before
    # the allocations of a whole step were recorded.
    others = {"collectives", "parallel", "ranks", "best", "allocations-by-part"}
    names = {table.name for table in TABLES} - others
    assert set(written) == {f"{name}.{suffix}" for name in names for suffix in FORMATS}
    assert written == dict(files_of(every_page))


@pytest.mark.render
@pytest.mark.parametrize(
    ("run", "names"),
    [("collectives", ["collectives", "ranks"]), ("parallel", ["parallel", "ranks"])],
)
def test_tables_of_several_gpus_are_those_of_cells_parquet(
    run: str, names: list[str], tmp_path: Path
) -> None:
    results = load_results(Run(ROOT / "results" / "published" / "h100x2" / run))
    written = dict(files_of(lay_out(read_back(results, tmp_path))))
    assert {f"{name}.{suffix}" for name in names for suffix in FORMATS} <= set(written)
    assert written == dict(files_of(lay_out(results)))


def read_back(results: Results, folder: Path) -> Results:
    """Return the results with the cells as they come back from the file."""
    with open_for_writing(Run(folder / "run")) as writer:
        writer.write_cells(results.cells, "", {})
    return replace(results, cells=pd.read_parquet(folder / "run" / "cells.parquet"))


def test_printed_numbers_are_the_rounded_numbers_of_the_frame(
    every_page: list[RenderedTable], results_of_every_kind: Results
) -> None:
    """To the last printed digit, by a way of its own: each number of a column is one of the frame, rounded."""
    for table, title, column, scale in (
        ("timings", "forward", "forward_ms_mean", 1),
        ("memory", "peak reserved", "peak_reserved_bytes", 2**-30),
        ("utilisation", "MFU", "mfu", 100),
        ("coverage", "events", "snapshot_events", 1),
        ("coverage", "busy", "busy", 100),
    ):
        (page,) = (page for page in every_page if page.table.name == table)
        place = next(place for place, name in enumerate(page.header) if name.startswith(title))
        printed = [
            found[0]
            for row in texts_of(page)
            if (found := re.match(r"-?[\d.]+", row[place].replace(",", "")))
        ]
        values = [float(value) * scale for value in results_of_every_kind.cells[column].dropna()]
        assert printed
        for text in printed:
            digits = len(text.partition(".")[2])
            assert any(f"{value:.{digits}f}" == text for value in values), (table, text)


def test_every_view_has_few_columns_and_rows(every_page: list[RenderedTable]) -> None:
    for page in every_page:
        view = view_of(page)
        assert len(view.titles) <= MAX_COLUMNS
        assert len(view.rows) <= MAX_ROWS
        assert view.grid.measures
        for row in view.rows:
            assert len(row) == len(view.titles)


def test_every_table_fits_a_page_and_a_terminal(every_page: list[RenderedTable]) -> None:
    for page in every_page:
        assert estimated_pt(fitting_view(page, MAX_ROWS)) <= TEXT_PT, page.table.name
        for width in (60, 100):
            text = table_text(page, Screen(width), None, "sweep report RUN")
            lines = [line for line in text.splitlines() if "sweep report RUN" not in line]
            assert max(map(len, lines)) <= width, page.table.name  # commands are not broken
        assert "resizebox" not in to_latex(page)
        assert "scalebox" not in to_latex(page)


def named_rows(count: int) -> RenderedTable:
    """A table with a long name behind several numbers, as that of kernels has it."""
    values = ("12,345,678.90", "98.7%", "3,964,123.4")
    numbers = [Entry(text, float(index)) for index, text in enumerate(values * 2)]
    name = Entry("autograd::engine::evaluate_function: AddmmBackward0")
    rows = [[Entry("forward + backward"), *numbers, name] for _ in range(count)]
    titles = [*(f"measure {index}" for index in range(6)), "name"]
    return RenderedTable(TABLES[0], grid_of_rows(["phase"], titles, rows, label="name"), "")


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100])
def test_names_are_shortened_and_numbers_never_are(width: int) -> None:
    page = named_rows(3)
    text = table_text(page, Screen(width), None, "sweep report RUN")
    head, table = text.split("──", 1)
    assert "name" in head
    assert "measure" in head
    assert "…" not in head
    assert "autograd" in table
    assert "12,345,678.90" in table
    assert not re.search(r"\d…", table)
    assert "more column" in table  # of those that had no room


def test_a_document_has_the_optimizer_step_and_names_the_columns_that_it_leaves_out(
    make_outcome: MakeOutcome, tmp_path: Path
) -> None:
    axes = {"model": "tinynet:Net", "size": None}
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "run"})
        for context in (32, 64):
            writer.append(make_outcome(context_length=context, **axes), None)
    (page,) = lay_out(load_results(Run(tmp_path / "run")), ["timings"])
    view = fitting_view(page, MAX_ROWS)
    assert "model=tinynet:Net" in view.caption
    names = [measure.name for measure in view.grid.measures]
    assert names[:4] == ["total", "forward", "backward", "optimizer step"]
    assert "The interval contains" not in view.caption
    for text, comment in ((to_latex(page, MAX_ROWS), "%"), (to_typst(page, MAX_ROWS), "//")):
        (line,) = [one for one in text.splitlines() if one.startswith(f"{comment} columns left")]
        assert "total n" in line
        assert "optimizer step," not in line


def test_nothing_of_a_name_is_markup(ugly: RenderedTable) -> None:
    assert (
        r"a\_b \& 50\% \{x\} \textbackslash{} \textasciitilde{} \^{} \$1 \# \ensuremath{<}script"
        in to_latex(ugly)
    )
    assert r"<script>alert(\"1\")</script>" in to_typst(ugly)  # inside a string
    assert "\\|" in to_markdown(view_of(ugly))
    assert r"\<script>" in FORMATS["md"](ugly)
    assert not re.search(r"(?<!\\)<", FORMATS["md"](ugly))
    assert "\x1b" not in to_typst(ugly)


def test_typst_compiles(pages: list[RenderedTable], ugly: RenderedTable, tmp_path: Path) -> None:
    typst = pytest.importorskip("typst")
    for page in (*pages, ugly):
        (tmp_path / "table.typ").write_text(to_typst(page))
        assert typst.compile(str(tmp_path / "table.typ")).startswith(b"%PDF")


def test_a_long_table_goes_on_over_pages_in_typst_and_can_be_referred_to(
    ugly: RenderedTable, tmp_path: Path
) -> None:
    typst = pytest.importorskip("typst")
    page = long(ugly)
    (tmp_path / "table.typ").write_text(f"{to_typst(page)}\n@tab-{page.table.name}")
    pages = typst.compile(str(tmp_path / "table.typ"), format="svg")
    assert isinstance(pages, list)
    assert len(pages) > 1


def test_latex_has_ascii_alone_whatever_it_shows() -> None:
    """What a table prints, what a host or a model may be called, and what no font of LaTeX's has."""
    assert to_ascii_latex("≈ 2.0× ± 0.1 – …") == (
        r"\ensuremath{\approx} 2.0\ensuremath{\times} \ensuremath{\pm} 0.1 \textendash{} \ldots{}"
    )
    assert to_ascii_latex("8 → 16 · µs ≤ √n ≥ n²") == (
        r"8 \ensuremath{\rightarrow} 16 \ensuremath{\cdot} \ensuremath{\mu}s \ensuremath{\leq} \ensuremath{\surd}n "
        r"\ensuremath{\geq} n\ensuremath{^2}"
    )
    assert to_ascii_latex("Größe façade Ångström ﬁ ½ e\u0301") == (
        r"Gr\"{o}\ss{}e fa\c{c}ade \r{A}ngstr\"{o}m fi 1/2 " + r"\'{e}"
    )
    assert to_ascii_latex("中文 🙂 --flag | `x`") == r"?? ? -{-}flag \ensuremath{|} \`{}x\`{}"
    assert to_ascii_latex(f"9.5{HOST_MARK}") == r"9.5\ensuremath{\dagger}"
    assert all(to_ascii_latex(chr(code)).isascii() for code in range(0x20, 0x30000))


def test_commands_in_sentences_are_code_in_latex(ugly: RenderedTable) -> None:
    grid = ugly.grid._replace(notes=("`x`", "one ` alone"))
    page = replace(ugly, provenance="`sweep show` or `b_c`", grid=grid)
    text = to_latex(page)
    assert r"\texttt{sweep show} or \texttt{b\_c}" in text
    assert r"1. \texttt{x}" in text
    assert r"2. one \`{} alone" in text


def test_every_table_in_latex_is_ascii_and_says_what_it_needs(
    every_page: list[RenderedTable], ugly: RenderedTable
) -> None:
    for page in (*every_page, ugly, long(ugly)):
        text = to_latex(page)
        assert text.isascii()
        needs = "booktabs,longtable" if r"\begin{longtable}" in text else "booktabs"
        assert text.startswith(rf"% needs \usepackage{{{needs}}}" + "\n")


def test_a_table_longer_than_a_latex_page_becomes_a_longtable(ugly: RenderedTable) -> None:
    assert r"\begin{tabular}" in to_latex(ugly)
    assert r"\begin{longtable}" in to_latex(long(ugly))


def long(page: RenderedTable) -> RenderedTable:
    columns = [replace(one, entries=[*one.entries] * 41) for one in page.grid.columns]
    return replace(page, grid=page.grid._replace(columns=columns))


def test_latex_compiles_and_fits(
    every_page: list[RenderedTable], ugly: RenderedTable, tmp_path: Path
) -> None:
    """With the packages that it names and no others, whatever stands at the beginning of a row."""
    compiler = shutil.which("pdflatex")
    if compiler is None:
        pytest.skip("needs pdflatex")
    strange = text_table(["a", "b"], [["[1]", "*"], ["*", "≈ 中 ½ ä ḥ ÿ ™"], ["[", "]"]])
    wide = text_table([f"column {place}" for place in range(24)], [["12.34 ± 0.56"] * 24])
    as_written = [to_latex(page, MAX_ROWS) for page in every_page]
    shown = (ugly, strange, wide, long(strange), long(wide))
    begin = "\\documentclass{article}\\usepackage{booktabs,longtable}\\begin{document}\n"
    text = "\\clearpage\n".join([*as_written, *map(to_latex, shown)])
    (tmp_path / "all.tex").write_text(begin + text + "\\end{document}\n")
    for _ in range(2):  # how wide the columns of a longtable are, the second time knows
        done = subprocess.run(
            [compiler, "-halt-on-error", "all.tex"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull \\hbox" not in done.stdout


def test_points_of_a_column_in_latex_are_below_each_other() -> None:
    entries = [
        Entry("5.25", 5.25, is_cpu_bound=True),
        Entry("1592.7", 1592.7, is_within_noise=True, is_cpu_bound=True),
        Entry("12", 12.0),
        Entry("OOM", status="oom"),
    ]
    rows = [[Entry("a"), entry] for entry in entries]
    grid = grid_of_rows(["name"], ["ms"], rows)
    text = to_latex(RenderedTable(Table("t", "Title", "Reading.", lambda results: grid), grid, ""))
    assert [line.partition(" & ")[2] for line in text.splitlines() if line.startswith("a &")] == [
        r"5.25\ensuremath{\dagger}\phantom{\ensuremath{\dagger}} \\",
        r"1592.7\phantom{5}\ensuremath{\sim}\ensuremath{\dagger} \\",
        r"12\phantom{.25}\phantom{\ensuremath{\sim}\ensuremath{\dagger}} \\",
        r"OOM \\",
    ]
    assert r"\caption{Title. Reading.}" in text
