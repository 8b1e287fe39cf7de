"""Text for LaTeX in ASCII: pdflatex stops at letters that its fonts lack."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from tabulate import LATEX_ESCAPE_RULES

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
_COMMANDS = (
    LATEX_ESCAPE_RULES
    | _TEXT
    | {letter: rf"\ensuremath{{{command}}}" for letter, command in _MATHEMATICS.items()}
)
# Includes the second of two hyphens, which LaTeX would print as a dash.
_TO_REPLACE = re.compile(rf"(?<=-)-|[`|{re.escape(''.join(LATEX_ESCAPE_RULES))}]|[^\x00-\x7f]")


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
