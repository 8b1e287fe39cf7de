"""The written tables of all published runs: LaTeX and Typst compile, and CSV has numbers as numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest
import typst

from orchestrator.analysis.results import load_results
from orchestrator.report.formats.files import files_of
from orchestrator.report.references.tables import reference_tables
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.store.run import Run
from orchestrator.store.run_collection import Publication
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published" / "h200"
RUNS = sorted(path.parent.name for path in PUBLISHED.glob("*/run.json"))
ARTICLE = r"\documentclass[11pt]{article}\usepackage{booktabs,longtable}\begin{document}"
# A text that is a number with a mark or a unit behind it, such as 0.81× or 5.3 GiB.
NUMBER = re.compile(r"[-+≥≈]? ?\d+([.,]\d+)*(e[-+]\d+)?( ?[×%*†~]| [GMK]iB| ms)?")
WORD = re.compile(r'<word xMin="(.*?)" yMin="(.*?)" xMax="(.*?)" yMax="(.*?)">(.*?)</word>')
FORMATS = ("tex", "typ", "csv")
WHOLE = "all runs"

pytestmark = [pytest.mark.render, pytest.mark.docs]


@pytest.fixture(scope="module", params=[*RUNS, WHOLE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tables of one published run, or of all of them and of the write-ups."""
    folder = tmp_path_factory.mktemp("tables")
    is_whole = request.param == WHOLE
    run = Publication(PUBLISHED) if is_whole else Run(PUBLISHED / request.param)
    tables = (*TABLES, *reference_tables("all" if is_whole else None))
    for path, content in files_of(lay_out(load_results(run), (), tables), FORMATS):
        (folder / path).write_text(content)
    return folder


def test_latex_needs_no_more_width_than_an_article_has(folder: Path) -> None:
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed: apt install texlive-latex-recommended")
    # Each name is in the log, before what TeX says about the file.
    inputs = [
        rf"\typeout{{}}\typeout{{{file.name}}}\input{{{file.name}}}\clearpage"
        for file in sorted(folder.glob("*.tex"))
    ]
    assert inputs
    (folder / "all.tex").write_text("\n".join([ARTICLE, *inputs, r"\end{document}"]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    log = (folder / "all.log").read_text(errors="replace")
    assert re.findall(r"Overfull \\hbox.*\n.*\n", log) == []
    sources = "".join(file.read_text() for file in folder.glob("*.tex"))
    assert not re.search(r"resizebox|scalebox|adjustbox", sources)


def test_typst_compiles_and_no_word_is_over_another(folder: Path) -> None:
    includes = [f'#include "{file.name}"' for file in sorted(folder.glob("*.typ"))]
    document = folder / "all.typ"
    document.write_text("\n".join(includes))
    typst.compile(document, output=folder / "all.pdf")
    if not shutil.which("pdftotext"):
        pytest.skip("compiled; pdftotext is not installed: apt install poppler-utils")
    assert overlapping_words(folder / "all.pdf") == []


def overlapping_words(document: Path) -> list[tuple[str, str]]:
    command = ["pdftotext", "-bbox", str(document), "-"]
    pages = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for page in pages.split("<page ")[1:]:
        words = [(*map(float, box), text) for *box, text in WORD.findall(page)]
        assert words
        for one, other in combinations(words, 2):
            wide = min(one[2], other[2]) - max(one[0], other[0])
            high = min(one[3], other[3]) - max(one[1], other[1])
            # Boxes of letters hold ascenders and descenders, so that those of two lines touch.
            if wide > 0.5 and high > 0.25 * min(one[3] - one[1], other[3] - other[1]):
                found.append((one[4], other[4]))
    return found


def test_csv_has_numbers_as_numbers_and_a_status(folder: Path) -> None:
    for file in sorted(folder.glob("*.csv")):
        frame = pd.read_csv(file, keep_default_na=False, na_values=[""])
        assert any(name.endswith("status") for name in frame), file.name
        for name in frame.select_dtypes(exclude=["number", "bool"]):
            texts = frame[name].dropna().astype(str)
            numbers = [text for text in texts if NUMBER.fullmatch(text)]
            assert not numbers, (file.name, name, numbers[:3])
