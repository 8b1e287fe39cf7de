"""The same numbers in every format, whatever a model is called; LaTeX and Typst that compile, where the compilers are."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from orchestrator.report.formats import FORMATS, files_of, to_csv, to_latex, to_markdown, to_typst
from orchestrator.report.frames import Results, load_results
from orchestrator.report.render import Page, lay_out, written_out
from orchestrator.report.tables import TABLES
from orchestrator.store import Run
from tasks.harness.records import Outcome, Status

UGLY = 'a_b & 50% {x} \\ ~ ^ $1 # <script>alert("1")</script> | "quoted", *bold* `code` @ref = [b] // \x1b[31m ä ×'
MakeOutcome = Callable[..., Outcome]


@pytest.fixture
def pages(results: Results) -> list[Page]:
    return lay_out(results)


@pytest.fixture
def results(tmp_path: Path, make_outcome: MakeOutcome) -> Results:
    with Run(tmp_path / "run").opened_for_writing() as writer:
        writer.write_manifest({"name": UGLY})
        for context in (16, 32):
            for precision in ("fp32", "bf16"):
                writer.append(make_outcome(context_length=context, precision=precision), None)
        writer.append(make_outcome(Status.OOM, context_length=64), None)
    return load_results(Run(tmp_path / "run"))


@pytest.fixture(scope="module")
def every_page(results_of_every_kind: Results) -> list[Page]:
    return lay_out(results_of_every_kind)


@pytest.fixture
def ugly() -> Page:
    return Page(TABLES[0], ["axis", UGLY], [["1", UGLY], ["2", "–"]], UGLY)


def test_every_page_is_there_in_every_format(pages: list[Page]) -> None:
    assert {page.table.name for page in pages} >= {"timings", "precision", "failures"}
    assert {name for name, _ in files_of(pages)} == {f"{page.table.name}.{suffix}" for page in pages for suffix in FORMATS}


def test_csv_reads_back_to_the_letter(pages: list[Page], ugly: Page) -> None:
    for page in (*pages, ugly):
        assert list(csv.reader(io.StringIO(to_csv(page), newline=""))) == [page.header, *page.rows]


def test_every_table_is_that_of_cells_parquet_to_the_printed_digit(
    results_of_every_kind: Results, every_page: list[Page], tmp_path: Path
) -> None:
    """Where the frame that was written comes back, every table in every format is the same to the letter."""
    with Run(tmp_path / "run").opened_for_writing() as writer:
        writer.write_cells(results_of_every_kind.cells)
    from_file = replace(results_of_every_kind, cells=pd.read_parquet(tmp_path / "run" / "cells.parquet"))
    written = dict(files_of(lay_out(from_file)))
    assert set(written) == {f"{table.name}.{suffix}" for table in TABLES for suffix in FORMATS}
    assert written == dict(files_of(every_page))


def test_what_is_printed_is_what_the_frame_has(every_page: list[Page], results_of_every_kind: Results) -> None:
    """To the last printed digit, by a way of its own: each number of a column is one of the frame, rounded."""
    for table, title, column, scale in (
        ("timings", "forward", "forward_ms_mean", 1),
        ("memory", "peak", "peak_allocated_bytes", 2**-30),
        ("utilisation", "MFU", "mfu", 100),
        ("snapshots", "events", "snapshot_events", 1),
        ("kernel-coverage", "busy", "busy", 100),
    ):
        (page,) = (page for page in every_page if page.table.name == table)
        place = next(place for place, name in enumerate(page.header) if name.startswith(title))
        printed = [found[0] for row in page.rows if (found := re.match(r"-?[\d.]+", row[place].replace(",", "")))]
        values = [float(value) * scale for value in results_of_every_kind.cells[column].dropna()]
        assert printed
        for text in printed:
            digits = len(text.partition(".")[2])
            assert any(f"{value:.{digits}f}" == text for value in values), (table, text)


def test_every_format_of_every_table_has_the_same_numbers(every_page: list[Page]) -> None:
    """Read back out of what was written: as many numbers, and each to the same digit."""
    for page in every_page:
        numbers = [number for row in written_out(page) for text in row for number in re.findall(r"\d+\.\d+", text)]
        assert [number for row in list(csv.reader(io.StringIO(to_csv(page), newline="")))[1:] for text in row
                for number in re.findall(r"\d+\.\d+", text)] == numbers  # fmt: skip
        for form in (to_markdown, to_latex, to_typst):
            found = Counter(re.findall(r"\d+\.\d+", form(page)))
            assert not Counter(number for row in page.rows for text in row for number in re.findall(r"\d+\.\d+", text)) - found


def test_nothing_of_a_name_is_markup(ugly: Page) -> None:
    assert r"a\_b \& 50\% \{x\} \textbackslash{} \textasciitilde{} \^{} \$1 \# \ensuremath{<}script" in to_latex(ugly)
    assert r"<script>alert(\"1\")</script>" in to_typst(ugly)  # inside a string
    assert "\\|" in to_markdown(ugly)
    assert "\x1b" not in to_typst(ugly)


def test_typst_compiles(pages: list[Page], ugly: Page, tmp_path: Path) -> None:
    typst = pytest.importorskip("typst")
    for page in (*pages, ugly):
        (tmp_path / "table.typ").write_text(to_typst(page))
        assert typst.compile(str(tmp_path / "table.typ")).startswith(b"%PDF")


def test_latex_compiles(pages: list[Page], ugly: Page, tmp_path: Path) -> None:
    compiler = shutil.which("pdflatex")
    if compiler is None:
        pytest.skip("needs pdflatex")
    begin = "\\documentclass{article}\\usepackage[T1]{fontenc}\\usepackage{booktabs,textcomp}\\begin{document}\n"
    (tmp_path / "all.tex").write_text(begin + "\n".join(map(to_latex, (*pages, ugly))) + "\\end{document}\n")
    done = subprocess.run([compiler, "-halt-on-error", "all.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
