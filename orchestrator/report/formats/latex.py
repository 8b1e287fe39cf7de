"""Text for LaTeX in ASCII, because pdflatex stops at letters that its fonts lack, and names may
have any letters.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from tabulate import LATEX_ESCAPE_RULES

UNKNOWN = "?"  # stands for letters that no font of pdflatex has, such as Chinese

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
    **{letter: f"^{digit}" for digit, letter in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{letter: f"_{digit}" for digit, letter in enumerate("₀₁₂₃₄₅₆₇₈₉")},
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
_TO_REPLACE = re.compile(
    rf"(?<=-)-|[`|{re.escape(''.join(LATEX_ESCAPE_RULES))}]|[^\x00-\x7f]"
)  # two hyphens were a dash


def to_ascii_latex(text: str) -> str:
    """Return LaTeX in ASCII that prints the text; nothing in the text is treated as markup."""
    composed = text if text.isascii() else unicodedata.normalize("NFC", text)
    return _TO_REPLACE.sub(lambda found: _command(found[0]), composed)


@cache
def _command(letter: str) -> str:
    if letter in _COMMANDS:
        return _COMMANDS[letter]
    base, *marks = list(unicodedata.normalize("NFKD", letter))
    if not marks:
        return _command(base) if base != letter else base if base.isascii() else UNKNOWN
    if all(mark in _ACCENTS for mark in marks):
        return _with_accents(_command(base), marks)
    return "".join(_command(part) for part in (base, *marks) if not unicodedata.combining(part))


def _with_accents(base: str, marks: list[str]) -> str:
    for mark in marks:
        base = rf"\{_ACCENTS[mark]}{{{base}}}"
    return base
