"""docs/findings.md holds: its commands exist, and print its numbers from the published results."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pandas as pd
import pytest
from click.testing import CliRunner

from orchestrator.analysis.results import Results, load_results
from orchestrator.cli.main import main
from orchestrator.report.formats.markdown import lay_out, to_markdown
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.publication import Publication
from orchestrator.store.run import Run
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "findings.md").read_text()
PUBLISHED = Path("results/published")
FOLDERS = sorted(path.parent.name for path in (ROOT / PUBLISHED).glob("*/publication.json"))
BOLD = re.compile(r"\*\*(.+?)\*\*")
PROGRAMS = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


class Finding(NamedTuple):
    """said: what stands before a command, back to the one before it."""

    said: str
    command: str


def findings_of(text: str) -> list[Finding]:
    said, *blocks = text.split("```sh\n")
    parts = [block.partition("\n```") for block in blocks]
    texts = [said, *(after for _, _, after in parts[:-1])]
    return [Finding(text, command) for text, (command, _, _) in zip(texts, parts, strict=True)]


FINDINGS = findings_of(PAGE)
IDS = [finding.command[31:] for finding in FINDINGS]


def test_each_finding_has_its_command() -> None:
    assert len(FINDINGS) > 5
    for finding in FINDINGS:
        assert re.match(r"sweep report results/published/h200 .+\Z", finding.command)
    with_numbers = [finding for finding in FINDINGS if BOLD.search(finding.said)]
    assert len(with_numbers) >= len(FINDINGS) - 1  # one points at notes
    assert not BOLD.search(PAGE.rpartition("\n```")[2])


@pytest.mark.parametrize("command", [finding.command for finding in FINDINGS], ids=IDS)
def test_its_commands_can_be_typed(command: str) -> None:
    with click.Context(main) as context:
        _, found, words = main.resolve_command(context, shlex.split(command)[1:])
        assert found is not None
        found.make_context("sweep", words, parent=context)


def test_what_stands_in_short_stands_below() -> None:
    short, below = PAGE.partition("## In short")[2].split("\n## ", 1)
    numbers = re.findall(r"\d+\.\d+", short)
    assert len(numbers) > 5
    assert [
        number
        for number in numbers
        if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", below)
    ] == []


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.skipif(not FOLDERS, reason="nothing is published here")
def test_its_programs_run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


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


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("finding", FINDINGS, ids=IDS)
def test_its_numbers_are_printed(
    finding: Finding, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published)
    done = CliRunner().invoke(main, shlex.split(finding.command)[1:], prog_name="sweep")
    assert done.exit_code == 0, done.output
    assert "\n|" in done.stdout
    printed = set(re.findall(r"[^\s|\[\],()]+", done.stdout))
    assert [number for number in BOLD.findall(finding.said) if number not in printed] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_publication_loads(folder: str) -> None:
    """Every file has the digest that publication.json lists, and nothing else is tracked there."""
    publication = Publication(ROOT / PUBLISHED / folder)
    assert len(load_results(publication).cells) > 1000
    listed = {PUBLICATION_FILE, *publication.contents["files"]}
    tracked = subprocess.run(
        ["git", "ls-files", "."], cwd=publication.folder, capture_output=True, text=True
    )
    if tracked.returncode == 0:
        assert set(tracked.stdout.splitlines()) == listed
    assert sum((publication.folder / name).stat().st_size for name in listed) < 25e6


def test_the_published_cells_are_derived_from_the_published_samples(published: Path) -> None:
    """`cells.parquet` of a publication is what this program derives from its other tables."""
    folder = published / PUBLISHED / "h200"
    derived = _read(folder).cells
    stored = pd.read_parquet(folder / "cells.parquet")
    assert list(stored.columns) == list(derived.columns)
    assert stored["cell"].tolist() == derived["cell"].tolist()
    for column in ("step_ms_median", "peak_allocated_bytes", "waits_for_host"):
        pd.testing.assert_series_equal(stored[column], derived[column], check_dtype=False)


SHOWN = {
    "precision": (
        "full",
        {
            "pass": ["train_step"],
            "compile": ["eager"],
            "context_length": [512, 1024],
            "precision": ["fp32", "bf16"],
        },
    ),
    "attention-ladder": (
        "attention",
        {
            "context_length": [16384],
            "precision": ["bf16_pure"],
            "causal": [True],
            "compile": ["eager"],
            "d_head": [64],
        },
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_tables_of_the_readme_are_of_it(name: str, published: Path) -> None:
    run, asked = SHOWN[name]
    results = load_results(Run(published / PUBLISHED / "h200" / run))
    cells = results.cells[results.cells[list(asked)].isin(asked).all(axis=1)]
    (page,) = lay_out(replace(results, cells=cells), [name])
    (table,) = (part for part in to_markdown(page).split("\n\n") if part.startswith("|"))
    assert len(page.rows) >= 9
    assert f"\n\n{table}\n\n" in (ROOT / "README.md").read_text()


def test_a_run_reads_without_the_others(published: Path) -> None:
    runs = [path.parent for path in (published / PUBLISHED).glob("*/*/run.json")]
    assert len(runs) >= len(FOLDERS)
    assert all(Run(run).require() for run in runs)
