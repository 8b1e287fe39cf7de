"""docs/findings.md and docs/machines.md keep their word: their commands are such, and where the published results are here, they
print their numbers."""

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
import pytest
from click.testing import CliRunner

from orchestrator.analysis.results import Results, load_results
from orchestrator.cli.main import main
from orchestrator.report.build import make_report
from orchestrator.report.charts.registry import Drawing
from orchestrator.report.formats.files import files_of
from orchestrator.report.formats.markdown import lay_out, to_markdown
from orchestrator.report.references.tables import published_tables
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.publication import Publication
from orchestrator.store.run import Run
from tests.conftest import ROOT

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("findings", "machines")}
PUBLISHED = Path("results/published")
FOLDERS = sorted(path.parent.name for path in (ROOT / PUBLISHED).glob("*/publication.json"))
BOLD = re.compile(r"\*\*(.+?)\*\*")
PROGRAMS = [
    program
    for text in PAGES.values()
    for program in re.findall(r"```python\n(.+?)```", text, re.DOTALL)
]


class Finding(NamedTuple):
    """said: what stands before a command, back to the one before it."""

    said: str
    command: str


def findings_of(text: str) -> list[Finding]:
    said, *blocks = text.split("```sh\n")
    parts = [block.partition("\n```") for block in blocks]
    texts = [said, *(after for _, _, after in parts[:-1])]
    return [Finding(text, command) for text, (command, _, _) in zip(texts, parts, strict=True)]


FINDINGS = [finding for text in PAGES.values() for finding in findings_of(text)]
IDS = [finding.command[31:] for finding in FINDINGS]


@pytest.mark.parametrize("page", PAGES)
def test_each_finding_has_its_command(page: str) -> None:
    found = findings_of(PAGES[page])
    assert len(found) > 5
    assert all(
        re.match(r"sweep report (results/published/h200(-hosts|-before)? )+.+\Z", finding.command)
        for finding in found
    )
    assert (
        sum(bool(BOLD.search(finding.said)) for finding in found) >= len(found) - 1
    )  # one points at notes
    assert not BOLD.search(PAGES[page].rpartition("\n```")[2])


@pytest.mark.parametrize("command", [finding.command for finding in FINDINGS], ids=IDS)
def test_its_commands_can_be_typed(command: str) -> None:
    with click.Context(main) as context:
        _, found, words = main.resolve_command(context, shlex.split(command)[1:])
        assert found is not None
        found.make_context("sweep", words, parent=context)


def test_what_stands_in_short_stands_below() -> None:
    short, below = PAGES["findings"].partition("## In short")[2].split("\n## ", 1)
    numbers = re.findall(r"\d+\.\d+", short)
    assert len(numbers) > 5
    everything = below + PAGES["machines"]
    assert [
        number
        for number in numbers
        if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", everything)
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
def test_the_published_tables_are_what_is_made_of_it(
    folder: str, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh clone makes the same of it, byte for byte."""
    monkeypatch.setattr("orchestrator.report.build.begin_drawing", lambda results: Drawing())
    publication = Publication(published / PUBLISHED / folder)
    report = make_report(
        publication, _read(publication.folder), published_tables(publication.against)
    )
    made = dict(files_of(report.pages, ["md"])) | {"answers.md": report.words}
    tracked = {
        path.name: path.read_text() for path in (ROOT / PUBLISHED / folder / "report").glob("*.md")
    }
    assert tracked.keys() == made.keys()
    assert [name for name, text in tracked.items() if text != made[name]] == []
    assert sum(path.stat().st_size for path in published_files(ROOT / PUBLISHED / folder)) < 25e6


def published_files(folder: Path) -> list[Path]:
    """Without what `sweep report` has made there of it, as the README says, in other formats."""
    listed = [folder / name for name in Publication(folder).contents["files"]]
    pages = [
        folder / "report" / "index.html",
        *(folder / "report").glob("*.md"),
        *(folder / "report" / "figures").glob("*.svg"),
    ]
    return [folder / PUBLICATION_FILE, *listed, *pages]


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
