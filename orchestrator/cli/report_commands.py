"""The commands that turn what was measured into something to read: `report`, `compare`, `import-nsys`, `publish`.

Each opens what it needs, calls the function of its name, prints. What it needs is imported inside it, as in cli.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from orchestrator.common.errors import EXIT_FAILURES, ConfigError
from orchestrator.store.remote.address import Folder, RunPlace, Where, is_address, named, split_cell

if TYPE_CHECKING:
    from orchestrator.report.tables.table import Table


class PublishedDevice(click.ParamType[str]):
    """A device that numbers were published of. They are read where they are asked for, so that `--help` is there at once."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from orchestrator.report.references.devices import find_device

        return find_device(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._words())}]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words() if word.startswith(incomplete)]

    def _words(self) -> list[str]:
        from orchestrator.report.references.devices import ALL, devices

        return [*devices(), ALL]


class Percentage(click.ParamType[float]):
    """Written as `3%`, given as 0.03."""

    name = "percentage"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(value).strip())
        if not found or float(found[1]) > 100:
            raise ConfigError(
                f"--{_option(param, self.name)} {value}: is not a percentage", "Write 3% or 0.5%"
            )
        return float(found[1]) / 100


class Megabytes(click.ParamType[float]):
    """In 10⁶ bytes: finite and not negative, which click's own range takes `nan` for."""

    name = "megabytes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            size = float(value)
        except ValueError:
            size = math.nan
        if not 0 <= size < math.inf:
            raise ConfigError(
                f"--{_option(param, self.name)} {value}: is not a size in megabytes",
                "Write 25 or 0.5",
            )
        return size


def _option(param: click.Parameter | None, name: str) -> str:
    """As it is typed."""
    return ((param and param.name) or name).replace("_", "-")


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=RunPlace())
@click.option("--table", "tables", multiple=True, help="Only this table; may be repeated.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["md", "csv", "tex", "typ"]),
    default="md",
    help="What is printed.  [md]",
)
@click.option(
    "--cells",
    metavar="A,B",
    help="Only these cells, by the beginnings of their ids; the files stay as they are.",
)
@click.option(
    "--where",
    "wheres",
    multiple=True,
    metavar="AXIS=A,AXIS=B|C",
    help="Only the cells that match, as of `sweep run`; as with --cells.",
)
@click.option(
    "--against",
    type=PublishedDevice(),
    help="Also what others published of the same cells on this device.",
)
def report(
    run_folders: tuple[Where, ...],
    tables: tuple[str, ...],
    form: str,
    cells: str | None,
    wheres: tuple[str, ...],
    against: str | None,
) -> None:
    """Print what the cells of RUN say, in words and in tables, and write it to RUN/report, as Markdown, CSV, LaTeX and Typst.

    Without --table, no more than some sentences and the first rows of each are printed as Markdown; in the files are all.

    Without --table, --cells or --where, also as one page with charts, RUN/report/index.html, and the charts as SVG and PNG.

    With --against, each published number stands beside the cells that it may be of, with the ratio and what is doubtful of it.

    Several runs stand in the same tables, told apart by their names; what is written is in a folder within the first.

    Where it cannot be written, the tables are printed all the same, and the exit code is 2.

    Example: sweep report results/demo --table timings
    """
    from orchestrator.analysis.results import choose_cells, choose_where, load_results
    from orchestrator.common.text import so_many
    from orchestrator.config.selection import parse_selection
    from orchestrator.report.formats.files import FORMATS, files_of
    from orchestrator.report.formats.markdown import first_rows, lay_out, to_markdown
    from orchestrator.report.references.tables import nothing_in_common, published_tables
    from orchestrator.report.tables.registry import TABLES
    from orchestrator.store.run_collection import open_runs, published_against

    run, conditions = open_runs(run_folders), parse_selection((), wheres).where
    results = load_results(run)
    beside = published_tables(against or published_against(run))
    some = cells is not None or bool(conditions)
    whole = _whole_report(run, results, beside) if not tables and not some else None
    chosen = results if cells is None else choose_cells(results, _named_cells(cells))
    chosen = choose_where(chosen, conditions) if conditions else chosen
    pages = (
        whole.pages
        if whole
        else lay_out(chosen, _with_published(tables, beside if against else ()), (*TABLES, *beside))
    )
    if form == "md" and whole and whole.words:
        click.echo(whole.first_words)
    for page in pages:
        if form != "md":
            click.echo(FORMATS[form](page))
        elif tables:
            click.echo(to_markdown(page))
        else:
            device = against if page.table in beside else None
            click.echo(
                first_rows(page, _command_for(page.table.name, run_folders, cells, wheres, device))
            )
    if against is not None and len(results.cells) and not lay_out(chosen, (), beside):
        click.echo(nothing_in_common(against), err=True)
    elif not pages:
        click.echo(
            "nothing measured yet"
            if results.cells.empty or not tables
            else f"no cell of these is for {', '.join(tables)}"
        )
    if missing := 0 if some else run.missing():
        of_each = (
            ", ".join(f"{count} of {name}" for name, count in run.unmeasured().items())
            if run.is_published
            else ""
        )
        pending = (
            f"{missing} cells that were asked for are still to be measured: sweep status says which"
        )
        click.echo(f"not measured: {of_each}" if of_each else pending, err=True)
    if results.bare:
        click.echo(
            f"of {so_many(results.bare)} that ended well no sample is here: copy the run again, or measure them with --retry ok",
            err=True,
        )
    if some:
        return
    run.write_report(whole.files() if whole else files_of(pages))
    if whole:
        click.echo(f"as one page: {run.folder / 'report' / whole.page}", err=True)


