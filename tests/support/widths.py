"""Widths of texts for a screen."""

from __future__ import annotations


def widest(text: str) -> int:
    """Return the length of the longest line. Commands are never broken, and do not count."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("sweep "))
    return max(map(len, lines))
