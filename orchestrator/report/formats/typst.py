"""Tables as figures of Typst."""

from __future__ import annotations

import json

from orchestrator.report.formats.fitting import fitting_view, heads, printable
from orchestrator.report.tables.table import RenderedTable
from orchestrator.report.tables.views import Kind

_STRING = json.JSONEncoder(ensure_ascii=False)


def to_typst(page: RenderedTable, max_rows: int | None = None) -> str:
    """Return a Typst `figure` with a caption, which may break across pages.

    Cells are strings, so that nothing in them is markup.
    """
    view = fitting_view(page, max_rows)
    caption = _STRING.encode(printable(f"{view.title}. {view.caption} {view.provenance}"))
    titles = ["\n".join(lines) for lines in heads(view)]
    is_text = [measure.kind is Kind.TEXT for measure in view.measures]
    alignments = ["left"] * len(view.keys) + ["left" if text else "right" for text in is_text]
    lines = [
        "#[",
        "#show figure: set block(breakable: true)",
        "#set text(size: 9pt)",
        "#figure(",
        f"  caption: {caption},",
        "  table(",
        f"    columns: {len(titles)}, stroke: none, inset: 4pt,",
        f"    align: ({', '.join(alignments)},),",
        f"    table.hline(), table.header({_row(titles)}), table.hline(),",
        *(f"    {_row([str(entry) for entry in row])}," for row in view.rows),
        "    table.hline(),",
        "  ),",
        f") <tab-{view.name}>",
        "]",
    ]
    if view.notes:
        lines.append(f"#enum({_row([*view.notes])})")
    return "\n".join(lines) + "\n"


def _row(texts: list[str]) -> str:
    encoded = [_STRING.encode("\n".join(map(printable, text.split("\n")))) for text in texts]
    return ", ".join(encoded)