@click.command("import-nsys")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out", type=RunPlace(), help="The run to add it to, or a new folder.  [results/FILE]"
)
def import_nsys(file: Path, out: Where | None) -> None:
    """Add the kernels of FILE, which Nsight Systems wrote (.sqlite or .nsys-rep), to a run, and print their tables.

    Example: sweep import-nsys report1.sqlite --out results/imported
    """
    from orchestrator.analysis.results import choose_cells, load_results
    from orchestrator.report.formats.markdown import lay_out, to_markdown
    from orchestrator.store.remote.remote_run import open_run
    from orchestrator.sweep.nsys_import import import_nsys

    run = open_run(out or Path("results") / file.stem)
    cell = import_nsys(file, run)
    for page in lay_out(choose_cells(load_results(run), [cell])):
        click.echo(to_markdown(page))
    click.echo(f"kept in {run} as cell {cell}")


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option(
    "--fail-on",
    type=click.Choice(["slower", "faster", "ambiguous"]),
    multiple=True,
    help="Exit code 1 if a cell is.",
)
@click.option(
    "--threshold",
    default="0%",
    type=Percentage(),
    help="With --fail-on: only for differences beyond it, such as 3%.  [0%]",
)
@click.option(
    "--machines",
    "folders",
    metavar="RUN",
    multiple=True,
    type=RunPlace(),
    help="Also how many are as near as this run, or all of a publication, and A are to each other; may be repeated.",
)
def compare(
    before: str, after: str, fail_on: tuple[str, ...], threshold: float, folders: tuple[Where, ...]
) -> None:
    """Is B faster than A, or is it noise? Each is a run, or one cell of it, as RUN:CELL.

    Measure with --repeat: what repetitions of a cell differ in is the noise that a difference must exceed.

    With --machines, also whether B may be A on another machine of its kind, as runs of the same cells on several differ.
    Where B is among them, without it. Where A and B are one run, or share a GPU, they tell nothing of that.

    Example: sweep compare results/demo results/other
    """
    from orchestrator.analysis.comparison import compare as held_against
    from orchestrator.report.formats.markdown import describe_comparison
    from orchestrator.store.remote.remote_run import open_run
    from orchestrator.store.run_collection import named_runs

    (first, one), (second, other) = _run_and_cell(before), _run_and_cell(after)
    if bool(one) != bool(other):
        raise ConfigError(
            f"{before} and {after}: one is a run and the other a cell",
            "Name two runs, or two cells as RUN:CELL",
        )
    a, b = open_run(first), open_run(second)
    named = named_runs(folders).values() if folders else ()
    others = [
        run for run in named if run.folder.resolve() not in (a.folder.resolve(), b.folder.resolve())
    ]
    report = held_against(a, b, (one, other) if one else None, others=others)
    for line in describe_comparison(report):
        click.echo(line)
    if folders and report.of_one_machine:
        click.echo(
            "--machines tells nothing of another machine: A and B were measured on the same one"
        )
    elif folders and not report.machines:
        click.echo(
            "--machines: those runs and A have too few cells in common, on other machines than B's, to tell what these differ by"
        )
    bad = [
        one
        for one in report.comparisons
        if one.verdict.lower() in fail_on and abs(one.ratio - 1) > threshold
    ]
    sys.exit(EXIT_FAILURES if bad else 0)


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=RunPlace())
@click.option(
    "--out", required=True, type=Folder(), help="Where to; what was published there is replaced."
)
@click.option(
    "--limit-mb", type=Megabytes(), default=25, help="How large it may be, in 10⁶ bytes.  [25]"
)
@click.option(
    "--against",
    type=PublishedDevice(),
    default="all",
    help="Whose numbers stand beside its own.  [all]",
)
def publish(run_folders: tuple[Where, ...], out: Path, limit_mb: float, against: str) -> None:
    """Put what one or more RUNs measured into a folder for others, from which `sweep report` makes the same tables anywhere.

    Its parts, its config, the evidence of what failed, and the report as a page, as Markdown and as SVG. Names of hosts
    and users, absolute paths, logs and artifacts stay here.

    Example: sweep publish results/full results/attention --out results/published/h200
    """
    from orchestrator.report.export.export import MB, publish

    done = publish(run_folders, out, round(limit_mb * MB), against)
    for sentence in done.left_out:
        click.echo(f"left out: {sentence}")
    click.echo(
        f"published {done.cells} cells, {done.size / MB:.1f} MB, in {out}: sweep report {shlex.quote(str(out))}"
    )


