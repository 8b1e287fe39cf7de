"""Texts as one line of printable characters. Imports nothing, so that `sweep --help` stays fast."""

from __future__ import annotations


def escape_unprintable(text: str) -> str:
    """Return the text with unprintable characters as Python escapes them."""
    # A value may hold line breaks or control sequences of a terminal.
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shorten(text: str, most: int) -> str:
    """Return at most this number of characters of a text, with "…" for what is left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
