"""Tables as LaTeX in ASCII: pdflatex stops at letters that its fonts lack."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from operator import itemgetter

from orchestrator.report.tables.table import Entry, RenderedTable
from orchestrator.report.tables.views import BETWEEN_COLUMNS_PT, fitting_view, heads, printable
from orchestrator.report.text.numbers import NOISE_MARK

_NUMBER = re.compile(r"[+-]?[\d,]+(\.\d+)?")
_PAGE_ROWS = 40  # rows of a table that fills a page
_LINE_BREAK = r" \\ "
_UNKNOWN = "?"  # stands for letters that no font of pdflatex has, such as Chinese
_MATHEMATICS = {
    "≈": r"\approx", "×": r"\times", "±": r"\pm", "≤": r"\leq", "≥": r"\geq", "≠": r"\neq",
    "−": "-", "·": r"\cdot", "⋅": r"\cdot", "→": r"\rightarrow", "←": r"\leftarrow",
    "↔": r"\leftrightarrow", "↑": r"\uparrow", "↓": r"\downarrow", "⇒": r"\Rightarrow",
    "√": r"\surd", "✓": r"\surd", "✗": r"\times", "∞": r"\infty", "∑": r"\sum", "∏": r"\prod",
    "∂": r"\partial", "∇": r"\nabla", "∈": r"\in", "∝": r"\propto", "÷": r"\div", "∼": r"\sim",
    "≡": r"\equiv", "≪": r"\ll", "≫": r"\gg", "⊕": r"\oplus", "⊗": r"\otimes", "°": r"^\circ",
    "¬": r"\neg", "Δ": r"\Delta", "∆": r"\Delta", "Σ": r"\Sigma", "Ω": r"\Omega", "Γ": r"\Gamma",
    "Θ": r"\Theta", "Λ": r"\Lambda", "Ξ": r"\Xi", "Π": r"\Pi", "Φ": r"\Phi", "Ψ": r"\Psi",
    "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "ε": r"\varepsilon",
    "ζ": r"\zeta", "η": r"\eta", "θ": r"\theta", "ι": r"\iota", "κ": r"\kappa", "λ": r"\lambda",
    "μ": r"\mu", "ν": r"\nu", "ξ": r"\xi", "π": r"\pi", "ρ": r"\rho", "σ": r"\sigma", "τ": r"\tau",
    "υ": r"\upsilon", "φ": r"\varphi", "χ": r"\chi", "ψ": r"\psi", "ω": r"\omega", "|": "|",
    "⁻": "^-", "⁺": "^+", "†": r"\dagger",
    "⁰": "^0", "¹": "^1", "²": "^2", "³": "^3", "⁴": "^4", "⁵": "^5", "⁶": "^6", "⁷": "^7",
    "⁸": "^8", "⁹": "^9", "₀": "_0", "₁": "_1", "₂": "_2", "₃": "_3", "₄": "_4", "₅": "_5",
    "₆": "_6", "₇": "_7", "₈": "_8", "₉": "_9",
}  # fmt: skip
_TEXT = {
    "–": r"\textendash{}", "—": r"\textemdash{}", "…": r"\ldots{}", "•": r"\textbullet{}", "‘": "`",
    "’": "'", "“": "``", "”": "''", "„": '"', "«": '"', "»": '"', "‐": "-", "‑": "-", "⁄": "/",
    "ß": r"\ss{}", "ø": r"\o{}", "Ø": r"\O{}", "æ": r"\ae{}", "Æ": r"\AE{}", "œ": r"\oe{}",
    "Œ": r"\OE{}", "ł": r"\l{}", "Ł": r"\L{}", "ı": r"\i{}", "§": r"\S{}", "¶": r"\P{}",
    "©": r"\copyright{}", "£": r"\pounds{}", "-": "{-}", "`": r"\`{}", "ο": "o",
}  # fmt: skip
_ACCENTS = {
    "\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u",
    "\u0307": ".", "\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0323": "d",
    "\u0327": "c",
}  # fmt: skip
_MARKUP = {
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "^": r"\^{}", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "\\": r"\textbackslash{}", "<": r"\ensuremath{<}",
    ">": r"\ensuremath{>}",
}  # fmt: skip
_COMMANDS = (
    _MARKUP
    | _TEXT
    | {letter: rf"\ensuremath{{{command}}}" for letter, command in _MATHEMATICS.items()}
)
# Includes the second of two hyphens, which LaTeX would print as a dash.
_TO_REPLACE = re.compile(rf"(?<=-)-|[`|{re.escape(''.join(_MARKUP))}]|[^\x00-\x7f]")


def to_ascii_latex(text: str) -> str:
    """Return LaTeX in ASCII that prints the text; nothing in the text is treated as markup."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return _TO_REPLACE.sub(lambda found: _command(found[0]), text)


