"""Tables as figures of Typst."""

from __future__ import annotations

import json
from collections.abc import Iterable

from orchestrator.report.formats.fitting import fitting_view, heads, printable
from orchestrator.report.tables.table import RenderedTable

_STRING = json.JSONEncoder(ensure_ascii=False)


def to_typst(page: RenderedTable, max_rows: int | None = None) -> str:
    """Return a Typst `figure` with a caption, which may break across pages.

    Cells are strings, so that nothing in them is markup.
    """
    view = fitting_view(page, max_rows)
    caption = _STRING.encode(printable(f"{page.table.title}. {view.caption} {page.provenance}"))
    titles = list(map("\n".join, heads(view)))
    comments = [f"// {printable(view.left_out)}"] if view.left_out else []
    lines = [
        *comments,
        "#[",
        "#show figure: set block(breakable: true)",
        "#set text(size: 9pt)",
        "#figure(",
        f"  caption: {caption},",
        "  table(",
        f"    columns: {len(titles)}, stroke: none, inset: 4pt,",
        f"    align: ({', '.join(view.sides)},),",
        f"    table.hline(), table.header({_row(titles)}), table.hline(),",
        *(f"    {_row(row)}," for row in view.rows),
        "    table.hline(),",
        "  ),",
        f") <tab-{page.table.name}>",
        "]",
    ]
    if page.grid.notes:
        lines.append(f"#enum({_row(page.grid.notes)})")
    return "\n".join(lines) + "\n"


def _row(values: Iterable[object]) -> str:
    return ", ".join(map(_encoded, map(str, values)))


def _encoded(text: str) -> str:
    return _STRING.encode("\n".join(map(printable, text.split("\n"))))
