"""The report as one HTML file that works offline.

Texts from outside are escaped by Jinja, or are packed data that the script of the page inserts
as text. The policy of the page allows its script alone, by its digest: markup that slips through
runs nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from orchestrator.analysis.results import Results
from orchestrator.common.text import shell_command
from orchestrator.report.charts.registry import Figure
from orchestrator.report.charts.theme import DARK, LIGHT, variables
from orchestrator.report.findings.finding import Finding
from orchestrator.report.findings.registry import first_screen
from orchestrator.report.page.cell_data import cell_columns, packed, packed_json
from orchestrator.report.page.sections import sections
from orchestrator.report.tables.table import RenderedTable
from orchestrator.report.tables.views import TableView, view_of
from orchestrator.report.text.headline import counts_by_status, headline
from orchestrator.report.text.heat_map import heat_map
from orchestrator.report.text.provenance import labelled, measured_days, values_of

_PROGRAM = "transformer-sweep"
_DAY = "%d %b %Y"
_MOST_FINDINGS, _MOST_COMMANDS = 5, 8
_PHONE_COLUMNS = 4
# Axes that readers filter by, besides those that vary.
_FILTERS = ("run", "name", "precision", "compile", "attention", "pass", "status")
_LIBRARY = Path(__file__).parent / "vendor"


@dataclass(frozen=True)
class RenderedReport:
    """A report whose charts are drawn and whose tables are laid out.

    run_argument: names the run in commands of the page.
    """

    results: Results
    findings: Sequence[Finding]
    pages: Sequence[RenderedTable]
    figures: Sequence[Figure]
    run_argument: str


def to_html(
    report: RenderedReport,
    details: Iterable[dict[str, object]],
    copies: Mapping[str, Mapping[str, str]],
    missing: int = 0,
) -> Iterator[str]:
    """Yield the page in pieces, so that the details of all cells are never in memory together.

    copies: what the copy buttons of each table give, by the name of the format. missing: number of
    cells without a result.
    """
    results = report.results
    grid = heat_map(results)
    data = {
        "heat": grid.views if grid else None,
        "run": report.run_argument,
        **cell_columns(results),
    }
    found = sections(results, report.findings, report.figures, report.pages)
    environment = _environment()
    script = environment.get_template("page.js").render()
    return environment.get_template("index.html").generate(
        script=Markup(script),
        script_digest=_policy_digest(script),
        name=results.manifest.get("name", "run"),
        manifest=results.manifest,
        headline=headline(results),
        statuses=counts_by_status(results, missing),
        total=len(results.cells) + missing,
        versions=_versions(results.cells),
        dates=measured_days(results.cells, _DAY),
        findings=first_screen(report.findings, _MOST_FINDINGS),
        grid=grid,
        sections=found,
        links={section.question.name for section in found},
        filters=[name for name in _FILTERS if name in data["columns"] or name in data["axes"]],
        count=len(results.cells),
        run=report.run_argument,
        citation=_citation(results),
        commands=_commands(results),
        program=_PROGRAM,
        version=_version(results),
        light=Markup(variables(LIGHT)),
        dark=Markup(variables(DARK)),
        data=Markup(packed([json.dumps(data, separators=(",", ":"))])),
        library=Markup(_library()),
        copies=Markup(packed([json.dumps(copies)])),
        details=Markup(packed_json(details)) if len(results.cells) else "",
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("orchestrator.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "with_code": _with_code,
        "as_markup": Markup,
        "view_of": view_of,
        "columns_of": _columns_of,
    }
    return environment


def _policy_digest(script: str) -> str:
    """Return the digest by which a Content-Security-Policy allows a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _columns_of(view: TableView) -> list[dict[str, str]]:
    """Return title and style of each column. A phone hides the wide ones."""
    columns = [{"title": title, "style": "text"} for title in view.key_titles]
    order = sorted(range(len(view.measures)), key=lambda index: view.measures[index].priority)
    on_phones = order[: max(_PHONE_COLUMNS - len(columns), 1)]
    for index, measure in enumerate(view.measures):
        styles = ["text"] if measure.is_text else []
        styles += [] if index in on_phones else ["wide"]
        columns.append({"title": measure.title, "style": " ".join(styles)})
    return columns


@cache
def _library() -> str:
    """Return DataTables with its licence, packed."""
    licence = (_LIBRARY / "datatables.txt").read_text()
    return packed([f"/*\n{licence}*/\n", (_LIBRARY / "datatables.min.js").read_text()])


def _with_code(text: str) -> Markup:
    # Escaped first: the text may be a message from outside, and the tags below must stay.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _version(results: Results) -> str:
    """Return the version of the program that measured."""
    return str(results.manifest.get("program", "")).removeprefix(f"{_PROGRAM} ")


def _versions(cells: pd.DataFrame) -> list[str]:
    """Return the versions of torch and CUDA."""
    named = (("torch", values_of(cells, "torch")), ("CUDA", values_of(cells, "cuda")))
    return [f"{name} {', '.join(values)}" for name, values in named if 0 < len(values) <= 3]


def _commands(results: Results) -> list[str]:
    """Return the last commands that measured, to be copied into a shell."""
    invocations = results.manifest.get("invocations", [])
    commands = dict.fromkeys(shell_command(["sweep", *one["command"]]) for one in invocations)
    return list(commands)[-_MOST_COMMANDS:]


def _citation(results: Results) -> str:
    """Return the lines that cite this run."""
    cells = results.cells
    parts = [
        f"{_PROGRAM} {_version(results)}".strip() + f", run {results.manifest.get('name', 'run')}",
        ", ".join(values_of(cells, "gpu") or values_of(cells, "cpu")),
        *_versions(cells),
        labelled("driver", ", ".join(values_of(cells, "driver"))),
        labelled("commit", ", ".join(values_of(cells, "commit")[:4])),
        measured_days(cells, _DAY),
    ]
    return ",\n".join(filter(None, parts)) + "."
