"""The same numbers in every format, whatever a model is called; LaTeX and Typst that compile, where the compilers are."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.analysis.results import Results, load_results
from orchestrator.report.formats.files import FORMATS, files_of, to_csv, to_latex, to_typst
from orchestrator.report.formats.latex import to_ascii_latex
from orchestrator.report.formats.markdown import (
    MAX_ROWS,
    RenderedTable,
    lay_out,
    table_for_programs,
    to_markdown,
)
from orchestrator.report.tables.formatters import HOST_MARK
from orchestrator.report.tables.registry import TABLES
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

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
    return RenderedTable(TABLES[0], ["axis", UGLY], [["1", UGLY], ["2", "–"]], UGLY)


def test_every_page_is_there_in_every_format(pages: list[RenderedTable]) -> None:
    assert {page.table.name for page in pages} >= {"timings", "precision", "failures"}
    assert {name for name, _ in files_of(pages)} == {
        f"{page.table.name}.{suffix}" for page in pages for suffix in FORMATS
    }


def test_markdown_in_a_file_is_what_is_printed_but_for_the_blanks_that_align_it_and_what_would_be_tags(
    pages: list[RenderedTable], ugly: RenderedTable
) -> None:
    for page in (*pages, ugly):
        printed, written = (
            to_markdown(page).replace("<", r"\<").splitlines(),
            FORMATS["md"](page).splitlines(),
        )
        for aligned, compact in zip(printed, written, strict=True):
            rule = re.fullmatch(r"[|:-]+", compact)
            assert rule or re.sub(" +", " ", aligned) == re.sub(" +", " ", compact)
    assert len(FORMATS["md"](ugly)) < len(to_markdown(ugly))


def rejoined(printed: list[str], read: dict[str, str]) -> Iterator[str]:
    """A row of CSV as it was printed: each mean beside its deviation, and with its mark. Empties what was read."""
    within_noise = read.pop("within noise (~)", "").split("; ")
    for title in printed:
        text = read.pop(title.replace(" ± sd", ""))
        deviation = read.pop(title.replace("mean ± ", "") if "±" in title else f"{title} sd", "")
        text += "~" * (title in within_noise)
        yield f"{text} ± {deviation}" if deviation and text[0].isdigit() else text


def test_a_mean_and_its_deviation_are_numbers(results: Results) -> None:
    """Each in its own column, also where a title has both; Markdown keeps them together."""
    timings, phases = lay_out(results, ["timings", "phases"])
    header, row, *_ = csv.reader(io.StringIO(to_csv(timings), newline=""))
    read = dict(zip(header, row, strict=True))
    assert f"{read['total']} ± {read['total sd']}" in to_markdown(timings)
    assert header[header.index("forward") + 1] == "forward sd"
    assert float(read["total sd"]) > 0
    assert "mean ± sd" in phases.header
    assert {"mean", "sd"} < set(to_csv(phases).splitlines()[0].split(","))
    failed = next(
        row for row in csv.reader(io.StringIO(to_csv(timings), newline="")) if "OOM" in row
    )
    assert failed[header.index("total") :][:2] == ["OOM", "–"]
    marked = replace(
        timings, rows=[[text + "†" * ("±" in text) for text in row] for row in timings.rows]
    )
    titles, rows = table_for_programs(marked)
    assert titles[-1] == "CPU-bound (†)"
    assert rows[0][:-1] == row
    assert rows[0][-1] == "forward; backward; optimizer step; total"


def test_csv_reads_back_to_the_letter(pages: list[RenderedTable], ugly: RenderedTable) -> None:
    """But for the commas between thousands, and for no others, and for standard deviations, which have columns of their own."""
    grouped = 0
    for page in (*pages, replace(ugly, rows=[*ugly.rows, ["1,2", "12,34 ± 1,000"]])):
        header, *rows = csv.reader(io.StringIO(to_csv(page), newline=""))
        found = [dict(zip(header, row, strict=True)) for row in rows]
        as_printed = [list(rejoined(page.header, row)) for row in found]
        assert not any(found)  # no other column is there
        for read, printed in zip(chain(*as_printed), chain(*page.rows), strict=True):
            is_grouped = re.fullmatch(r"\d+,\d{3}", printed) is not None
            assert read == (printed.replace(",", "") if is_grouped else printed)
            grouped += is_grouped
    assert grouped > 0


@given(st.lists(st.text() | st.from_regex(r"[=+\-@\t\r'][^,]*"), min_size=1, max_size=5))
@example(["=cmd|' /C calc'!A0", "+1+1", "@SUM(1)", "-2+3", "\t=1+1", "\r=1+1", "'=1", "a\rb"])
def test_no_text_of_a_csv_file_is_a_formula(texts: list[str]) -> None:
    """Removing one apostrophe restores the text."""
    plain = [re.sub("[†~±,]", "", text) for text in texts]  # marks have their own columns
    page = RenderedTable(TABLES[0], list(map(str, range(len(plain)))), [plain], "")
    _, row = csv.reader(io.StringIO(to_csv(page), newline=""))
    for written, text in zip(row, plain, strict=True):
        is_number = re.fullmatch(r"[+-]?(\d+(\.\d+)?([eE][+-]?\d+)?%?|inf)", text)
        assert is_number or written[:1] not in {"=", "+", "-", "@", "\t", "\r"}
        assert written.removeprefix("'") == text


@pytest.mark.parametrize("number", ["-2.5", "+0.12", "-1e-05", "+3.20%", "-inf", "12"])
def test_numbers_of_a_csv_file_have_no_apostrophe(number: str) -> None:
    page = RenderedTable(TABLES[0], ["more ms"], [[number]], "")
    assert to_csv(page) == f"more ms\n{number}\n"


@pytest.mark.render
def test_every_table_is_that_of_cells_parquet_to_the_printed_digit(
    results_of_every_kind: Results, every_page: list[RenderedTable], tmp_path: Path
) -> None:
    """Where the frame that was written comes back, every table in every format is the same to the letter."""
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_cells(results_of_every_kind.cells)
    from_file = replace(
        results_of_every_kind, cells=pd.read_parquet(tmp_path / "run" / "cells.parquet")
    )
    written = dict(files_of(lay_out(from_file)))
    assert set(written) == {f"{table.name}.{suffix}" for table in TABLES for suffix in FORMATS}
    assert written == dict(files_of(every_page))


def test_what_is_printed_is_what_the_frame_has(
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
            for row in page.rows
            if (found := re.match(r"-?[\d.]+", row[place].replace(",", "")))
        ]
        values = [float(value) * scale for value in results_of_every_kind.cells[column].dropna()]
        assert printed
        for text in printed:
            digits = len(text.partition(".")[2])
            assert any(f"{value:.{digits}f}" == text for value in values), (table, text)


def test_every_format_of_every_table_has_the_same_numbers(every_page: list[RenderedTable]) -> None:
    """Read back out of what was written: as many numbers, and each to the same digit."""
    for page in every_page:
        numbers = [
            number
            for row in table_for_programs(page)[1]
            for text in row
            for number in re.findall(r"\d+\.\d+", text)
        ]
        assert [number for row in list(csv.reader(io.StringIO(to_csv(page), newline="")))[1:] for text in row
                for number in re.findall(r"\d+\.\d+", text)] == numbers  # fmt: skip
        for form in (to_markdown, to_latex, to_typst):
            found = Counter(re.findall(r"\d+\.\d+", form(page)))
            assert (
                not Counter(
                    number
                    for row in page.rows
                    for text in row
                    for number in re.findall(r"\d+\.\d+", text)
                )
                - found
            )


def test_nothing_of_a_name_is_markup(ugly: RenderedTable) -> None:
    assert (
        r"a\_b \& 50\% \{x\} \textbackslash{} \textasciitilde{} \^{} \$1 \# \ensuremath{<}script"
        in to_latex(ugly)
    )
    assert r"<script>alert(\"1\")</script>" in to_typst(ugly)  # inside a string
    assert "\\|" in to_markdown(ugly)
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


def test_every_table_in_latex_is_ascii_and_says_what_it_needs(
    every_page: list[RenderedTable], ugly: RenderedTable
) -> None:
    for page in (*every_page, ugly, long(ugly)):
        text = to_latex(page)
        assert text.isascii()
        needs = (
            "booktabs,graphicx,longtable" if r"\begin{longtable}" in text else "booktabs,graphicx"
        )
        assert text.startswith(rf"% needs \usepackage{{{needs}}}" + "\n")


def test_what_fills_more_than_a_page_of_latex_goes_on_over_the_next(ugly: RenderedTable) -> None:
    assert r"\begin{tabular}" in to_latex(replace(ugly, rows=ugly.rows[:1] * MAX_ROWS))
    assert r"\begin{longtable}" in to_latex(replace(ugly, rows=ugly.rows[:1] * (MAX_ROWS + 1)))


def long(page: RenderedTable) -> RenderedTable:
    return replace(page, rows=page.rows * MAX_ROWS)


def test_latex_compiles_and_fits(
    every_page: list[RenderedTable], ugly: RenderedTable, tmp_path: Path
) -> None:
    """With the packages that it names and no others, whatever stands at the beginning of a row."""
    compiler = shutil.which("pdflatex")
    if compiler is None:
        pytest.skip("needs pdflatex")
    strange = replace(ugly, rows=[["[1]", "*"], ["*", "≈ 中 ½ ä ḥ ÿ ™"], ["[", "]"]])
    wide = replace(
        ugly, header=[f"column {place}" for place in range(24)], rows=[["12.34 ± 0.56"] * 24]
    )
    shown = (*every_page, ugly, strange, wide, long(strange), long(wide))
    begin = "\\documentclass{article}\\usepackage{booktabs,graphicx,longtable}\\begin{document}\n"
    text = "\\clearpage\n".join(map(to_latex, shown))
    (tmp_path / "all.tex").write_text(begin + text + "\\end{document}\n")
    for _ in range(2):  # how wide the columns of a longtable are, the second time knows
        done = subprocess.run(
            [compiler, "-halt-on-error", "all.tex"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull \\hbox" not in done.stdout
