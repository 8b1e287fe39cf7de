"""`sweep compare`: is one run slower than another, or does it need more memory?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.text import warn_of_incomplete
from orchestrator.common.errors import ConfigError, RunError
from orchestrator.common.output import ProgressLine
from orchestrator.common.run_location import RunLocation, is_address, require_name, split_cell

if TYPE_CHECKING:
    from orchestrator.analysis.checks import Comparison
    from orchestrator.analysis.gate_policy import Policy
    from orchestrator.analysis.memory_gate import PredictionRecord
    from orchestrator.report.tables.table import RenderedTable
    from orchestrator.store.run import Run

_FILE = click.Path(dir_okay=False, path_type=Path)
_SUMMARY = "GITHUB_STEP_SUMMARY"

# Of `sweep ab` as well.
GATE_OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--policy"],
        type=_FILE,
        metavar="FILE",
        help="Limits of the gate other than the default ones. `sweep schema --policy` describes"
        " them.",
    ),
    click.Option(["--markdown"], type=_FILE, metavar="FILE", help="Write the result as Markdown."),
    click.Option(["--junit"], type=_FILE, metavar="FILE", help="Write the result as JUnit XML."),
    click.Option(["--json", "json_"], type=_FILE, metavar="FILE", help="Write the result as JSON."),
]


_GATE = click.Option(
    ["--gate"],
    is_flag=True,
    help="Exit with 1 if a cell is slower or needs more memory, and with 3 if too many cells could"
    " not be decided. In GitHub Actions, add the result to the summary of the job.",
)


@click.command(params=[_GATE, *GATE_OPTIONS])
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.argument("more", metavar="[RUN]...", nargs=-1)
@click.option(
    "--history",
    is_flag=True,
    help="Show the kernel times of each cell over all these runs, and after which one they grew. The"
    " exit code is 0.",
)
@click.option(
    "--table",
    type=click.Choice(["kernel-diff"]),
    help="Show the kernels that differ most between two cells or imported traces.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "md", "csv", "json"]),
    default="text",
    help="Format that is printed. All but text have every column of the table, and nothing else."
    "  [text]",
)
def compare(
    a: str,
    b: str,
    more: tuple[str, ...],
    form: str,
    **options: Any,
) -> None:
    """Show which cells of B are slower, faster, or need more memory than in A.

    A and B are two runs, two cells as RUN:CELL, or two files of predicted memory, which need no GPU:
    `sweep plan CONFIG --memory --gpu H100 --format json > FILE.json`.

    Measure both runs with --repeat 5: the repetitions show how much the times of equal cells differ.

    Example: sweep compare results/demo results/other
    """
    if options.pop("history"):
        _print_history((a, b, *more), form, options)
        return
    if more:
        raise ConfigError(f"{more[0]}: is a third run", "Name two, or add --history")
    if options["table"]:
        _print_kernels(a, b, form)
        return
    policy = read_policy(options["policy"])
    runs: tuple[Run, ...] = ()
    if any(map(_is_of_predictions, (a, b))):
        from orchestrator.analysis.memory_gate import compare_predictions

        comparison = compare_predictions(_read_predictions(a), _read_predictions(b), policy)
    else:
        runs, comparison = _compare_runs(a, b, policy)
    if options["gate"] and "gpu" in comparison.differences:
        first, second = comparison.differences["gpu"]
        raise RunError(
            f"A was measured on {first} and B on {second}, so a difference does not show the effect"
            " of a change",
            "Measure both on the same kind of GPU",
        )
    _print(comparison, runs, form)
    write_files(comparison, runs, options)
    if options["gate"]:
        sys.exit(comparison.exit_code)


def _compare_runs(a: str, b: str, policy: Policy) -> tuple[tuple[Run, Run], Comparison]:
    from orchestrator.analysis.comparison import compare_runs
    from orchestrator.analysis.results import incomplete_cells
    from orchestrator.store.open import open_run
    from orchestrator.sweep.sides import origin_of

    (run_a, cell_a), (run_b, cell_b) = _run_and_cell(a), _run_and_cell(b)
    if bool(cell_a) != bool(cell_b):
        raise ConfigError(
            f"{a} and {b}: one is a run and the other a cell",
            "Name two runs, or two cells as RUN:CELL",
        )
    with ProgressLine("comparing"):
        runs = (open_run(run_a), open_run(run_b))
        comparison = compare_runs(*runs, policy, (cell_a, cell_b) if cell_a else None)
    if origin := origin_of(*(run.folder for run in runs)):
        differences = {**comparison.differences, **origin.differences}
        comparison = replace(comparison, differences=differences, command=origin.command)
    for run in runs:
        warn_of_incomplete(run, incomplete_cells(run))
    return runs, comparison


def _print(comparison: Comparison, runs: tuple[Run, ...], form: str) -> None:
    from orchestrator.cli.text.comparison import (
        changes_table,
        comparison_table,
        describe_comparison,
    )
    from orchestrator.report.formats.terminal import Screen

    if form == "text":
        screen = Screen.of_stdout(may_color=False)
        for line in describe_comparison(comparison, screen, runs):
            click.echo(screen.text(line))
        return
    table = comparison_table(comparison) or changes_table(comparison)
    if table:
        click.echo(_printed(table, form).rstrip("\n"))


def write_files(
    comparison: Comparison,
    runs: tuple[Run, ...],
    options: Mapping[str, Any],
    name: str = "sweep compare",
) -> None:
    """Write the files that the options name, and the summary of a job of GitHub Actions.

    name: of the suite in JUnit.
    """
    from orchestrator.cli.text.gate_files import gate_json, gate_junit, gate_markdown

    summary = os.environ.get(_SUMMARY) if options["gate"] else None
    try:
        if path := options["markdown"]:
            path.write_text(gate_markdown(comparison, runs))
        if path := options["junit"]:
            path.write_text(gate_junit(comparison, name))
        if path := options["json_"]:
            path.write_text(gate_json(comparison))
        if summary:
            with open(summary, "a") as file:
                file.write(gate_markdown(comparison, runs))
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error


def read_policy(path: Path | None) -> Policy:
    """Return the policy of a file, or the default one. Raise ConfigError."""
    from orchestrator.analysis.gate_policy import Policy, PolicyFile

    if path is None:
        return Policy()
    from pydantic import ValidationError

    from orchestrator.config.schema import read_config_text
    from orchestrator.config.yaml_source import Source, config_error, load_yaml, plain

    document = load_yaml(read_config_text(path), str(path))
    try:
        return PolicyFile.model_validate(plain(document)).gate
    except ValidationError as error:
        raise config_error(error, Source(str(path), document)) from error


def _is_of_predictions(text: str) -> bool:
    return text.endswith(".json") and not Path(text).is_dir()


def _read_predictions(path: str) -> list[PredictionRecord]:
    """Read the output of `sweep plan --memory --format json`."""
    from pydantic import TypeAdapter, ValidationError

    from orchestrator.analysis.memory_gate import PredictionRecord

    remedy = "Write it with `sweep plan CONFIG --memory --gpu H100 --format json`"
    try:
        return TypeAdapter(list[PredictionRecord]).validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", remedy) from error
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise ConfigError(f"{path}: cannot be read: {first['msg']}", remedy) from error
        where = ".".join(map(str, first["loc"]))
        problem = f"{path}: has no predicted memory: {where}: {first['msg']}".replace(": :", ":")
        raise ConfigError(problem, remedy) from error


def _print_kernels(a: str, b: str, form: str) -> None:
    from orchestrator.cli.text.comparison import compare_kernels
    from orchestrator.report.formats.terminal import Screen, table_text
    from orchestrator.report.tables.views import MAX_ROWS
    from orchestrator.store.open import open_run

    (run_a, cell_a), (run_b, cell_b) = _run_and_cell(a), _run_and_cell(b)
    with ProgressLine("comparing"):
        kernels = compare_kernels(open_run(run_a), open_run(run_b), (cell_a, cell_b))
    if form == "text":
        click.echo(table_text(kernels, Screen.of_stdout(), MAX_ROWS, "--format csv"))
    else:
        click.echo(_printed(kernels, form).rstrip("\n"))


def _print_history(names: Sequence[str], form: str, others: Mapping[str, Any]) -> None:
    from orchestrator.analysis.history import cell_histories
    from orchestrator.cli.text.history import describe_suspects, history_table
    from orchestrator.report.formats.terminal import Screen, dense_table_text
    from orchestrator.store.open import open_run

    for name, value in others.items():
        if value:
            problem = f"--{name.strip('_')}: is for two runs, and a history gives no verdict"
            raise ConfigError(problem, "Leave it out; `sweep ab` of two commits decides")
    with ProgressLine("comparing"):
        runs = [open_run(_run_and_cell(name)[0]) for name in names]
        histories = cell_histories(runs)
    if not histories:
        raise RunError(
            "no cell has kernel times in two runs", "Measure with --instrument kernel_time"
        )
    page = history_table(histories)
    if form != "text":
        click.echo(_printed(page, form).rstrip("\n"))
        return
    screen = Screen.of_stdout(may_color=False)
    click.echo(f"\n{dense_table_text(page, screen, '--format csv')}\n")
    for line in describe_suspects(histories, runs):
        click.echo(screen.text(line))


def _printed(table: RenderedTable, form: str) -> str:
    """Return every row and column of a table in a format other than text."""
    from orchestrator.report.formats.files import WHOLE, to_markdown
    from orchestrator.report.tables.views import view_of

    if form == "md":
        return to_markdown(view_of(table, max_rows=None, max_columns=None))
    return WHOLE[form](table)


def _run_and_cell(text: str) -> tuple[RunLocation, str]:
    """Split `RUN:CELL`. A run that is no folder here is looked up in `results`."""
    if is_address(text):
        return split_cell(text)
    folder, colon, cell = text.rpartition(":")
    if not colon:
        folder, cell = text, ""
    # The name of a folder may have colons: the whole text is tried first.
    for run, cell_of_run in ((text, ""), (folder, cell)):
        for path in (Path(require_name(run, "RUN")), Path("results") / run):
            if path.exists():
                return path, cell_of_run
    return Path(folder), cell
