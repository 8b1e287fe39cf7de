"""What `sweep report` prints, and how it ends."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.main import main
from orchestrator.report.charts.registry import Drawing
from orchestrator.report.formats.markdown import MAX_ROWS
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

MORE = 3


@pytest.fixture
def run(
    tmp_path: Path, make_outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """One with more cells than a terminal is shown, whose charts nobody waits for."""
    monkeypatch.setattr("orchestrator.report.build.begin_drawing", lambda results: Drawing())
    with open_for_writing(Run(tmp_path / "a run")) as writer:
        writer.write_manifest({"name": "many"})
        for place in range(MAX_ROWS + MORE):
            writer.append(make_outcome(context_length=16 + place), None)
    return Run(tmp_path / "a run")


def report(*words: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)], prog_name="sweep")


def rows(text: str) -> list[str]:
    """Those of the table of timings, without its header."""
    (_, table) = text.split("## Step time\n")
    return [line for line in table.split("\n## ")[0].splitlines() if line.startswith("|")][2:]


def test_the_terminal_has_the_first_rows_and_what_prints_the_others(run: Run) -> None:
    done = report(run.folder)
    assert done.exit_code == 0
    assert len(rows(done.stdout)) == MAX_ROWS
    (command,) = re.findall(
        rf"^… and {MORE} more rows: (sweep report .* --table timings)$", done.stdout, re.MULTILINE
    )
    whole = CliRunner().invoke(main, shlex.split(command)[1:])
    assert len(rows(whole.stdout)) == MAX_ROWS + MORE
    assert "more rows" not in whole.stdout


def test_the_files_and_what_programs_read_are_whole(run: Run) -> None:
    assert report(run.folder).exit_code == 0
    assert len(rows((run.folder / "report" / "timings.md").read_text())) == MAX_ROWS + MORE
    assert "more: sweep report" not in report(run.folder, "--format", "csv").stdout


def test_the_answers_are_printed_and_written(
    run: Run, make_outcome: Callable[..., Outcome]
) -> None:
    with open_for_writing(run) as writer:
        for size in range(30):
            writer.append(make_outcome(Status.OOM, batch_size=100 + size, context_length=64), None)
    printed, written = report(run.folder).stdout, run.folder / "report" / "answers.md"
    total = MAX_ROWS + MORE + 30
    for text in (printed, written.read_text()):
        assert f"- out of memory: **30/{total}** cells run out. 30 cells ran out of memory." in text


def test_cells_whose_samples_are_gone_are_said(run: Run) -> None:
    """As after half a copy: their rows would be missing from every table without a word."""
    parts = sorted((run.folder / "samples").glob("*.parquet"))
    assert "rows of attempt" not in report(run.folder).stderr
    for gone in parts[:2]:
        gone.unlink()
    done = report(run.folder, "--table", "timings")
    assert re.search(r"has 0 of the \d+ rows of .*; 1 cell more incomplete\. Copy", done.stderr)
    assert done.exit_code == 0


@pytest.mark.parametrize(
    ("asked", "missing"), [(None, 0), (10, 0), (MAX_ROWS + MORE, 0), (MAX_ROWS + MORE + 7, 7)]
)
def test_what_is_still_to_be_measured_is_said(run: Run, asked: int | None, missing: int) -> None:
    """Runs of before that was kept do not tell; cells of another selection are more than were asked for."""
    with open_for_writing(run) as writer:
        writer.write_manifest(
            {"name": "many"} if asked is None else {"name": "many", "asked": asked}
        )
    done = report(run.folder)
    assert done.exit_code == 0
    assert ("are not measured yet" in done.stderr) == bool(missing)
    page = (run.folder / "report" / "index.html").read_text()
    assert re.findall(r"(\d+) not measured", page) == ([str(missing)] if missing else [])
    assert (
        "still to be" not in report(run.folder, "--cells", run.read("attempts")["cell"][0]).stderr
    )


def test_what_was_chosen_stands_in_the_command_for_the_others(run: Run) -> None:
    beginnings = ",".join(sorted({cell[0] for cell in run.read("attempts")["cell"]}))
    done = report(run.folder, "--cells", beginnings)
    assert f"--cells {beginnings} --table timings\n" in done.stdout


def test_cells_are_chosen_by_what_they_are(run: Run) -> None:
    done = report(run.folder, "--where", "context_length=16|18|1000", "--table", "timings")
    assert [row.split("|")[2].strip() for row in rows(done.stdout)] == ["16", "18"]
    assert not (run.folder / "report").exists()  # of all that was measured
    assert (
        len(
            rows(
                report(
                    run.folder,
                    "--where",
                    "status=ok,task=train_step",
                    "--where",
                    "context_length=16",
                ).stdout
            )
        )
        == 1
    )
    assert (
        "--where size=tiny --table timings\n" in report(run.folder, "--where", "size=tiny").stdout
    )


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (
            "context_lenght=16",
            "--where context_lenght: these cells have no such parameter. Did you mean 'context_length'?",
        ),
        ("context_length=7", "no cell matches --where. "),
        ("context_length", "--where context_length: is not an assignment. "),
        ("size=", "--where size=: is not an assignment. "),
    ],
)
def test_where_there_is_no_such_cell(run: Run, where: str, said: str) -> None:
    refused = report(run.folder, "--where", where)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"sweep: {said}")


def test_a_comma_too_many_chooses_no_other_cells(run: Run) -> None:
    one = run.read("attempts")["cell"][0]
    assert (
        report(run.folder, "--cells", f"{one},", "--table", "timings").stdout.count("\n| ") == 2
    )  # the header and its row
    refused = report(run.folder, "--cells", " ,")
    assert (refused.exit_code, "names no cell" in refused.stderr) == (2, True)


@pytest.mark.parametrize("words", [(), ("--table", "timings")])
def test_what_cannot_be_written_is_printed_and_told(run: Run, words: tuple[str, ...]) -> None:
    (run.folder / "report").write_text("a file where the folder should be")
    done = report(run.folder, *words)
    assert done.exit_code == 2
    assert len(rows(done.stdout)) >= MAX_ROWS
    assert done.stderr.startswith(f"sweep: {run.folder}: cannot be written: ")
    assert len(done.stderr.splitlines()) == 1
