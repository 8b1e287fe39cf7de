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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from orchestrator.analysis.axes import RUN
from orchestrator.analysis.cpu_bound import is_true
from orchestrator.analysis.results import Results
from orchestrator.common.text import shell_command, without_options
from orchestrator.report.charts.memory_timeline import role_colours
from orchestrator.report.charts.registry import Figure
from orchestrator.report.charts.theme import DARK, LIGHT, variables
from orchestrator.report.findings.finding import Finding
from orchestrator.report.findings.registry import first_screen
from orchestrator.report.page.cell_data import cell_columns, packed, packed_json
from orchestrator.report.page.sections import sections
from orchestrator.report.tables.table import RenderedTable
from orchestrator.report.tables.views import view_of
from orchestrator.report.text import provenance
from orchestrator.report.text.cell_names import NAME, axis_title, setting_text
from orchestrator.report.text.heat_map import heat_map

_PROGRAM = "transformer-sweep"
_DAY = "%d %b %Y"
_TABLE = "timings"  # which students hand in
_MOST_FINDINGS, _MOST_COMMANDS, _OPEN_COMMANDS = 5, 8, 3
# Pixels for a table by the style of the columns that a narrower screen hides: of a phone, and of a
# tablet with the same letters. Then those of a letter, and of the space around a column.
_ROOM = {"wide": 358.0, "wider": 660.0}
_LETTER, _SPACE = 8.6, 8
_BREAKABLE = 16  # letters of a text from which on the page breaks words; see `long` in the template
# Columns of all cells if they vary, before other axes that do.
_FIRST = (
    "run", "what", "name", "context_length", "precision", "compile", "attention", "batch_size",
)  # fmt: skip
_AXES = {"name": NAME, "context_length": "context"}
_COVERED = ("seed", "model", "size", "d_head", "pass")  # by the columns of the model and `what`
_MOST_AXES = 8  # columns of all cells besides two measures; one more holds the values of other axes
_MODEL = {"size", "model", "d_head"}
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
    data |= {"roles": role_colours(results.live()), **_columns_of_cells(data)}
    found = sections(results, report.findings, report.figures, report.pages)
    invocations = results.manifest.get("invocations", [])
    # Without their time limits, commands that continued another are the same.
    words = [without_options(one["command"], {"--time-limit": True}) for one in invocations]
    commands = list(dict.fromkeys(shell_command(["sweep", *one]) for one in words))
    names = [page.table.name for section in found for page in section.tables]
    first = first_screen(report.findings, _MOST_FINDINGS)
    version = str(results.manifest.get("program", "")).removeprefix(f"{_PROGRAM} ")
    environment = _environment()
    script = environment.get_template("page.js").render()
    return environment.get_template("index.html").generate(
        script=Markup(script),
        # By it, the Content-Security-Policy of the page allows the script.
        script_digest=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        name=results.manifest.get("name", "run"),
        manifest=results.manifest,
        headline=provenance.headline(results),
        statuses=provenance.counts_by_status(results, missing),
        total=len(results.cells) + missing,
        versions=_versions(results.cells),
        dates=provenance.measured_days(results.cells, _DAY),
        findings=first,
        grid=grid,
        sections=found,
        links={section.question.name for section in found},
        filters=[name for name, _ in data["shown"] if name != "what"] + ["status"],
        count=len(results.cells),
        same=data["same"],
        run=report.run_argument,
        # The table that the commands print as examples.
        hand_in=_TABLE if _TABLE in names or not names else names[0],
        has_cpu_bound=is_true(results.cells, "cpu_bound").any(),
        marks=_marks(first),
        citation=_citation(results, version),
        commands=commands[-_OPEN_COMMANDS:],
        earlier_commands=commands[-_MOST_COMMANDS:-_OPEN_COMMANDS],
        program=_PROGRAM,
        version=version,
        light=Markup(variables(LIGHT)),
        dark=Markup(variables(DARK)),
        data=Markup(packed([json.dumps(data, separators=(",", ":"))])),
        library=Markup(_library()),
        copies=Markup(packed([json.dumps(copies)])),
        details=Markup(packed_json(details)) if len(results.cells) else "",
    )


def _marks(findings: Sequence[Finding]) -> list[str]:
    """Return what the marks mean that occur in findings."""
    spreads = [finding.interval for finding in findings]
    intervals = [text for text in spreads if "[" in text]
    numbers = "".join(finding.marked_number for finding in findings)
    marks = (
        ("[a, b]: 95% interval", any("%" not in text for text in intervals)),
        ("[a, b] (75%): interval at that level", any("%" in text for text in intervals)),
        ("a to b: smallest and largest", any(" to " in text for text in spreads)),
        ("~: may be chance", "~" in numbers),
        ("†: CPU-bound", "†" in numbers),
    )
    return [text for text, occurs in marks if occurs]


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
        "in_sentence": _in_sentence,
    }
    return environment


