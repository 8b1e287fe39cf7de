"""What `sweep report` prints, and how it ends."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from orchestrator.analysis.results import load_results
from orchestrator.cli.commands import report as report_command
from orchestrator.cli.main import main
from orchestrator.report.findings.registry import findings
from orchestrator.report.formats.terminal import Screen, memory_failures_text, overview
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.report.tables.views import MAX_ROWS
from orchestrator.report.text.memory_failures import memory_failures
from orchestrator.report.text.provenance import provenance
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

CELLS = 43  # more than fit a page


@pytest.fixture(autouse=True)
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.report.build.drawn_figures", lambda results: [])


@pytest.fixture
def run(
    tmp_path: Path, make_outcome: Callable[..., Outcome], make_once: Callable[..., None]
) -> Run:
    """One with more cells than a terminal is shown."""
    run = Run(tmp_path / "a run")

    def measure() -> None:
        with open_for_writing(run) as writer:
            writer.write_manifest({"name": "many"})
            for place in range(CELLS):
                writer.append(make_outcome(context_length=16 + place), None)

    make_once(run.folder, measure)
    return run


def report(*words: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)], prog_name="sweep")


def rows(text: str) -> list[str]:
    """The rows of the table of timings, without its head."""
    (_, table) = text.split("Step time\n")
    lines = table.split("\n\n")[1].splitlines()
    rule = next(index for index, line in enumerate(lines) if line.strip().startswith("─"))
    return [line for line in lines[rule + 1 :] if re.match(r" *\d", line)]


def test_the_overview_fits_a_terminal_and_names_the_tables(run: Run) -> None:
    done = report(run.folder)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in done.stdout
    assert "--table timings" in done.stdout
    assert len(rows(report(run.folder, "--table", "timings").stdout)) == CELLS


def test_tables_are_listed_by_what_the_page_shows() -> None:
    shown, on_demand = report("nowhere", "--table", "list").stdout.split("On demand:")
    assert "  precision " in shown
    assert "  kernel-diff " in on_demand
    names = [line.split()[0] for line in f"{shown}{on_demand}".splitlines() if line[:2] == "  "]
    assert sorted(names) == sorted(table.name for table in TABLES)
    assert shown.count("\n  ") == 13


@pytest.mark.parametrize("form", ["text", "md"])
def test_several_tables_end_with_one_line_on_what_measured_them(run: Run, form: str) -> None:
    results = load_results(run)
    first, second, *_ = lay_out(results)
    chosen = ("--table", first.table.name, "--table", second.table.name, "--where", "size=tiny")
    printed = report(run.folder, *chosen, "--format", form).stdout
    measured_with = provenance(results)
    assert printed.index(first.table.title) < printed.index(second.table.title)
    assert " ".join(printed.split()).count(measured_with) == 1
    assert " ".join(printed.replace("*", "").split()).endswith(measured_with)
    assert "**" not in printed


def test_of_a_very_long_table_a_slice_is_printed_with_the_command_for_the_rest(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_command, "MOST_ROWS", CELLS - 3)
    text = report(run.folder, "--table", "timings").stdout
    assert len(rows(text)) == CELLS - 3
    assert re.search(r"^3 more rows.*: sweep report .*--table timings --format csv$", text, re.M)
    whole = report(run.folder, "--table", "timings", "--format", "csv").stdout
    assert len(whole.split()) == CELLS + 1


def test_the_files_and_what_programs_read_are_whole(run: Run) -> None:
    assert report(run.folder).exit_code == 0
    file = pd.read_csv(run.folder / "report" / "timings.csv")
    assert len(file) == CELLS
    printed = report(run.folder, "--table", "timings", "--format", "csv").stdout
    assert len(pd.read_csv(io.StringIO(printed))) == CELLS
    objects = json.loads(report(run.folder, "--table", "timings", "--format", "json").stdout)
    assert [one["context_length"] for one in objects] == file["context_length"].tolist()
    assert {type(one["forward_ms"]) for one in objects} <= {int, float}


def test_latex_has_a_slice_unless_cells_are_selected(run: Run) -> None:
    latex = report(run.folder, "--table", "timings", "--format", "tex").stdout
    assert len(re.findall(r" \\\\$", latex, re.M)) == MAX_ROWS + 1  # and the head
    selected = report(
        run.folder, "--table", "timings", "--format", "tex", "--where", "size=tiny"
    ).stdout
    assert r"\begin{longtable}" in selected


def test_the_answers_are_printed_and_written(
    run: Run, make_outcome: Callable[..., Outcome]
) -> None:
    with open_for_writing(run) as writer:
        for size in range(30):
            writer.append(make_outcome(Status.OOM, batch_size=100 + size, context_length=64), None)
    printed, written = report(run.folder).stdout, run.folder / "report" / "answers.md"
    total = CELLS + 30
    sentence = f"- out of memory: **30** of {total} cells. 30 cells ran out of memory."
    assert sentence in written.read_text()
    assert re.search(rf"^  out of memory +30 +of {total} cells", printed, re.MULTILINE)
    assert len(printed.splitlines()) <= 60


def test_cells_whose_samples_are_gone_are_said(run: Run) -> None:
    """As after half a copy: their rows would be missing from every table without a word."""
    assert "incomplete" not in report(run.folder).stderr
    (gone,) = (run.folder / "samples").glob("*.parquet")
    gone.unlink()
    done = report(run.folder, "--table", "timings")
    assert re.search(
        rf"has 0 of its \d+ rows; {CELLS - 1} cells more incomplete\. Copy", done.stderr
    )
    assert done.exit_code == 0


@pytest.mark.usefixtures("brief_report")
@pytest.mark.parametrize(("asked", "missing"), [(None, 0), (1, 0), (2, 0), (9, 7)])
def test_a_report_counts_the_cells_that_are_not_measured_yet(
    tmp_path: Path, make_outcome: Callable[..., Outcome], asked: int | None, missing: int
) -> None:
    """Runs of before that was kept do not tell; cells of another selection are more than were asked for."""
    run = Run(tmp_path / "two cells")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "two"} if asked is None else {"name": "two", "asked": asked})
        for length in (16, 32):
            writer.append(make_outcome(context_length=length), None)
    done = report(run.folder)
    assert done.exit_code == 0
    assert ("asked for and not measured yet: `sweep status " in done.stderr) == bool(missing)
    page = (run.folder / "report" / "index.html").read_text()
    assert re.findall(r"(\d+) not measured", page) == ([str(missing)] if missing else [])
    chosen = ("--cells", run.read("attempts")["cell"][0])
    assert "not measured yet" not in report(run.folder, *chosen, "--table", "timings").stderr


def test_selected_cells_are_in_the_command_for_the_others(run: Run) -> None:
    beginnings = ",".join(sorted({cell[0] for cell in run.read("attempts")["cell"]}))
    done = report(run.folder, "--cells", beginnings)
    assert f"--cells {beginnings} --table timings --format csv\n" in done.stdout


def test_cells_are_chosen_by_what_they_are(run: Run) -> None:
    done = report(run.folder, "--where", "context_length=16|18|1000", "--table", "timings")
    assert [row.split()[0] for row in rows(done.stdout)] == ["16", "18"]
    assert not (run.folder / "report").exists()  # of all that was measured
    none = report(run.folder, "--table", "kernels", "--format", "tex")
    assert none.stdout == ""
    assert none.stderr.startswith(
        "these cells have no numbers for --table kernels. Some tables need an"
    )
    two = ("--where", "status=ok,task=train_step", "--where", "context_length=16")
    assert "tiny" in report(run.folder, *two, "--table", "timings").stdout
    done = report(run.folder, "--where", "size=tiny")
    assert "--where size=tiny --table timings --format csv\n" in done.stdout


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (
            "context_lenght=16",
            "--where context_lenght: these cells have no such parameter. Did you mean 'context_length'?",
        ),
        ("context_length=7", "no cell has context_length=7. Allowed: "),
        ("model=gpt", "no cell has a value for model. Leave model out of --where"),
        ("context_length", "--where context_length: is not an assignment. "),
        ("size=", "--where size=: is not an assignment. "),
    ],
)
def test_a_malformed_or_unmatched_where_option_is_refused(
    run: Run, where: str, expected: str
) -> None:
    refused = report(run.folder, "--where", where)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"sweep: {expected}")


def test_a_comma_too_many_chooses_no_other_cells(run: Run) -> None:
    one = run.read("attempts")["cell"][0]
    printed = report(run.folder, "--cells", f"{one},", "--table", "timings", "--format", "csv")
    assert printed.stdout.count("\n") == 3  # the header, its row, and the end of the table
    refused = report(run.folder, "--cells", " ,")
    assert (refused.exit_code, "names no cell" in refused.stderr) == (2, True)


@pytest.mark.parametrize("words", [(), ("--table", "timings")])
def test_a_report_that_cannot_be_written_is_still_printed_and_an_error_reported(
    run: Run, words: tuple[str, ...]
) -> None:
    (run.folder / "report").write_text("a file where the folder should be")
    done = report(run.folder, *words)
    assert done.exit_code == 2
    assert "timings" in done.stdout or len(rows(done.stdout)) == CELLS
    assert done.stderr.startswith(f"sweep: {run.folder}: cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


def test_tables_need_no_package_that_draws_charts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # as if it were not installed
    refused = report(run.folder)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(
        "sweep: charts need vl-convert-python, not installed here. Run"
    )
    assert refused.stderr.count("\n") == 1
    assert report(run.folder, "--table", "timings").exit_code == 0


def test_cells_are_json_objects(run: Run) -> None:
    cells = json.loads(report(run.folder, "--format", "json").stdout)
    assert len(cells) == CELLS
    assert {"cell", "status", "step_ms_median"} <= set(cells[0])


def test_an_overview_fits_a_narrow_terminal_without_letters_beyond_ascii(run: Run) -> None:
    results = load_results(run)
    screen = Screen(60, encoding="ascii")
    text = overview(results, findings(results), lay_out(results), "sweep report RUN", screen)
    assert max(map(len, text.splitlines())) <= 60
    assert text.isascii()
    assert "Step time, ms" in text


def test_only_a_terminal_has_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Screen.of_stdout().has_color
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Screen.of_stdout().has_color
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Screen.of_stdout().has_color


def test_cells_that_ran_out_of_memory_are_counted_by_model(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.append(make_outcome(context_length=16), None)
        for context, precision in ((32, "fp32"), (64, "fp32"), (64, "bf16")):
            writer.append(
                make_outcome(Status.OOM, context_length=context, precision=precision), None
            )
    results = load_results(Run(tmp_path / "run"))
    (table,) = memory_failures(results)
    (found,) = table.rows
    assert found == ["tiny", "3 of 4", "3 backward", "32 in fp32, 64 in bf16"]
    assert re.search(r"^  tiny +3 of 4 ", memory_failures_text(results, Screen()), re.MULTILINE)
    fine = replace(results, cells=results.cells[results.cells["status"] == "ok"])
    assert memory_failures_text(fine, Screen()) == ""
