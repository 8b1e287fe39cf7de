"""The commands that turn what was measured into something to read: `report`, `compare`, `import-nsys`, `publish`.

Each opens what it needs, calls the function of its name, prints. What it needs is imported inside it, as in cli.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from orchestrator.errors import EXIT_FAILURES, ConfigError, SweepError

if TYPE_CHECKING:
    from orchestrator.report.table import Table


class PublishedDevice(click.ParamType[str]):
    """A device that numbers were published of. They are read where they are asked for, so that `--help` is there at once."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from orchestrator.report.published.devices import find_device

        return find_device(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._words())}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words() if word.startswith(incomplete)]

    def _words(self) -> list[str]:
        from orchestrator.report.published.devices import ALL, devices

        return [*devices(), ALL]


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--table", "tables", multiple=True, help="Only this table; may be repeated.")
@click.option("--format", "form", type=click.Choice(["md", "csv", "tex", "typ"]), default="md", help="What is printed.  [md]")
@click.option("--cells", metavar="A,B", help="Only these cells, by the beginnings of their ids; the files stay as they are.")
@click.option("--against", type=PublishedDevice(), help="Also what others published of the same cells on this device.")
def report(run_folders: tuple[Path, ...], tables: tuple[str, ...], form: str, cells: str | None, against: str | None) -> None:
    """Print what the cells of RUN say, in words and in tables, and write it to RUN/report, as Markdown, CSV, LaTeX and Typst.

    Without --table or --cells, also as one page with charts, RUN/report/index.html, and the charts as SVG and PNG.

    With --against, each published number stands beside the cells that it may be of, with the ratio and what is doubtful of it.

    Several runs stand in the same tables, told apart by their names; what is written is in a folder within the first.

    Example: sweep report results/demo --table timings
    """
    from orchestrator.report.formats import FORMATS, files_of
    from orchestrator.report.frames import choose_cells, load_results
    from orchestrator.report.published.tables import nothing_in_common, published_tables
    from orchestrator.report.render import lay_out
    from orchestrator.report.tables import TABLES
    from orchestrator.together import open_runs, published_against

    run = open_runs(run_folders)
    results = load_results(run)
    beside = published_tables(against or published_against(run))
    whole = _whole_report(run, results, beside) if not tables and cells is None else None
    chosen = results if cells is None else choose_cells(results, cells.split(","))
    pages = whole.pages if whole else lay_out(chosen, _with_published(tables, beside if against else ()), (*TABLES, *beside))
    if form == "md" and whole and whole.words:
        click.echo(whole.words)
    for page in pages:
        click.echo(FORMATS[form](page))
    if against is not None and len(results.cells) and not lay_out(chosen, (), beside):
        click.echo(nothing_in_common(against), err=True)
    elif not pages:
        click.echo("nothing measured yet")
    if cells is not None:
        return
    try:
        run.write_report(whole.files() if whole else files_of(pages))
    except SweepError as error:
        click.echo(f"sweep: {error}", err=True)
    else:
        if whole:
            click.echo(f"as one page: {run.folder / 'report' / whole.page}", err=True)


@click.command("import-nsys")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The run to add it to, or a new folder.  [results/FILE]")
def import_nsys(file: Path, out: Path | None) -> None:
    """Add the kernels of FILE, which Nsight Systems wrote (.sqlite or .nsys-rep), to a run, and print their tables.

    Example: sweep import-nsys report1.sqlite --out results/imported
    """
    from orchestrator.imports import import_nsys
    from orchestrator.report.frames import choose_cells, load_results
    from orchestrator.report.render import lay_out, to_markdown
    from orchestrator.store import Run

    folder = Run(out or Path("results") / file.stem)
    cell = import_nsys(file, folder)
    for page in lay_out(choose_cells(load_results(folder), [cell])):
        click.echo(to_markdown(page))
    click.echo(f"kept in {folder.folder} as cell {cell}")


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--fail-on", type=click.Choice(["slower", "faster", "ambiguous"]), multiple=True, help="Exit code 1 if a cell is.")
@click.option("--threshold", default="0%", help="With --fail-on: only for differences beyond it, such as 3%.  [0%]")
def compare(before: str, after: str, fail_on: tuple[str, ...], threshold: str) -> None:
    """Is B faster than A, or is it noise? Each is a run, or one cell of it, as RUN:CELL.

    Measure with --repeat: what repetitions of a cell differ in is the noise that a difference must exceed.

    Example: sweep compare results/demo results/other
    """
    from orchestrator.report.compare import compare as held_against
    from orchestrator.report.render import describe_comparison
    from orchestrator.store import Run

    least = _fraction(threshold)
    (first, one), (second, other) = _run_and_cell(before), _run_and_cell(after)
    if bool(one) != bool(other):
        raise ConfigError(f"{before} and {after}: one is a run and the other a cell", "Name two runs, or two cells as RUN:CELL")
    report = held_against(Run(first), Run(second), (one, other) if one else None)
    for line in describe_comparison(report):
        click.echo(line)
    bad = [one for one in report.comparisons if one.verdict.lower() in fail_on and abs(one.ratio - 1) > least]
    sys.exit(EXIT_FAILURES if bad else 0)


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Where to; what was published there is replaced.")
@click.option("--limit-mb", type=click.FloatRange(0), default=25, help="How large it may be, in 10⁶ bytes.  [25]")
@click.option("--against", type=PublishedDevice(), default="all", help="Whose numbers stand beside its own.  [all]")
def publish(run_folders: tuple[Path, ...], out: Path, limit_mb: float, against: str) -> None:
    """Put what one or more RUNs measured into a folder for others, from which `sweep report` makes the same tables anywhere.

    Its parts, its config, the evidence of what failed, and the report as a page, as Markdown and as SVG. Names of hosts
    and users, absolute paths, logs and artifacts stay here.

    Example: sweep publish results/full results/attention --out results/published/h200
    """
    from orchestrator.publishing import MB, publish

    done = publish(run_folders, out, round(limit_mb * MB), against)
    for sentence in done.left_out:
        click.echo(f"left out: {sentence}")
    click.echo(f"published {done.cells} cells, {done.size / MB:.1f} MB, in {out}: sweep report {out}")


def _whole_report(run: Any, results: Any, beside: tuple[Table, ...]) -> Any:
    """Loads what draws, which a table alone does not need."""
    from orchestrator.reporting import make_report

    return make_report(run, results, beside)


def _with_published(names: tuple[str, ...], beside: tuple[Table, ...]) -> tuple[str, ...]:
    """Who names tables and asks for published numbers wants those too, unless some of them are named."""
    published = tuple(table.name for table in beside)
    return names if not names or set(names) & set(published) else (*names, *published)


def _run_and_cell(text: str) -> tuple[Path, str]:
    """`RUN` or `RUN:CELL`. A run that is no folder here is looked for in `results`."""
    folder, _, cell = (text, "", "") if Path(text).exists() else text.partition(":")
    return (Path(folder) if Path(folder).exists() else Path("results") / folder), cell


def _fraction(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not found:
        raise ConfigError(f"--threshold {text}: is not a percentage", "Write 3% or 0.5%")
    return float(found[1]) / 100
