"""Texts for messages: of exceptions, on one line, and short. Light, so that `sweep --help` is fast.

Many exceptions have no text, or one that explains nothing, such as that of a KeyError.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_FEWEST_WORDS = 3  # a shorter text is not a sentence


def message_of(error: BaseException) -> str:
    """Return an error's message, even if its `__str__` raises."""
    try:
        return str(error)
    except BaseException as broken:
        return f"its message cannot be read: {type(broken).__name__}"


def error_text(error: BaseException) -> str:
    """Return an error's message, with its type and place if the message is not a sentence."""
    message = message_of(error).strip()
    if _is_sentence(error, message):
        return message
    return typed_error_text(error)


def typed_error_text(error: BaseException) -> str:
    """Return type and message, and the place in the code if the message is not a sentence."""
    kind, message = type(error).__name__, message_of(error).strip()
    if _is_sentence(error, message):
        return f"{kind}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ": ".join(filter(None, [kind, message]))
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return f"{kind}: {message or frames[-1].line or 'no message'} ({place})"


def _is_sentence(error: BaseException, message: str) -> bool:
    return len(message.split()) >= _FEWEST_WORDS and not isinstance(error, KeyError)


def assignments(values: Mapping[str, object]) -> list[str]:
    """Return `name=value` for each of the values."""
    return [f"{name}={value}" for name, value in values.items()]


def escape_unprintable(text: str) -> str:
    """Return the text with unprintable characters as Python escapes them."""
    # A value may hold line breaks or control sequences of a terminal.
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def escape_controls(text: str) -> str:
    """Return a text of several lines in which no letter commands a terminal or cannot be written.

    These are control characters, marks that reverse the direction of writing, and halves of
    surrogate pairs. They may be in any value of a run.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def is_utf8(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which no table or terminal holds."""
    return _SURROGATE.search(text) is None


def shorten(text: str, most: int) -> str:
    """Return at most this number of characters of a text, with "…" for what is left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
