"""Colours of charts and page: one table for the light theme and the dark one.

Charts are drawn in light colours. On the page each of these becomes a CSS variable, so that one
drawing follows the theme. The closest pair of precisions is 23 apart in CIELAB when seen with protanopia, deuteranopia or
tritanopia.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LIGHT, DARK = 0, 1
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"

# CSS variable: colour in the light theme and in the dark one.
COLOURS: Mapping[str, tuple[str, str]] = {
    "bg": ("#fdfdfb", "#14171a"),
    "panel": ("#f5f5f1", "#1c2024"),
    "ink": ("#1c2024", "#e8e8e4"),
    "ink2": ("#59616a", "#a3abb3"),
    "rule": ("#e6e6e1", "#2a2f34"),
    "rule2": ("#c6c8c6", "#4a5158"),
    "link": ("#0b57a4", "#82b7ef"),
    "ramp": ("#12558f", "#5c9bd8"),
    "low": ("#000000", "#ffffff"),
    "high": ("#ffffff", "#000000"),
    "bad": ("#a3200d", "#ff9b86"),
    "bad-bg": ("#fbe9e4", "#3a1d17"),
    "fp32": ("#6b7178", "#b9bfc6"),
    "tf32": ("#c9740a", "#e8983a"),
    "bf16": ("#1c5fb9", "#6fa8f5"),
    "k1": ("#1c5fb8", "#6fa8f5"),
    "k2": ("#d9932b", "#e0a54a"),
    "k3": ("#86b4e6", "#39608f"),
    "k4": ("#8d4fa8", "#c08bdb"),
    "k5": ("#3f9d87", "#59bda5"),
    "k6": ("#b5bac0", "#6a7178"),
    "m1": ("#274b6d", "#88b1d8"),
    "m2": ("#5b84ad", "#5a83ab"),
    "m3": ("#a9c4dd", "#33506c"),
    "m4": ("#d8b26a", "#d8b26a"),
    "m5": ("#b65f2c", "#e58a54"),
    "m6": ("#e3a26f", "#8f5533"),
    "m7": ("#c3c6c9", "#9aa1a8"),
    "s1": ("#9fbfdd", "#35587a"),
    "s2": ("#6f9fcc", "#45759f"),
    "s3": ("#3f7db8", "#5e97c8"),
    "s4": ("#1f5c97", "#8abbe6"),
    "s5": ("#0c3764", "#c4e0f8"),
}
_BY_VALUE = {light: name for name, (light, _) in COLOURS.items()}
_PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "k4", "bf16_pure": "k5"}
MOST_COLOURS = 6
# Implementations of attention that keep no scores: one kernel does all of it.
FUSED = ("efficient", "flash", "cudnn", "flex", "sdpa")


def light(name: str) -> str:
    """Return a colour of the light theme, in which charts are drawn."""
    return COLOURS[name][LIGHT]


def colours_of(axis: str, values: Sequence[object]) -> dict[str, str]:
    """Return a colour for each value of an axis. Sizes have a ramp, since they are ordered."""
    texts = list(map(str, values))
    if axis == "precision":
        return {text: _PRECISIONS.get(text, "k6") for text in texts}
    if axis == "model_name":
        last = max(len(texts) - 1, 1)
        return {text: f"s{1 + round(4 * index / last)}" for index, text in enumerate(texts)}
    return {text: f"k{1 + index % MOST_COLOURS}" for index, text in enumerate(texts)}


def variables(theme: int) -> str:
    """Return the colours of a theme as CSS variables."""
    return "".join(f"--{name}:{values[theme]};" for name, values in COLOURS.items())


def with_variables(svg: str) -> str:
    """Replace the colours of a drawing by CSS variables."""
    return re.sub(
        r'"(#[0-9a-f]{6})"',
        lambda found: f'"var(--{_BY_VALUE[found[1]]})"' if found[1] in _BY_VALUE else found[0],
        svg,
    )
