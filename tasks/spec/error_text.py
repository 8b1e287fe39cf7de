"""Texts of exceptions. Many have none, or one that explains nothing, such as that of a KeyError."""

from __future__ import annotations

import traceback
from pathlib import Path

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
    return message if _is_sentence(error, message) else typed_error_text(error)


def typed_error_text(error: BaseException) -> str:
    """Return type and message, and the place in the code if the message is not a sentence."""
    kind, message = type(error).__name__, message_of(error).strip()
    if _is_sentence(error, message):
        return f"{kind}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return f"{kind}: {message}" if message else kind
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return f"{kind}: {message or frames[-1].line or 'no message'} ({place})"


def _is_sentence(error: BaseException, message: str) -> bool:
    return len(message.split()) >= _FEWEST_WORDS and not isinstance(error, KeyError)
