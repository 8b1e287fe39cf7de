"""The same tables for wherever they are handed in: Markdown, CSV, LaTeX, Typst. Each says the same to the printed digit."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from tabulate import LATEX_ESCAPE_RULES

from orchestrator.report.render import Page, to_markdown, written_out

_STRING = json.JSONEncoder(ensure_ascii=False)
_BETWEEN = "\x1f"  # stands between the texts of a row, and in none of them, while they are escaped as one
_MARKUP_OF_LATEX = re.compile(f"[{re.escape(''.join(LATEX_ESCAPE_RULES))}]")


def to_csv(page: Page) -> str:
    """The header and the rows as they are printed elsewhere, notes in full; full precision is in cells.parquet."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([page.header, *written_out(page)])
    return text.getvalue()


def to_latex(page: Page) -> str:
    r"""A `table` with a caption, to be \input; needs \usepackage{booktabs}."""
    header, *rows = [_latex_row(row) for row in (page.header, *page.rows)]
    body = "\n".join(
        [
            rf"\begin{{tabular}}{{{'r' * len(page.header)}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )
    caption = _latex(f"{page.table.title}. {page.table.read} {page.provenance}")
    notes = "".join(rf"\par\footnotesize {number}. {_latex(note)}" + "\n" for number, note in enumerate(page.notes, 1))
    end = f"\\caption{{{caption}}}\n\\label{{tab:{page.table.name}}}\n{notes}\\end{{table}}\n"
    return f"\\begin{{table}}\n\\centering\n{body}\n{end}"


def to_typst(page: Page) -> str:
    """A `figure` with a caption, to be included. Cells are strings: nothing in them is markup."""
    lines = [
        "#figure(",
        f"  caption: {_typst(f'{page.table.title}. {page.table.read} {page.provenance}')},",
        "  table(",
        f"    columns: {len(page.header)}, align: right, stroke: none,",
        f"    table.hline(), table.header({_typst_row(page.header)}), table.hline(),",
        *(f"    {_typst_row(row)}," for row in page.rows),
        "    table.hline(),",
        "  ),",
        f") <tab-{page.table.name}>",
        *([f"#enum({', '.join(map(_typst, page.notes))})"] if page.notes else []),
    ]
    return "\n".join(lines) + "\n"


FORMATS: Mapping[str, Callable[[Page], str]] = {"md": to_markdown, "csv": to_csv, "tex": to_latex, "typ": to_typst}


def files_of(pages: Iterable[Page], formats: Collection[str] = tuple(FORMATS)) -> Iterator[tuple[str, str]]:
    """Every page in each of the formats, after the name of its file; each made when it is asked for."""
    return ((f"{page.table.name}.{suffix}", FORMATS[suffix](page)) for page in pages for suffix in formats)


def _latex(text: str) -> str:
    return _escaped_for_latex(_printable(text))


def _latex_row(texts: list[str]) -> str:
    return _escaped_for_latex(_BETWEEN.join(_printable_row(texts))).replace(_BETWEEN, " & ") + r" \\"


def _escaped_for_latex(text: str) -> str:
    return _MARKUP_OF_LATEX.sub(lambda found: LATEX_ESCAPE_RULES[found[0]], text)


def _typst(text: str) -> str:
    return _STRING.encode(_printable(text))


def _typst_row(texts: list[str]) -> str:
    return ", ".join(map(_STRING.encode, _printable_row(texts)))


def _printable(text: str) -> str:
    """Without control characters, such as colours in a message, which no compiler takes."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


def _printable_row(texts: list[str]) -> list[str]:
    return texts if "".join(texts).isprintable() else [_printable(text) for text in texts]
