"""Rendered tables as files: Markdown, CSV, LaTeX and Typst, all with the same digits."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace

from orchestrator.report.formats.latex import to_ascii_latex
from orchestrator.report.formats.markdown import MAX_ROWS, table_for_programs, to_markdown
from orchestrator.report.tables.table import RenderedTable

_STRING = json.JSONEncoder(ensure_ascii=False)
# A control character that no text contains. It separates the texts of a row, which are escaped
# together: that is much faster than one call for each text.
_SEPARATOR = "\x1f"
# The first letters of a formula, also after a tab or a carriage return, which spreadsheets skip.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "'")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d+)?([eE][+-]?\d+)?%?|inf)")
# Widths in LaTeX's article class: of the text, of a digit with a small margin, between columns.
_TEXT_PT = 345
_LETTER_PT = 5.25
_BETWEEN_COLUMNS_PT = 12


def to_csv(page: RenderedTable) -> str:
    """Return a table as CSV, in the form of `table_for_programs`.

    Values have the digits of the report; full precision is in cells.parquet. An apostrophe precedes
    a text that a spreadsheet would execute as a formula.
    """
    lines: list[str] = []
    header, rows = table_for_programs(page)
    # The writer quotes only those line breaks that occur in its own line ends.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerows(list(map(_without_formula, row)) for row in [header, *rows])
    return "".join([line.removesuffix("\r\n") + "\n" for line in lines])


def _without_formula(text: str) -> str:
    # An apostrophe is escaped too, so that removing one at the beginning restores every text.
    is_risky = text.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_risky else text


def to_latex(page: RenderedTable) -> str:
    r"""Return a table with a caption for \input, in ASCII and no wider than the text.

    A table that fills more than a page is a longtable.
    """
    if len(page.rows) + len(page.notes) > MAX_ROWS:
        return _latex_longtable(page)
    return _latex_table(page)


def _latex_table(page: RenderedTable) -> str:
    header, *rows = _latex_rows(page)
    lines = [
        r"% needs \usepackage{booktabs,graphicx}",
        r"\begin{table}",
        r"\centering",
        r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{'r' * len(page.header)}}}",
        r"\toprule",
        header,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}}",
        _latex_caption(page),
        *_latex_notes(page),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_longtable(page: RenderedTable) -> str:
    scale = _scale_to_fit(page)
    command, smaller = "", []
    if scale < 1:
        # A scaled box cannot break across pages, so each text is scaled by itself.
        command = r"\fit"
        smaller = [
            rf"\def\fit#1{{\scalebox{{{scale:.3f}}}{{#1}}}}",
            rf"\setlength{{\tabcolsep}}{{{scale * _BETWEEN_COLUMNS_PT / 2:.2f}pt}}",
            rf"\renewcommand{{\arraystretch}}{{{scale:.3f}}}",
        ]
    header, *rows = _latex_rows(page, command)
    head = [r"\toprule", header, r"\midrule"]
    lines = [
        r"% needs \usepackage{booktabs,graphicx,longtable}",
        r"\begingroup",
        *smaller,
        r"\setlength{\LTcapwidth}{\textwidth}",
        rf"\begin{{longtable}}{{{'r' * len(page.header)}}}",
        rf"{_latex_caption(page)}\\",
        *head,
        r"\endfirsthead",
        *head,
        r"\endhead",
        r"\bottomrule",
        r"\endfoot",
        *rows,
        r"\end{longtable}",
        *_latex_notes(page),
        r"\endgroup",
    ]
    return "\n".join(lines) + "\n"


def _scale_to_fit(page: RenderedTable) -> float:
    """Return the factor, at most 1, that makes a table no wider than the text, by its letters."""
    letters = 0
    for texts in zip(page.header, *page.rows, strict=True):
        letters += max(map(len, texts))
    return min(1.0, _TEXT_PT / (letters * _LETTER_PT + len(page.header) * _BETWEEN_COLUMNS_PT))


def _latex_caption(page: RenderedTable) -> str:
    caption = to_ascii_latex(_printable(_caption(page)))
    return rf"\caption{{{caption}}}\label{{tab:{page.table.name}}}"


def _latex_notes(page: RenderedTable) -> list[str]:
    notes = []
    for number, note in enumerate(page.notes, 1):
        notes.append(rf"\par\footnotesize {number}. {to_ascii_latex(_printable(note))}")
    return notes


def to_typst(page: RenderedTable) -> str:
    """Return a Typst `figure` with a caption, which may break across pages.

    Cells are strings, so that nothing in them is markup.
    """
    caption = _STRING.encode(_printable(_caption(page)))
    lines = [
        "#[",
        "#show figure: set block(breakable: true)",
        "#figure(",
        f"  caption: {caption},",
        "  table(",
        f"    columns: {len(page.header)}, align: right, stroke: none,",
        f"    table.hline(), table.header({_typst_row(page.header)}), table.hline(),",
        *(f"    {_typst_row(row)}," for row in page.rows),
        "    table.hline(),",
        "  ),",
        f") <tab-{page.table.name}>",
        "]",
    ]
    if page.notes:
        lines.append(f"#enum({_typst_row([*page.notes])})")
    return "\n".join(lines) + "\n"


def _caption(page: RenderedTable) -> str:
    return f"{page.table.title}. {page.table.read} {page.provenance}"


def to_markdown_file(page: RenderedTable) -> str:
    """Return a table as Markdown for a file, without padding."""
    return without_tags(to_markdown(page, aligned=False))


def without_tags(text: str) -> str:
    """Escape `<` for renderers of Markdown, which would drop `Functor<float>` as an unknown tag."""
    return text.replace("<", r"\<")


FORMATS: Mapping[str, Callable[[RenderedTable], str]] = {
    "md": to_markdown_file,
    "csv": to_csv,
    "tex": to_latex,
    "typ": to_typst,
}


def files_of(
    pages: Iterable[RenderedTable], formats: Collection[str] = tuple(FORMATS)
) -> Iterator[tuple[str, str]]:
    """Yield file name and content of each table in each format, one at a time."""
    for page in pages:
        for suffix in formats:
            yield f"{page.table.name}.{suffix}", FORMATS[suffix](page)


def _latex_rows(page: RenderedTable, command: str = "") -> list[str]:
    """Return header and rows. command: is applied to each text."""
    begin, end = "", ""
    if command:
        begin, end = f"{command}{{", "}"
    rows = []
    for texts in (page.header, *page.rows):
        escaped = to_ascii_latex(_SEPARATOR.join(_printable_row(texts)))
        row = begin + escaped.replace(_SEPARATOR, f"{end} & {begin}") + end
        if row.startswith(("[", "*")):
            row = "{}" + row  # the `\\` of the row before would read it as its argument
        rows.append(row + r" \\")
    return rows


def _typst_row(texts: list[str]) -> str:
    return _STRING.encode(_printable_row(texts))[1:-1]  # a list of strings, without its brackets


def _printable(text: str) -> str:
    """Replace control characters, such as the colours of a message, which no compiler accepts."""
    if text.isprintable():
        return text
    return "".join([letter if letter.isprintable() else " " for letter in text])


def _printable_row(texts: list[str]) -> list[str]:
    # The fast path: almost no row has control characters.
    return texts if "".join(texts).isprintable() else list(map(_printable, texts))