@cache
def _command(letter: str) -> str:
    if letter in _COMMANDS:
        return _COMMANDS[letter]
    base, *marks = list(unicodedata.normalize("NFKD", letter))
    if base == letter:
        # A Latin letter with a mark was handled: only ASCII is left that needs no command.
        return base if base.isascii() else _UNKNOWN
    command = _command(base)
    if _ACCENTS.keys() >= set(marks):
        for mark in marks:
            command = rf"\{_ACCENTS[mark]}{{{command}}}"
        return command
    # Marks that LaTeX's fonts lack are dropped.
    parts = [part for part in (base, *marks) if not unicodedata.combining(part)]
    return "".join(map(_command, parts))


def to_latex(page: RenderedTable, max_rows: int | None = None) -> str:
    r"""Return a table with a caption for \input, in ASCII and no wider than the text.

    A table that fills more than a page is a longtable.
    """
    view = fitting_view(page, max_rows)
    columns = "".join(map(itemgetter(0), view.sides))
    # A head is a stack of lines, since a long one would widen its column.
    stacks = []
    for side, lines in zip(view.sides, heads(view), strict=True):
        stacks.append(rf"\shortstack[{side[0]}]{{{_LINE_BREAK.join(map(_escaped, lines))}}}")
    head = [r"\toprule", " & ".join(stacks) + r" \\", r"\midrule"]
    texts = [_aligned(column.entries) for column in view.grid.columns]
    rows = list(map(_row, zip(*texts, strict=True)))
    notes = [rf"\par {_with_code(note)}" for note in view.numbered_notes]
    # What is shown, and how it is summarised: the first sentence of the reading.
    reading = f"{page.table.title}. {view.caption.partition('. ')[0].rstrip('.')}."
    caption = rf"\caption{{{_with_code(reading)}}}\label{{tab:{page.table.name}}}"
    # Ragged: names such as train_step are not hyphenated, and would reach into the margin.
    more = f"{view.caption.partition('. ')[2]} {page.provenance}".strip()
    reading = rf"\par\raggedright\footnotesize {_with_code(more)}"
    size = [r"\small", rf"\setlength{{\tabcolsep}}{{{BETWEEN_COLUMNS_PT / 2:g}pt}}"]
    left_out = [f"% {_escaped(view.left_out)}"] if view.left_out else []
    if len(rows) + len(notes) <= _PAGE_ROWS:
        needs = r"% needs \usepackage{booktabs}"
        table = [rf"\begin{{tabular}}{{{columns}}}", *head, *rows, r"\bottomrule", r"\end{tabular}"]
        lines = [r"\begin{table}", r"\centering", *size, caption, *table, reading, *notes]
        lines.append(r"\end{table}")
    else:
        needs = r"% needs \usepackage{booktabs,longtable}"
        table = [rf"\begin{{longtable}}{{{columns}}}", rf"{caption}\\", *head, r"\endfirsthead"]
        table += [*head, r"\endhead", r"\bottomrule", r"\endfoot", *rows, r"\end{longtable}"]
        width = r"\setlength{\LTcapwidth}{\textwidth}"
        lines = [r"\begingroup", *size, width, *table, reading, *notes, r"\par\endgroup"]
    return "\n".join([needs, *left_out, *lines]) + "\n"


def _aligned(entries: Sequence[Entry]) -> list[str]:
    """Return the texts of a column. Points of numbers are below each other, and so are the ends.

    A phantom takes the room of digits and marks that an entry lacks and another one has.
    """
    numbers = [one for one in entries if one.number is not None]
    are_plain = all(_NUMBER.fullmatch(one.text) and not one.spread for one in numbers)
    digits = max((one.text.partition(".")[2] for one in numbers if are_plain), key=len, default="")
    marks = max((one.marks for one in numbers), key=len, default="")
    texts = []
    for entry in entries:
        latex = _escaped(f"{entry.text}{entry.spread}")
        if entry.number is not None:
            behind = entry.text.partition(".")[2]
            missing = ("" if behind or not digits else ".") + digits[len(behind) :]
            latex += _phantom(missing) + _marks(entry.marks) + _phantom(marks[len(entry.marks) :])
        texts.append(latex)
    return texts


def _phantom(text: str) -> str:
    return rf"\phantom{{{_marks(text)}}}" if text else ""


def _marks(text: str) -> str:
    # The tilde of a text stands as high as an accent.
    return _escaped(text).replace(_MARKUP[NOISE_MARK], r"\ensuremath{\sim}")


def _row(texts: Iterable[str]) -> str:
    row = " & ".join(texts)
    if row.startswith(("[", "*")):
        row = "{}" + row  # the `\\` of the row before would read it as its argument
    return row + r" \\"


def _escaped(text: str) -> str:
    return to_ascii_latex(printable(text))


def _with_code(text: str) -> str:
    r"""Return a sentence with each `word` in backquotes as \texttt{word}."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # the last one has no end
        return _escaped(text)
    for index, part in enumerate(parts):
        parts[index] = rf"\texttt{{{_escaped(part)}}}" if index % 2 else _escaped(part)
    return "".join(parts)
