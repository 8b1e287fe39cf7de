"""Rendered tables as files: Markdown, CSV, LaTeX and Typst, with the same digits in each."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from orchestrator.report.formats.latex import to_ascii_latex
from orchestrator.report.formats.markdown import MOST_ROWS, to_markdown, written_out
from orchestrator.report.tables.table import RenderedTable

_STRING = json.JSONEncoder(ensure_ascii=False)
# A control character that no text contains. It separates the texts of a row while they are escaped
# together, which is much faster than one call for each text.
_BETWEEN = "\x1f"
# Widths in LaTeX's article class: the text, and a digit with a small margin.
_TEXT_PT = 345
_LETTER_PT = 5.25
_BETWEEN_COLUMNS_PT = 12


def to_csv(page: RenderedTable) -> str:
    """Return a table as CSV, in the form that `written_out` describes.

    Values have the digits of the report; full precision is in cells.parquet.
    """
    text = io.StringIO()
    header, rows = written_out(page)
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def to_latex(page: RenderedTable) -> str:
    r"""Return a table with a caption for \input, in ASCII and no wider than the text.

    A table that fills more than a page is a longtable.
    """
    if len(page.rows) + len(page.notes) > MOST_ROWS:
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
    """Return a longtable whose texts are scaled one by one, because a scaled box cannot break
    across pages.
    """
    scale = _scale_to_fit(page)
    header, *rows = _latex_rows(page, r"\fit" if scale < 1 else "")
    smaller = [
        rf"\def\fit#1{{\scalebox{{{scale:.3f}}}{{#1}}}}",
        rf"\setlength{{\tabcolsep}}{{{scale * _BETWEEN_COLUMNS_PT / 2:.2f}pt}}",
        rf"\renewcommand{{\arraystretch}}{{{scale:.3f}}}",
    ]
    head = [r"\toprule", header, r"\midrule"]
    lines = [
        r"% needs \usepackage{booktabs,graphicx,longtable}",
        r"\begingroup",
        *(smaller if scale < 1 else []),
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
    """Return the factor that makes a table as wide as the text, estimated from its letters; at
    most 1.
    """
    letters = sum(max(map(len, texts)) for texts in zip(page.header, *page.rows, strict=True))
    return min(1.0, _TEXT_PT / (letters * _LETTER_PT + len(page.header) * _BETWEEN_COLUMNS_PT))


def _latex_rows(page: RenderedTable, around: str = "") -> list[str]:
    """Return header and rows. around: a command that wraps each text."""
    return [_latex_row(row, around) for row in (page.header, *page.rows)]


def _latex_caption(page: RenderedTable) -> str:
    caption = to_ascii_latex(_printable(f"{page.table.title}. {page.table.read} {page.provenance}"))
    return rf"\caption{{{caption}}}\label{{tab:{page.table.name}}}"


def _latex_notes(page: RenderedTable) -> list[str]:
    return [
        rf"\par\footnotesize {number}. {to_ascii_latex(_printable(note))}"
        for number, note in enumerate(page.notes, 1)
    ]


def to_typst(page: RenderedTable) -> str:
    """Return a Typst `figure` with a caption, which may break across pages.

    Cells are strings, so that nothing in them is markup.
    """
    lines = [
        "#[",
        "#show figure: set block(breakable: true)",
        "#figure(",
        f"  caption: {_typst(f'{page.table.title}. {page.table.read} {page.provenance}')},",
        "  table(",
        f"    columns: {len(page.header)}, align: right, stroke: none,",
        f"    table.hline(), table.header({_typst_row(page.header)}), table.hline(),",
        *(f"    {_typst_row(row)}," for row in page.rows),
        "    table.hline(),",
        "  ),",
        f") <tab-{page.table.name}>",
        "]",
        *([f"#enum({', '.join(map(_typst, page.notes))})"] if page.notes else []),
    ]
    return "\n".join(lines) + "\n"


def to_markdown_file(page: RenderedTable) -> str:
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


def _latex_row(texts: list[str], around: str = "") -> str:
    """Return a row. An empty group protects a leading `[` or `*`, which `\\\\` would read as its
    argument.
    """
    begin, end = (f"{around}{{", "}") if around else ("", "")
    escaped = to_ascii_latex(_BETWEEN.join(_printable_row(texts)))
    row = begin + escaped.replace(_BETWEEN, f"{end} & {begin}") + end
    protection = "{}" if row.startswith(("[", "*")) else ""
    return protection + row + r" \\"


def _typst(text: str) -> str:
    return _STRING.encode(_printable(text))


def _typst_row(texts: list[str]) -> str:
    return _STRING.encode(_printable_row(texts))[1:-1]  # a list of strings, without its brackets


def _printable(text: str) -> str:
    """Replace control characters, such as the colours of a message, which no compiler accepts."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _printable_row(texts: list[str]) -> list[str]:
    return texts if "".join(texts).isprintable() else [_printable(text) for text in texts]
