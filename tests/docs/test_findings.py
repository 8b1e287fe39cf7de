"""The page of findings and the README hold: their numbers are in the published results."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pandas as pd
import pytest
from click.testing import CliRunner

from orchestrator.analysis.results import Results, load_results
from orchestrator.cli.main import main
from orchestrator.report.findings.registry import findings, first_screen
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.run import Run
from orchestrator.store.run_collection import Publication
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "explanation" / "findings-h200.md").read_text()
PUBLISHED = Path("results/published")
FOLDERS = sorted(path.parent.name for path in (ROOT / PUBLISHED).glob("*/publication.json"))
BOLD = re.compile(r"\*\*(.+?)\*\*")
PROGRAMS = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


class Shown(NamedTuple):
    """Commands of the page, and the text between them and the commands before."""

    text: str
    commands: list[str]


def parts_of(text: str) -> list[Shown]:
    first, *blocks = text.split("```sh\n")
    parts = [block.partition("\n```") for block in blocks]
    texts = [first, *(after for _, _, after in parts[:-1])]
    joined = [commands.replace("\\\n", "").splitlines() for commands, _, _ in parts]
    return [Shown(text, commands) for text, commands in zip(texts, joined, strict=True)]


FINDINGS = parts_of(PAGE)
COMMANDS = [command for finding in FINDINGS for command in finding.commands]
IDS = [str(index) for index in range(len(FINDINGS))]


def test_each_finding_has_its_command() -> None:
    assert len(FINDINGS) > 5
    for command in COMMANDS:
        assert re.match(r"sweep report results/published/(h200(-2026-11)?|h100x2) .+\Z", command)
    with_numbers = [finding for finding in FINDINGS if BOLD.search(finding.text)]
    assert len(with_numbers) >= len(FINDINGS) - 1  # one points at notes
    assert not BOLD.search(PAGE.rpartition("\n```")[2])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_findings_page_parse(command: str) -> None:
    with click.Context(main) as context:
        _, found, words = main.resolve_command(context, shlex.split(command)[1:])
        assert found is not None
        found.make_context("sweep", words, parent=context)


@pytest.mark.docs
def test_the_summary_is_what_the_report_finds(published: Path) -> None:
    """The page, the terminal and answers.md show the same findings with the same marks."""
    short = PAGE.partition("## In short")[2].split("\n## ", 1)[0]
    found = first_screen(findings(_read(published / PUBLISHED / "h200")), 10)
    assert [line for line in short.splitlines() if line.startswith("- ")] == [
        f"- {one.label}, {' '.join(filter(None, (one.marked_number, one.interval)))}:"
        f" {one.sentence}"
        for one in found
    ]


@pytest.mark.docs
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.skipif(not FOLDERS, reason="nothing is published here")
def test_the_programs_of_the_findings_page_run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    # A program that prints rows of a table prints all of those on the page, without the reasons.
    printed = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    before = PAGE.partition(f"```python\n{program}")[0].rpartition("\n```")[2]
    rows = [line for line in before.splitlines() if line.startswith("| ")][1:] if printed else []
    assert len(rows) == len(printed)
    assert all(row.startswith(line) for row, line in zip(rows, printed, strict=True))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: a report is written where its run is."""
    if not FOLDERS:
        pytest.skip("nothing is published here")
    folder = tmp_path_factory.mktemp("findings")
    shutil.copytree(ROOT / PUBLISHED, folder / PUBLISHED, ignore=shutil.ignore_patterns("report"))
    return folder


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(run: Run) -> Results:
        return _read(run.folder) if isinstance(run, Publication) else load_results(run)

    monkeypatch.setattr("orchestrator.analysis.results.load_results", read)


@cache
def _read(folder: Path) -> Results:
    return load_results(Publication(folder.absolute()))


@pytest.mark.docs
@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("finding", FINDINGS, ids=IDS)
def test_the_commands_below_a_finding_print_its_numbers(
    finding: Shown, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in what a reader sees: at most 60 lines of 100 columns."""
    monkeypatch.chdir(published)
    monkeypatch.setenv("COLUMNS", "100")
    printed: set[str] = set()
    for command in finding.commands:
        done = CliRunner().invoke(main, shlex.split(command)[1:], prog_name="sweep")
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        assert len(lines) <= 60
        assert max(map(len, lines)) <= 100, done.stdout
        printed |= set(re.findall(r"[^\s|\[\],()]+", done.stdout))
    assert [number for number in BOLD.findall(finding.text) if number not in printed] == []


@pytest.mark.docs
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_publication_loads(folder: str) -> None:
    """Every file has the digest that publication.json lists, and nothing else is tracked there."""
    publication = Publication(ROOT / PUBLISHED / folder)
    least = {"h200": 1000, "cpu": 5}.get(folder, 20)  # those of several GPUs have one or two runs
    assert len(load_results(publication).cells) >= least
    listed = {PUBLICATION_FILE, *publication.contents.files}
    tracked = subprocess.run(
        ["git", "ls-files", "."], cwd=publication.folder, capture_output=True, text=True
    )
    if tracked.returncode == 0:
        assert set(tracked.stdout.splitlines()) == listed
    assert sum((publication.folder / name).stat().st_size for name in listed) < 25e6


@pytest.mark.docs
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_published_cells_are_derived_from_the_published_samples(
    folder: str, published: Path
) -> None:
    """`cells.parquet` of a publication is what this program derives from its other tables."""
    derived = _read(published / PUBLISHED / folder).cells
    stored = pd.read_parquet(published / PUBLISHED / folder / "cells.parquet")
    # The H200's were published before `loss` was a parameter.
    stored = stored.rename(columns={"loss": "autocast_loss"} if folder == "h200" else {})
    assert list(stored.columns) == list(derived.columns)
    assert stored["cell"].tolist() == derived["cell"].tolist()
    for column in {"step_ms_median", "peak_allocated_bytes", "cpu_bound"} & set(derived.columns):
        pd.testing.assert_series_equal(stored[column], derived[column], check_dtype=False)


def test_the_table_of_the_readme_is_what_was_published() -> None:
    cells = pd.read_parquet(ROOT / PUBLISHED / "h200" / "cells.parquet")
    cells = cells[cells["run"] == "full"]
    chosen = cells[(cells["pass"] == "train_step") & (cells["compile"] == "eager")]
    chosen = chosen.set_index(["size", "context_length", "precision"])
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| (.+?) \|$", readme, re.MULTILINE)
    assert len(rows) == 4
    for size, context, rest in rows:
        fp32, bf16, ratio, peak, limited_by = rest.split(" | ")
        wide = chosen.loc[(size, int(context.replace(",", "")), "fp32")]
        narrow = chosen.loc[(size, int(context.replace(",", "")), "bf16")]
        assert fp32 == three_digits(wide["step_ms_median"])
        assert bf16 == three_digits(narrow["step_ms_median"])
        assert ratio == f"{wide['step_ms_median'] / narrow['step_ms_median']:.2f}×"
        assert peak == f"{narrow['peak_allocated_bytes'] / 2**30:.1f}"
        assert limited_by == ("the CPU" if narrow["cpu_bound"] else "the GPU")


def three_digits(ms: float) -> str:
    return f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def test_a_run_reads_without_the_others(published: Path) -> None:
    runs = [path.parent for path in (published / PUBLISHED).glob("*/*/run.json")]
    assert len(runs) >= len(FOLDERS)
    assert all(Run(run).require() for run in runs)