def _whole_report(run: Any, results: Any, beside: tuple[Table, ...]) -> Any:
    """Loads what draws, which a table alone does not need."""
    from orchestrator.report.build import make_report

    return make_report(run, results, beside)


def _named_cells(text: str) -> list[str]:
    """Raises ConfigError where it names none: every id begins with nothing."""
    found = [name for part in text.split(",") if (name := part.strip())]
    if not found:
        raise ConfigError(
            f"--cells {text!r}: names no cell",
            "Write the beginnings of their ids: --cells 3f2a,91c",
        )
    return found


def _with_published(names: tuple[str, ...], beside: tuple[Table, ...]) -> tuple[str, ...]:
    """Who names tables and asks for published numbers wants those too, unless some of them are named."""
    published = tuple(table.name for table in beside)
    return names if not names or set(names) & set(published) else (*names, *published)


def _command_for(
    table: str,
    run_folders: tuple[Where, ...],
    cells: str | None,
    wheres: tuple[str, ...],
    against: str | None,
) -> str:
    """What prints that table alone, of the same cells."""
    some = [
        *(["--cells", cells] if cells else []),
        *(word for where in wheres for word in ("--where", where)),
    ]
    options = [*some, *(["--against", against] if against else [])]
    return shlex.join(["sweep", "report", *map(str, run_folders), *options, "--table", table])


def _run_and_cell(text: str) -> tuple[Where, str]:
    """`RUN` or `RUN:CELL`. A run that is no folder here is looked for in `results`. Names of folders may have colons."""
    if is_address(text):
        return split_cell(text)
    folder, cell = text.rsplit(":", 1) if ":" in text else (text, "")
    for run, of_it in ((text, ""), (folder, cell)):
        for path in (Path(named(run, "RUN")), Path("results") / run):
            if path.exists():
                return path, of_it
    return Path(folder), cell