def _columns_of_cells(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the table of all cells: those that vary, and what all cells share.

    more: name, title and usual value of the axes whose other values share the last column.
    """
    known = {**cells["columns"], **cells["axes"]}
    indices = {name: column.get("i", column.get("v")) for name, column in known.items()}
    varying = {name for name, values in indices.items() if len(set(values)) > 1} | {"name"}
    # The name of a cell without a model is its task already.
    if "pass" in varying or ("task" in varying and set(cells["axes"]) & _MODEL):
        varying.add("what")
    names = [name for name in dict.fromkeys((*_FIRST, *cells["axes"])) if name not in _COVERED]
    shown = [(name, axis_title(_AXES.get(name, name))) for name in names if name in varying]
    more = []
    for name, title in shown[_MOST_AXES:]:
        # Most cells may have no value, which differs from each value that others have.
        ((usual, _),) = Counter(indices[name]).most_common(1)
        more.append((name, title, None if usual in (-1, None) else known[name]["w"][usual]))
    same = []
    for name in ("pass", *_FIRST):
        first = next(iter(indices.get(name, ())), -1)
        if name not in (*varying, RUN) and first != -1:
            word = known[name]["w"][first] if "w" in known[name] else first
            same.append(setting_text(name, word))
    return {"shown": shown[:_MOST_AXES], "more": more, "same": ", ".join(same)}


def _columns_of(view: RenderedTable) -> list[dict[str, str]]:
    """Return title and style of each column; narrow screens hide those without room."""
    grid = view.grid
    widths, columns = [], []
    for title, column in zip(view.titles, grid.columns, strict=True):
        whole = [entry for entry in column.entries if len(entry.text) <= _BREAKABLE]
        texts = [title, *(f"{entry.text}† {entry.spread}" for entry in whole)]
        widths.append(_LETTER * max(map(len, " ".join(texts).split())) + _SPACE)
        columns.append({"title": title, "style": "text" * column.is_text})
    groups = [measure.group for measure in grid.measures]
    # Of the compared values the last one matters most, then the baseline, which is the first.
    ranks = {group: rank for rank, group in enumerate(dict.fromkeys([*groups[-1:], *groups]))}
    keys = len(grid.keys)
    by_priority = sorted(
        (one.priority, ranks[one.group], n) for n, one in enumerate(grid.measures, keys)
    )
    for style, room in _ROOM.items():
        room -= sum(widths[:keys])
        for _, _, index in by_priority:
            room -= widths[index]
            if room < 0 and index != by_priority[0][-1]:
                columns[index]["style"] = f"{columns[index]['style']} {style}".strip()
    return columns


@cache
def _library() -> str:
    """Return DataTables with its licence, packed."""
    licence = (_LIBRARY / "datatables.txt").read_text()
    return packed([f"/*\n{licence}*/\n", (_LIBRARY / "datatables.min.js").read_text()])


def _in_sentence(title: str) -> str:
    """Return a title with a small first letter, unless it begins with an abbreviation."""
    return title if title[1:2].isupper() else f"{title[0].lower()}{title[1:]}"


def _with_code(text: str) -> Markup:
    # Escaped first: the text may be a message from outside, and the tags below must stay.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _versions(cells: pd.DataFrame) -> list[str]:
    """Return the versions of torch and CUDA."""
    named = {name: provenance.values_of(cells, name.lower()) for name in ("torch", "CUDA")}
    return [f"{name} {', '.join(values)}" for name, values in named.items() if 0 < len(values) <= 3]


def _citation(results: Results, version: str) -> str:
    """Return the lines that cite this run. version: of the program that measured."""
    cells = results.cells
    parts = [
        f"{_PROGRAM} {version}".strip() + f", run {results.manifest.get('name', 'run')}",
        ", ".join(provenance.values_of(cells, "gpu") or provenance.values_of(cells, "cpu")),
        *_versions(cells),
        provenance.labelled("driver", ", ".join(provenance.values_of(cells, "driver"))),
        provenance.labelled("commit", ", ".join(provenance.values_of(cells, "commit")[:4])),
        provenance.measured_days(cells, _DAY),
    ]
    return ",\n".join(filter(None, parts)) + "."
